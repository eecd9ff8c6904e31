"""Writes the files of a layout: created at full size with their headers, filled by others, index last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtpconvert.errors import TargetError, some
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.durable import TargetFiles, sync
from mtpconvert.stores.safetensors.layout import SafetensorsLayout, Shard
from mtpconvert.stores.safetensors.reader import chunk_of


class SafetensorsWriter:
    """Writer of ``layout`` into the directory ``tmp_root``, which it makes; whoever owns it renames it at the end.

    Every method raises TargetError when the disk does not do what is asked of it.
    """

    wants_crc = False

    def __init__(self, tmp_root: Path, layout: SafetensorsLayout) -> None:
        self.tmp_root = tmp_root
        self.layout = layout
        self._places = layout.places
        self._files = TargetFiles(self.path)
        self._pending = {name for name, (_, spec, _) in self._places.items() if spec.nbytes}

    def create(self) -> None:
        """Make every file, header written, at its full size (of holes). Files that an earlier, interrupted run made
        of the same layout are left as they are; other files in their place are refused."""
        with _naming(self.tmp_root):
            self.tmp_root.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(self.layout.shards):
            with _naming(self.path(number)):
                self._create_file(self.path(number), shard)

    def chunks(self, name: str) -> tuple[Chunk]:
        return (chunk_of(*self._places[name]),)

    def path(self, file: int) -> Path:
        return self.tmp_root / self.layout.shards[file].name

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        self._files.write(file, content, offset)

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        self._files.write_back(file, offset, nbytes)

    def finish_chunk(self, name: str, number: int, crc32: int) -> None:
        """Take note that the tensor ``name`` is complete; ``crc32`` has no place in this format."""
        if number != 0 or name not in self._places:
            raise self._misuse(f"tensor {name} has no chunk {number} here")
        if self._places[name][1].nbytes and name not in self._pending:
            raise self._misuse(f"tensor {name} was written twice")
        self._pending.discard(name)

    def commit(self) -> None:
        """Sync every file, then write and sync the index, then the directory.

        Raises TargetError, and writes no index, while a tensor with bytes has not been finished.
        """
        if self._pending:
            unwritten = [name for name in self._places if name in self._pending]
            raise self._misuse(f"{len(unwritten)} of {len(self._places)} tensors were never written: {some(unwritten)}")
        self._files.close()
        for number in range(len(self.layout.shards)):
            with _naming(self.path(number)):
                sync(self.path(number))
        if self.layout.index is not None:
            path = self.tmp_root / self.layout.index.name
            with _naming(path):
                path.write_bytes(self.layout.index.raw)
                sync(path)
        with _naming(self.tmp_root):
            sync(self.tmp_root)

    def close(self) -> None:
        self._files.close()

    def _misuse(self, what: str) -> TargetError:
        """The refusal of calls that cannot make a whole checkpoint: a fault in the caller, not in the disk."""
        return TargetError(what, where=str(self.tmp_root), next_step="nothing was published; report this as a bug")

    def _create_file(self, path: Path, shard: Shard) -> None:
        header = shard.header
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(header.raw)) == header.raw and file.seek(0, os.SEEK_END) == header.end:
                    return
            raise TargetError(
                f"{path.name} is there already and is another file than the one to be written",
                where=str(path),
                next_step="remove the unfinished directory and start again",
            )
        fresh = path.with_name(f".{path.name}.new")  # so that a file under its name always has its full size
        with fresh.open("wb") as file:
            file.write(header.raw)
            file.truncate(header.end)
        fresh.replace(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a TargetError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise TargetError(
            f"cannot write {path.name}: {error.strerror}",
            where=str(path),
            next_step="check free space and permissions of the target, then start again",
        ) from error
