"""Write a torch_dist checkpoint that megatron-core's default load accepts.

The bytes of the tensors are not written here: ``chunks`` says where they go, and ``finish_chunk`` puts a record's
header and trailer around them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mtpconvert.errors import TargetError
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.durable import TargetFiles, sync
from mtpconvert.stores.torch_dist import layout
from mtpconvert.stores.torch_dist.common import COMMON_FILE, COMMON_STATE, common_dict
from mtpconvert.stores.torch_dist.extra_state import extra_state_keys
from mtpconvert.stores.torch_dist.metadata_pickle import metadata_pickle
from mtpconvert.stores.torch_dist.record_write import object_container
from mtpconvert.stores.torch_dist.stored import Place
from mtpconvert.tensors import DTYPE_BITS, Box, Shape, TensorSpec

Spec = Literal["te", "local"]
McoreVersion = Literal["0.16", "0.19"]

# megatron/core/dist_checkpointing/core.py:CheckpointingConfig of either version
_CONFIG: dict[str, dict[str, object]] = {
    "0.16": {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    },
    "0.19": {"sharded_backend": "torch_dist", "sharded_backend_version": 1},
}


class TorchDistWriter:
    """Writer of one iteration folder, which must exist and be empty.

    ``specs``: logical tensors under canonical names; records follow their order, over ``files`` files of about the
    same size. ``chunk_boxes``: per tensor the boxes to store apart; without, the whole tensor is one chunk.
    ``stacked``: the trunk tensors that share one key over all layers (True: all, False: none). ``common``: ``args``
    as a dict of plain values and TorchDtypes, and ``iteration``.

    Raises NotRepresentableError for a dtype, a module or a stacking that the format has no place for.
    """

    wants_crc = True

    def __init__(
        self,
        iteration_dir: Path,
        specs: Sequence[TensorSpec],
        chunk_boxes: Mapping[str, Sequence[Box]],
        *,
        stacked: Collection[str] | bool,
        spec: Spec = "te",
        mcore_version: McoreVersion = "0.16",
        common: Mapping[str, object],
        files: int = 2,
    ) -> None:
        self.root = Path(iteration_dir)
        self._version = mcore_version
        self._common = common_dict(common)
        self._targets, self._layers = layout.targets(specs, stacked, local=spec == "local")
        self._placed, self._sizes = layout.place(self._targets, chunk_boxes, files)
        self._names = [f"__0_{number}.distcp" for number in range(len(self._sizes))]
        self._files = TargetFiles(self.path)
        self._unfinished = {(name, number) for name, own in self._placed.items() for number, _ in enumerate(own)}

    @property
    def nbytes(self) -> int:
        """Size of the tensors' files together."""
        return sum(self._sizes)

    def create(self) -> None:
        """Create the files at their full size, without their content. Raises TargetError."""
        for name, size in zip(self._names, self._sizes, strict=True):
            with _writing(self.root / name):
                fd = os.open(self.root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                try:
                    os.ftruncate(fd, size)
                finally:
                    os.close(fd)
        for name, own in self._placed.items():
            for number, one in enumerate(own):
                if not one.record.nbytes:
                    self.finish_chunk(name, number, 0)

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Where each chunk's bytes go; in C order."""
        return [
            Chunk(one.box, one.file, one.record.data, _c_strides(one.box, one.record.dtype))
            for one in self._placed[name]
        ]

    def path(self, file: int) -> Path:
        return self.root / self._names[file]

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        self._files.write(file, content, offset)

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        self._files.write_back(file, offset, nbytes)

    def finish_chunk(self, name: str, number: int, crc32: int) -> None:
        """Write the record around the chunk's bytes; ``crc32`` is theirs. Any thread, once per chunk."""
        one = self._placed[name][number]
        record = one.record
        self._files.write(one.file, record.header(crc32), record.base)
        self._files.write(one.file, record.trailer(crc32), record.data + record.nbytes)
        self._unfinished.discard((name, number))

    def commit(self) -> None:
        """Write the objects, ``common.pt``, ``metadata.json`` and last ``.metadata``; everything is on disk after.

        Raises TargetError, and ValueError when a chunk was never finished.
        """
        if self._unfinished:
            name, number = min(self._unfinished)
            raise ValueError(f"chunk {number} of {name} and {len(self._unfinished) - 1} more were never finished")
        objects = self._write_objects(f"__0_{len(self._names)}.distcp")
        for name in self._names:
            with _writing(self.root / name):
                sync(self.root / name)
        self.close()
        self._write(COMMON_FILE, object_container(self._common))
        self._write("metadata.json", json.dumps(_CONFIG[self._version]).encode())
        tensors = layout.stored_tensors(self._targets, self._placed, self._layers, self._names)
        self._write(".metadata", metadata_pickle(tensors, objects))
        with _writing(self.root):
            sync(self.root)

    def close(self) -> None:
        """Let go of the files; done by ``commit``, needed after a failure."""
        self._files.close()

    def _write_objects(self, name: str) -> dict[str, Place]:
        stacked = frozenset(target.spec.name for target in self._targets if target.layer is not None)
        keys = extra_state_keys([target.spec for target in self._targets], stacked, self._layers)
        nothing = object_container([None])
        blob = bytearray(nothing * len(keys))
        places = {key: Place(name, number * len(nothing), len(nothing)) for number, key in enumerate(keys)}
        if self._version == "0.19":
            state = object_container([self._common])
            places[COMMON_STATE] = Place(name, len(blob), len(state))
            blob += state
        if places:
            self._write(name, bytes(blob))
        return places

    def _write(self, name: str, content: bytes) -> None:
        with _writing(self.root / name), (self.root / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise TargetError(
            f"{path} cannot be written: {problem.strerror}",
            where=str(path),
            next_step="free space or choose another target",
        ) from problem


def _c_strides(box: Box, dtype: str) -> Shape:
    step, strides = DTYPE_BITS[dtype] // 8, []
    for start, stop in reversed(box):
        strides.append(step)
        step *= max(stop - start, 1)
    return tuple(reversed(strides))
