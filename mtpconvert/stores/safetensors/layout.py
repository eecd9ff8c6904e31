"""Which tensor lies where in a set of safetensors files: the files' names, headers and index, without the weights.

A real Hugging Face directory, the headers kept in ``hf_assets/`` and a plan for new files are all this one object.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mtpconvert.errors import CheckpointError, some
from mtpconvert.garbage import no_gc
from mtpconvert.stores.safetensors.header import Header, damaged, parse_json_object
from mtpconvert.tensors import Inventory, TensorSpec, inventory_of

INDEX_NAME = "model.safetensors.index.json"  # transformers/utils/__init__.py: SAFE_WEIGHTS_INDEX_NAME
SINGLE_NAME = "model.safetensors"  # SAFE_WEIGHTS_NAME


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    header: Header


@dataclass(frozen=True)
class Index:
    """``*.safetensors.index.json``: its bytes, and tensor -> file name out of them. Equal when the bytes are."""

    raw: bytes
    name: str = field(default=INDEX_NAME)
    weight_map: dict[str, str] = field(default_factory=dict, compare=False)
    metadata: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class SafetensorsLayout:
    """Shards in file-name order and the index, if there is one; checked against each other when made.

    Raises CheckpointError when a tensor lies in two shards, index and headers disagree, or there is no tensor.
    ``where`` is named in errors and is no part of the layout's identity. ``notes``: what is odd but harmless.
    """

    shards: tuple[Shard, ...]
    index: Index | None = None
    where: str = field(default="", compare=False)
    notes: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        held: dict[str, str] = {}
        for shard in self.shards:
            file = shard.name
            for spec in shard.header.specs:
                first = held.setdefault(spec.name, file)
                if first != file:
                    raise CheckpointError(
                        f"tensor {spec.name} lies in two files: {first} and {file}",
                        where=self.where,
                        next_step="loaders differ in which one they take; remove one of the two from its file",
                    )
        if not held:
            raise CheckpointError(
                "there is not a single tensor in this checkpoint", where=self.where, next_step="check the path"
            )
        if self.index is not None:
            where = f"{self.where}/{self.index.name}"
            if self.index.weight_map != held:
                raise _disagreement(self.index.weight_map, held, where)
            self.notes.extend(self._check_totals(self.index, where))

    def __iter__(self) -> Iterator[tuple[int, TensorSpec, int]]:
        """Every tensor as (file number, spec, byte offset in that file), in the order of the bytes."""
        for number, shard in enumerate(self.shards):
            for spec, start in zip(shard.header.specs, shard.header.starts, strict=True):
                yield number, spec, start

    @property
    def index_bytes(self) -> bytes | None:
        return None if self.index is None else self.index.raw

    @cached_property
    def places(self) -> dict[str, tuple[int, TensorSpec, int]]:
        """Tensor name -> (file number, spec, byte offset in that file)."""
        with no_gc():
            return {place[1].name: place for place in self}

    def inventory(self) -> Inventory:
        with no_gc():
            return inventory_of(spec for shard in self.shards for spec in shard.header.specs)

    @property
    def total_size(self) -> int:
        """Bytes of all tensors, headers not counted: what the index calls ``total_size``."""
        return sum(shard.header.end - len(shard.header.raw) for shard in self.shards)

    def _check_totals(self, index: Index, where: str) -> Iterator[str]:
        """``total_size`` must be right where it is; ``total_parameters`` counts modules, so it is only remarked on."""
        metadata = {} if index.metadata is None else index.metadata
        if not isinstance(metadata, dict):
            raise damaged("metadata of the index is not an object", where)
        size = metadata.get("total_size")
        if size is None:
            yield f"{index.name} has no total_size; the tensors are {self.total_size} bytes"
        elif isinstance(size, bool) or not isinstance(size, int | float):
            raise damaged(f"total_size of the index is {size!r}, not a number", where)
        elif size != self.total_size:
            raise CheckpointError(
                f"total_size of the index is {size}, the tensors in the files are {self.total_size} bytes",
                where=where,
                next_step="the index is of another set of files, or was not rewritten; correct it or get both anew",
            )
        count = metadata.get("total_parameters")
        if count is not None and count != (numel := sum(spec.numel for _, spec, _ in self)):
            yield f"total_parameters of {index.name} is {count}, the tensors have {numel} elements"


def parse_index(raw: bytes, where: str, name: str = INDEX_NAME) -> Index:
    """The index in ``raw``; CheckpointError unless its ``weight_map`` maps names to plain *.safetensors file names."""
    index = parse_json_object(raw, where, "index")
    mapped = index.get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise damaged("the index has no weight_map", where)
    for tensor, file in mapped.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise damaged(f"weight_map puts tensor {tensor} in {file!r}, which is no *.safetensors file name", where)
    return Index(raw, name, mapped, index.get("metadata"))


def _disagreement(mapped: dict[str, str], held: dict[str, str], where: str) -> CheckpointError:
    """The error for an index and headers that do not name the same tensors in the same files."""
    faults = []
    ghosts = [name for name in mapped if name not in held]
    if ghosts:
        near = difflib.get_close_matches(ghosts[0], [name for name in held if name not in mapped] or list(held), n=1)
        faults.append(
            f"{len(ghosts)} tensors are in the index but in no file: {some(ghosts)} ({ghosts[0]} should be in "
            f"{mapped[ghosts[0]]}{f'; the nearest name that a file has is {near[0]}' if near else ''})"
        )
    unlisted = [name for name in held if name not in mapped]
    if unlisted:
        faults.append(
            f"{len(unlisted)} tensors are in a file but not in the index: {some(unlisted)} "
            f"({unlisted[0]} is in {held[unlisted[0]]})"
        )
    moved = [name for name in mapped if name in held and held[name] != mapped[name]]
    if moved:
        faults.append(
            f"{len(moved)} tensors are in another file than the index says: {some(moved)} "
            f"({moved[0]} should be in {mapped[moved[0]]}, is in {held[moved[0]]})"
        )
    return CheckpointError(
        "; ".join(faults),
        where=where,
        next_step="index and files are of different saves; get both from the same one",
    )
