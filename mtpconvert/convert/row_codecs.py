"""Tensors whose row has a codec, between store and executor: computed whole, since they are as small as norms are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from mtpconvert.codecs import minus_one
from mtpconvert.errors import NotRepresentableError
from mtpconvert.stores.base import Chunk, Reader, Writer
from mtpconvert.tensors import Inventory

COMPUTED = -(1 << 20)  # numbers of files from here down exist only in memory


def refuse_dtypes(names: Iterable[str], inventory: Inventory, where: str) -> None:
    """Raise NotRepresentableError for a tensor in a dtype that its codec does not know."""
    for name in names:
        if inventory[name].dtype not in minus_one.DTYPES:
            raise NotRepresentableError(
                f"{name} is {inventory[name].dtype}; 1 is subtracted from {', '.join(minus_one.DTYPES)} only",
                where=where,
                next_step="save it in one of these",
            )


class ComputedReader:
    """``inner`` with the tensors ``names`` as Megatron keeps them. ``lost``: elements that do not come back."""

    def __init__(self, inner: Reader, names: Iterable[str]) -> None:
        self.kind, self.root, self._inner = inner.kind, inner.root, inner
        self._names = list(names)
        self._starts: list[int] = []
        self._contents: dict[str, bytes] = {}
        self.lost: dict[str, int] = {}
        inventory, at = inner.inventory(), 0
        refuse_dtypes(self._names, inventory, str(inner.root))
        for name in self._names:
            self._starts.append(at)
            raw, dtype = whole_bytes(inner, name), inventory[name].dtype
            self._contents[name] = minus_one.less_one(raw, dtype)
            if count := minus_one.lost_elements(raw, dtype):
                self.lost[name] = count
            at += len(raw)

    def notes(self) -> list[str]:
        if not self._names:
            return []
        words = f"{len(self._names)} norms are kept less one, as Megatron's zero-centred norms need them"
        if self.lost:
            words += (
                f"; {sum(self.lost.values())} elements of {len(self.lost)} do not come back by adding one:"
                " their originals are kept in hf_assets"
            )
        return [words]

    def inventory(self) -> Inventory:
        return self._inner.inventory()

    def chunks(self, name: str) -> tuple[Chunk, ...]:
        if name not in self._contents:
            return tuple(self._inner.chunks(name))
        spec = self._inner.inventory()[name]
        size = 4 if spec.dtype == "F32" else 2
        strides, step = [], size
        for extent in reversed(spec.shape):
            strides.append(step)
            step *= extent
        box = tuple((0, extent) for extent in spec.shape)
        return (Chunk(box, COMPUTED, self._starts[self._names.index(name)], tuple(reversed(strides))),)

    def path(self, file: int) -> Path:
        return self.root if file == COMPUTED else self._inner.path(file)

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        if file != COMPUTED:
            self._inner.read(file, buffer, offset)
            return
        number = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[number]
        buffer[:] = self._contents[self._names[number]][start : start + len(buffer)]


@dataclass
class Restored:
    """Elements that came back by computing, and by a kept original."""

    computed: int = 0
    kept: int = 0

    def notes(self) -> list[str]:
        if not self.computed + self.kept:
            return []
        return [f"{self.computed} elements of norms got the one added back; {self.kept} are originals that were kept"]


class ComputingWriter:
    """``inner`` for values as Megatron keeps them. ``originals``: a Reader of the tensors that do not come back by
    computing, or None; an element of theirs that Megatron did not change gets its old bits."""

    wants_crc = False

    def __init__(self, inner: Writer, names: Iterable[str], specs: Inventory, originals: Reader | None) -> None:
        self._inner, self._specs, self._originals = inner, specs, originals
        self._names = list(names)
        refuse_dtypes(self._names, specs, "the target")
        self._buffers: dict[str, bytearray] = {}
        self._lock = Lock()
        self.restored = Restored()

    def create(self) -> None:
        self._inner.create()

    def chunks(self, name: str) -> tuple[Chunk, ...]:
        if name not in self._names:
            return tuple(self._inner.chunks(name))
        (chunk,) = self._inner.chunks(name)
        return (Chunk(chunk.box, COMPUTED - self._names.index(name), 0, chunk.strides),)

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        if file > COMPUTED:
            self._inner.write(file, content, offset)
            return
        name = self._names[COMPUTED - file]
        buffer = self._buffers.setdefault(name, bytearray(self._specs[name].nbytes))
        buffer[offset : offset + len(content)] = content

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        if file > COMPUTED:
            self._inner.write_back(file, offset, nbytes)

    def finish_chunk(self, name: str, number: int, crc32: int) -> None:
        if name in self._names:
            content, dtype = bytes(self._buffers.pop(name)), self._specs[name].dtype
            numel, kept = self._specs[name].numel, 0
            if self._originals is not None and self._originals.inventory().get(name) == self._specs[name]:
                content, kept = minus_one.restored(content, whole_bytes(self._originals, name), dtype)
            else:
                content = minus_one.plus_one(content, dtype)
            with self._lock:
                self.restored.kept += kept
                self.restored.computed += numel - kept
            (chunk,) = self._inner.chunks(name)
            self._inner.write(chunk.file, content, chunk.offset)
        self._inner.finish_chunk(name, number, crc32)

    def commit(self) -> None:
        self._inner.commit()

    def close(self) -> None:
        self._inner.close()


def whole_bytes(reader: Reader, name: str) -> bytes:
    """A tensor that is one C-contiguous chunk."""
    (chunk,) = reader.chunks(name)
    content = bytearray(reader.inventory()[name].nbytes)
    reader.read(chunk.file, memoryview(content), chunk.offset)
    return bytes(content)
