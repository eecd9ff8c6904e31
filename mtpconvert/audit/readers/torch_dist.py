"""A Megatron-Core ``torch_dist`` checkpoint: ``.metadata``, ``*.distcp``, the arguments.

Sources: torch/distributed/checkpoint/metadata.py (``Metadata``), filesystem.py (``_StorageInfo``);
megatron/core/dist_checkpointing/strategies/common.py and serialization.py (``common.pt``, ``common_state/shard_0_1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

from mtpconvert.audit.findings import finding
from mtpconvert.audit.readers.arguments import arguments_of
from mtpconvert.audit.readers.pickles import DTYPES, Inert, read_pickle
from mtpconvert.audit.readers.records import Stored, read_archive
from mtpconvert.audit.readers.run_config import bridge_arguments, called
from mtpconvert.audit.readers.side import Piece, Record, Side, itemsize
from mtpconvert.errors import CheckpointError, some
from mtpconvert.tensors import Box, TensorSpec

# What a checkpoint of weights may hold besides them; everything else is reported.
_TRAINING_STATE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")


def open_torch_dist(folder: Path, label: str) -> Side:
    """Read ``.metadata`` and the arguments. CheckpointError when the metadata is not that of a DCP checkpoint."""
    try:
        return _open(folder, label)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"the metadata is not what torch.distributed.checkpoint writes ({error!r})",
            where=str(folder / ".metadata"),
            next_step="copy the checkpoint again from its origin",
        ) from error


def _open(folder: Path, label: str) -> Side:
    path = folder / ".metadata"
    metadata = read_pickle(path.read_bytes(), str(path))
    fields = metadata.fields() if isinstance(metadata, Inert) else {}
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CheckpointError("no torch.distributed.checkpoint metadata", where=str(path), next_step="save it again")
    where = _places(storage)
    side = Side(label, folder, "megatron", "torch_dist", {}, [], lambda name: ())
    chunks: dict[str, list[Box]] = {}
    others: list[str] = []
    for name, entry in entries.items():
        state = entry.fields() if isinstance(entry, Inert) else {}
        if "size" not in state or name.startswith(_TRAINING_STATE):
            side.objects += 1
            if "_extra_state" not in name and not name.startswith("common_state"):
                others.append(name)
            continue
        dtype = DTYPES.get(str(_dtype(state["properties"])), "")
        if not dtype:
            raise CheckpointError(f"a dtype that is not known: {_dtype(state['properties'])}", where=f"{path}: {name}")
        side.inventory[name] = TensorSpec(name, tuple(state["size"]), dtype)
        chunks[name] = [_box(chunk) for chunk in state["chunks"]]
        _check_cover(side, name, chunks[name])
    if others:
        training = sum(name.startswith(_TRAINING_STATE) for name in others)
        text = f"{len(others)} objects are not compared, {training} of them optimizer or random state: {some(others)}"
        side.findings.append(finding("objects-ignored", text, side=label, count=len(others)))
    files = sorted({place[0] for place in where.values()})
    side.files = [folder / name for name in files]
    side.bytes_total = sum(spec.nbytes for spec in side.inventory.values())
    _check_files(side, where)
    opener = _Opener(side, chunks, where, {name: number for number, name in enumerate(files)})
    side.locate, side.records = partial(_Opener.pieces, opener), partial(_Opener.records, opener)
    side.arguments = arguments_of(folder, where)
    if side.arguments is None:
        side.arguments, side.called = bridge_arguments(folder), called
    return side


def _places(storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    places = {}
    for index, info in storage.items():
        key, value = index.fields(), info.fields()
        offset = key.get("offset")
        places[key["fqn"], None if offset is None else tuple(offset)] = (
            str(value["relative_path"]), int(value["offset"]), int(value["length"]))  # fmt: skip
    return places


def _dtype(properties: Any) -> Any:
    state = properties.__dict__["state"] if isinstance(properties, Inert) else None
    return state[0] if isinstance(state, tuple) else properties.fields()["dtype"]


def _box(chunk: Any) -> Box:
    state = chunk.fields()
    return tuple((o, o + s) for o, s in zip(state["offsets"], state["sizes"], strict=True))


def _check_cover(side: Side, name: str, boxes: list[Box]) -> None:
    """Chunks are disjoint and fill the tensor; else a finding, and the tensor is not compared."""
    shape = side.inventory[name].shape
    volume = sum(prod(stop - start for start, stop in box) for box in boxes)
    inside = all(
        0 <= start <= stop <= extent for box in boxes for (start, stop), extent in zip(box, shape, strict=True)
    )
    pairs = combinations(boxes, 2) if len(boxes) <= 4096 else ()
    overlap = next(
        (pair for pair in pairs if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(*pair, strict=True))), None
    )
    if inside and volume == prod(shape) and overlap is None:
        return
    side.broken.add(name)
    what = f"chunks at {[s for s, _ in overlap[0]]} and {[s for s, _ in overlap[1]]} overlap" if overlap else (
        f"chunks hold {volume} of {prod(shape)} elements")  # fmt: skip
    side.findings.append(finding("chunk-layout", f"{name}: {what}", side=side.label, tensor=name))


def _check_files(side: Side, where: dict[Any, tuple[str, int, int]]) -> None:
    """Every chunk's bytes lie inside a file that is there: a stat per file, no read."""
    sizes = {path.name: path.stat().st_size if path.is_file() else -1 for path in side.files}
    lost: dict[str, list[str]] = {}
    for (name, _), (file, offset, length) in where.items():
        if offset + length > sizes[file] and name in side.inventory:
            lost.setdefault(file, []).append(name)
            side.broken.add(name)
    for file, names in sorted(lost.items()):
        state = "is not there" if sizes[file] < 0 else f"ends at byte {sizes[file]}"
        text = f"{file} {state}; {len(names)} chunks are lost, the first of {names[0]}"
        code = "index-missing-file" if sizes[file] < 0 else "file-truncated"
        side.findings.append(finding(code, text, side=side.label, tensor=names[0]))
    for path in sorted(side.root.glob("*.distcp")):
        if path.name not in sizes:
            text = f".metadata does not name {path.name}"
            side.findings.append(finding("file-stray", text, side=side.label))


