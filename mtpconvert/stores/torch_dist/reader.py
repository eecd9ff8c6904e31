"""A torch_dist checkpoint as megatron-core writes it, presented as whole tensors under canonical names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from mtpconvert.errors import CheckpointError, IncompleteError
from mtpconvert.garbage import no_gc
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.source_files import SourceFiles
from mtpconvert.stores.torch_dist.bridge_arguments import BridgeArguments, bridge_arguments
from mtpconvert.stores.torch_dist.common import COMMON_STATE, Common, read_common
from mtpconvert.stores.torch_dist.cover import show
from mtpconvert.stores.torch_dist.kinds import check_dtypes, check_format, classify
from mtpconvert.stores.torch_dist.logical import Piece, assemble
from mtpconvert.stores.torch_dist.metadata_read import StoredKeys, check_files
from mtpconvert.stores.torch_dist.record import Record, read_record
from mtpconvert.stores.torch_dist.run_config import RUN_CONFIG, is_bridge, read_model
from mtpconvert.stores.torch_dist.stored import StoredChunk, StoredTensor
from mtpconvert.tensors import DTYPE_BITS, Box, Inventory, Shape

_OPEN_FILES = 64


class TorchDistReader:
    """Reader of one iteration folder.

    ``objects``: how many entries are no model weights, by kind. ``unknown_objects``: byte objects of no known kind.
    ``args``, ``common``, ``iteration``, ``checkpoint_version``: the common state, None or empty when there is none.
    Without ``args`` there, those that Megatron-Bridge's ``run_config.yaml`` stands for. ``args_file``: which of the two
    said them, or "". ``args_spelled``: argument -> field of that file, where it is called otherwise there.
    ``stacked``: layers lie under one key. ``notes``: facts for people.

    Raises CheckpointError (damaged, contradictory, fsdp_dtensor or another layout), IncompleteError (a file or record
    missing), NotRepresentableError (a hybrid model, a dtype without a safetensors name).
    """

    def __init__(self, iteration_dir: Path) -> None:
        self.root = Path(iteration_dir)
        self.kind = "Megatron-Bridge torch_dist" if is_bridge(self.root) else "Megatron torch_dist"
        with no_gc():
            self._read()
        self._by_layer: dict[str, dict[int, list[StoredChunk]]] = {}
        self._fds: dict[int, int] = {}
        self._lock = Lock()
        self._bytes = SourceFiles(self.path)

    def _read(self) -> None:
        keys = StoredKeys(self.root / ".metadata")
        check_format(self.root, keys)
        kinds = classify(keys)
        self.objects, self.unknown_objects = kinds.counts, kinds.unknown
        self._common = read_common(self.root, keys.place(COMMON_STATE) if COMMON_STATE in keys.object_keys else None)
        self._read_args()
        self._stored = {key: keys.tensor(key) for key in kinds.weights}
        check_dtypes(self._stored.values())
        self._files = sorted(check_files(self.root, self._stored.values()))
        self._file_numbers = {name: number for number, name in enumerate(self._files)}
        assembly = assemble(self._stored.values(), self.args or {})
        self._tensors, self.stacked = assembly.tensors, assembly.stacked
        self.notes = [*assembly.notes, *([] if self.args_file else _common_notes(self._common))]

    def _read_args(self) -> None:
        self.args: dict[str, object] | None = self._common.args
        self.args_file, spoken = self._common.source, BridgeArguments()
        if self.args is None:
            model = read_model(self.root)
            spoken = bridge_arguments(model or {})
            self.args = None if model is None else spoken.values
            self.args_file = "" if model is None else str(self.root / RUN_CONFIG)
        self.args_spelled = spoken.spelled

    @property
    def common(self) -> dict[str, object]:
        return self._common.values

    @property
    def iteration(self) -> int | None:
        return self._common.iteration

    @property
    def checkpoint_version(self) -> object:
        return self.common.get("checkpoint_version")

    def inventory(self) -> Inventory:
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def physical(self, name: str) -> list[str]:
        """The keys of ``.metadata`` that hold the tensor."""
        return [piece.key for piece in self._tensors[name].pieces]

    def path(self, file: int) -> Path:
        return self.root / self._files[file]

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Disjoint boxes that cover the tensor; reads the header of each record, no tensor bytes.

        Raises CheckpointError when a record contradicts ``.metadata`` or is damaged.
        """
        return [chunk for piece in self._tensors[name].pieces for chunk in self._piece_chunks(piece)]

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        self._bytes.read(file, buffer, offset)

    def close(self) -> None:
        self._bytes.close()
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def _piece_chunks(self, piece: Piece) -> list[Chunk]:
        tensor = self._stored[piece.key]
        found = []
        for stored in self._of_layer(tensor, piece.layer):
            box, offset, strides = self._located(tensor, stored)
            if piece.layer is not None:
                offset += (piece.layer - box[0][0]) * strides[0]
                box, strides = box[1:], strides[1:]
            placed = piece.box(box)
            strides = (0,) * (len(placed) - len(strides)) + strides
            file = self._file_numbers[stored.place.file]
            found.append(Chunk(placed, file, offset, _tidy(placed, strides, tensor.dtype)))
        return found

    def _of_layer(self, tensor: StoredTensor, layer: int | None) -> Sequence[StoredChunk]:
        if layer is None:
            return tensor.chunks
        if tensor.key not in self._by_layer:
            by_layer: dict[int, list[StoredChunk]] = {}
            for chunk in tensor.chunks:
                for one in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    by_layer.setdefault(one, []).append(chunk)
            self._by_layer[tensor.key] = by_layer
        return self._by_layer[tensor.key].get(layer, [])

    def _located(self, tensor: StoredTensor, chunk: StoredChunk) -> tuple[Box, int, Shape]:
        """Box, byte offset of its first element and byte strides, one per axis of the stored tensor."""
        where = f"{self.root / chunk.place.file}, {tensor.key} {show(chunk.box)}"
        record = self._record(chunk, where)
        missing = len(chunk.sizes) - len(record.shape)  # a save may leave out leading axes of length one
        if record.dtype != tensor.dtype or (1,) * missing + record.shape != chunk.sizes:
            raise CheckpointError(
                f"{where}: the record holds {record.dtype} {list(record.shape)}, "
                f".metadata says {tensor.dtype} {list(chunk.sizes)}",
                where=tensor.key,
                next_step="copy the checkpoint again, or save it again with megatron-core",
            )
        return chunk.box, record.offset, (0,) * missing + record.strides

    def _record(self, chunk: StoredChunk, where: str) -> Record:
        number = self._file_numbers[chunk.place.file]
        with self._lock:
            fd = self._fds.pop(number, None)
            if fd is None:
                while len(self._fds) >= _OPEN_FILES:
                    os.close(self._fds.pop(next(iter(self._fds))))
                fd = _open(self.path(number))
            self._fds[number] = fd  # last again: the first is the one used longest ago
            return read_record(fd, chunk.place.offset, chunk.place.length, where)


def _tidy(box: Box, strides: Shape, dtype: str) -> Shape:
    """The strides, with C order where an axis is too short to have any."""
    step, tidy = DTYPE_BITS[dtype] // 8, []
    for (start, stop), stride in zip(reversed(box), reversed(strides), strict=True):
        tidy.append(stride if stop - start > 1 else step)
        step *= max(stop - start, 1)
    return tuple(reversed(tidy))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise IncompleteError(f"{path} cannot be opened: {problem.strerror}", where=str(path)) from problem


def _common_notes(common: Common) -> list[str]:
    if not common.source:
        return ["neither common.pt nor common_state: training arguments and iteration are unknown"]
    return [] if common.args is not None else [f"{common.source} holds no training arguments that can be read"]
