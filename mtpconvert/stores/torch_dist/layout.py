"""Where a torch_dist checkpoint puts its tensors: keys, chunks, files, and the byte of every record."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtpconvert.errors import NotRepresentableError
from mtpconvert.stores.torch_dist.cover import first_flaw
from mtpconvert.stores.torch_dist.dialects import local_names
from mtpconvert.stores.torch_dist.record_write import RecordLayout, lay_out
from mtpconvert.stores.torch_dist.stored import Place, StoredChunk, StoredTensor
from mtpconvert.tensors import Box, Shape, TensorSpec, whole

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A logical tensor's place: ``key`` of ``.metadata``; ``layer``: its index on that key's first axis, or None."""

    spec: TensorSpec
    key: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class Placed:
    """One chunk: its box in the logical tensor, the number of its file, its record."""

    box: Box
    file: int
    record: RecordLayout


def targets(specs: Sequence[TensorSpec], stacked: Collection[str] | bool, local: bool) -> tuple[list[Target], int]:
    """Key and layer of each tensor, in the order of ``specs``, and the number of stacked layers (0: none).

    ``stacked``: the canonical names of trunk tensors that share one key, or True for all, False for none.
    Raises NotRepresentableError when layers that should share a key differ, or have no local spec.
    """
    names = local_names(spec.name for spec in specs) if local else {spec.name: spec.name for spec in specs}
    found: list[Target] = []
    groups: defaultdict[str, dict[int, TensorSpec]] = defaultdict(dict)
    for spec in specs:
        match = _LAYER.fullmatch(names[spec.name])
        if match and (stacked is True or (stacked is not False and spec.name in stacked)):
            key, layer = f"decoder.layers.{match[2]}", int(match[1])
            groups[key][layer] = spec
            found.append(Target(spec, key, layer))
        else:
            found.append(Target(spec, names[spec.name], None))
    layers = 1 + max((layer for group in groups.values() for layer in group), default=-1)
    for key, group in groups.items():
        if set(group) != set(range(layers)) or len({(s.shape, s.dtype) for s in group.values()}) > 1:
            raise NotRepresentableError(
                f"the layers cannot be stored under the one key {key}: not all of {layers} layers have it alike",
                where=key,
                next_step="store the layers under keys of their own (moe_layer_freq as a list)",
            )
    return found, layers


def place(
    wanted: Iterable[Target], boxes: Mapping[str, Sequence[Box]], files: int
) -> tuple[dict[str, list[Placed]], list[int]]:
    """Records of all chunks, one after another in the order of ``wanted``, over at most ``files`` files.

    Files are filled in turn, each with about the same number of bytes; a tensor is split between two only when it is
    larger than a file's share. Returns the chunks of each tensor and the size of each file. Tensors without ``boxes``
    are one chunk. Raises ValueError when boxes do not cover their tensor.
    """
    wanted = list(wanted)
    total = sum(target.spec.nbytes for target in wanted)
    sizes = [0]
    placed: dict[str, list[Placed]] = {}
    done = 0
    for target in wanted:
        spec = target.spec
        own = list(boxes.get(spec.name) or [whole(spec.name, spec.shape).box])
        flaw = first_flaw(spec.shape, own)
        if flaw is not None:
            raise ValueError(f"chunks of {spec.name}: {flaw}")
        splits = spec.nbytes * files > total
        if not splits:
            _open_until(sizes, _file_of(done + spec.nbytes // 2, total, files))
        placed[spec.name] = []
        for box in own:
            extents = tuple(stop - start for start, stop in box)
            shape = extents if target.layer is None else (1, *extents)
            record = lay_out(sizes[-1], spec.dtype, shape)
            if splits and sizes[-1]:
                _open_until(sizes, _file_of(done + record.nbytes // 2, total, files))
                record = lay_out(sizes[-1], spec.dtype, shape)
            placed[spec.name].append(Placed(box, len(sizes) - 1, record))
            sizes[-1] = record.end
            done += record.nbytes
    return placed, sizes


def _file_of(byte: int, total: int, files: int) -> int:
    return min(byte * files // max(total, 1), files - 1)


def _open_until(sizes: list[int], number: int) -> None:
    """Begin the next file when it is the turn of ``number``; never leave one empty."""
    if number >= len(sizes) and sizes[-1]:
        sizes.append(0)


def stored_tensors(
    wanted: Iterable[Target], placed: Mapping[str, Sequence[Placed]], layers: int, names: Sequence[str]
) -> list[StoredTensor]:
    """The tensors as ``.metadata`` lists them; ``names``: of the files."""
    merged: dict[str, tuple[str, Shape, list[StoredChunk]]] = {}
    for target in wanted:
        spec, layer = target.spec, target.layer
        shape = spec.shape if layer is None else (layers, *spec.shape)
        _, _, chunks = merged.setdefault(target.key, (spec.dtype, shape, []))
        for one in placed[spec.name]:
            starts = tuple(start for start, _ in one.box)
            offsets = starts if layer is None else (layer, *starts)
            record = one.record
            chunks.append(
                StoredChunk(offsets, record.shape, Place(names[one.file], record.base, record.end - record.base))
            )
    return [StoredTensor(key, dtype, shape, chunks) for key, (dtype, shape, chunks) in merged.items()]