class _Opener:
    """Finds the records of a tensor when it is asked for, and remembers them."""

    def __init__(self, side: Side, chunks: dict[str, list[Box]], where: dict[Any, Any], files: dict[str, int]) -> None:
        self._side, self._chunks, self._where, self._files = side, chunks, where, files
        self._found: dict[str, list[tuple[Box, int, Stored]]] = {}
        self._lock = Lock()  # two threads often ask for one tensor at a time: they would open its archives twice

    def _stored(self, name: str) -> list[tuple[Box, int, Stored]]:
        with self._lock:
            if name not in self._found:
                self._found[name] = self._open(name)
            return self._found[name]

    def _open(self, name: str) -> list[tuple[Box, int, Stored]]:
        found = []
        for box in self._chunks[name]:
            key = (name, tuple(start for start, _ in box))
            if key not in self._where:
                raise CheckpointError("the metadata gives no place for a chunk", where=f"{name} at {list(key[1])}")
            file, offset, length = self._where[key]
            _, tensors = read_archive(self._side.root / file, offset, length)
            if len(tensors) != 1:
                raise CheckpointError(f"{len(tensors)} tensors in the record of a chunk", where=f"{file}: {name}")
            stored = next(iter(tensors.values()))
            spec = self._side.inventory[name]
            extents = tuple(stop - start for start, stop in box)
            if stored.shape != extents or stored.dtype != spec.dtype:
                text = f"the record holds {stored.dtype} {list(stored.shape)}, not {spec.dtype} {list(extents)}"
                raise CheckpointError(text, where=f"{file}: {name}")
            found.append((box, self._files[file], stored))
        return found

    def pieces(self, name: str) -> Sequence[Piece]:
        size = itemsize(self._side.inventory[name].dtype)
        return [
            Piece(box, file, stored.offset, tuple(stride * size for stride in stored.strides))
            for box, file, stored in self._stored(name)
        ]

    def records(self, name: str) -> Sequence[Record]:
        return [
            Record(file, stored.entry_offset, stored.entry_length, stored.crc32)
            for _, file, stored in self._stored(name)
        ]
