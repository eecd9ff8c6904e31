"""One of the two checkpoints under audit: tensors, where their bytes lie, config, what is wrong with its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconvert.audit.drafts import Kind
from mtpconvert.audit.findings import Finding
from mtpconvert.audit.readers.names import Names
from mtpconvert.tensors import DTYPE_BITS, Box, Inventory, Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor whose elements lie in one file.

    ``offset``: byte offset of the box's first element; ``strides``: bytes, one per axis of the tensor.
    """

    box: Box
    file: int
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Record:
    """A stretch of one file with a stored CRC-32 (an entry of an uncompressed zip)."""

    file: int
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A plain tensor that is stored as codes and scales (names on disk); ``block``: elements under one scale, by axis.

    ``scheme`` "fp8": codes F8_E4M3 of the same shape. "mxfp4": two e2m1 codes a byte, axes 1 and 2 exchanged.
    """

    name: str
    shape: Shape
    codes: str
    scales: str
    block: Shape
    scheme: str = "fp8"


@dataclass(slots=True)
class Side:
    """``label`` is "left" or "right"; ``kind`` "huggingface" or "megatron"; ``layout`` how the bytes are kept.

    ``locate(name)`` gives the disjoint pieces of a tensor; it may raise CheckpointError. ``broken`` holds tensors
    whose bytes are not all there: they are reported once, and not compared. ``home`` maps a tensor to the file that
    holds it, where that says anything (safetensors shards). ``packed``: tensors of the inventory that are decoded as
    they are read; ``stored`` is then the side as it lies on disk. ``told_kind``: what drafts, as the
    other side shows it.
    """

    label: str
    root: Path
    kind: str
    layout: str
    inventory: Inventory
    files: list[Path]
    locate: Callable[[str], Sequence[Piece]]
    records: Callable[[str], Sequence[Record]] = lambda name: ()
    config: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    called: Callable[[str], str] = str  # an argument, with what the checkpoint's own file calls it
    findings: list[Finding] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    home: dict[str, str] = field(default_factory=dict)
    side_files: dict[str, Path] = field(default_factory=dict)
    replicas: dict[str, list[Sequence[Piece]]] = field(default_factory=dict)
    objects: int = 0
    bytes_total: int = 0
    packed: dict[str, Packed] = field(default_factory=dict)
    stored: Side | None = None
    told_kind: Kind | None = None
    _names: Names | None = None

    @property
    def names(self) -> Names:
        if self._names is None or self._names.inventory is not self.inventory:
            self._names = Names(self.inventory)
        return self._names

    @property
    def is_huggingface(self) -> bool:
        return self.kind == "huggingface"


def same_tensors(one: Side, two: Side) -> bool:
    """Whether names, shapes and dtypes are the same."""
    return one.inventory is two.inventory or one.inventory == two.inventory


def itemsize(dtype: str) -> int:
    """Bytes per element; 1 for the packed sub-byte dtypes, which are only ever handled as whole rows of bytes."""
    return max(1, DTYPE_BITS[dtype] // 8)


def row_major(shape: Shape, size: int) -> Shape:
    """Byte strides of a C-ordered array of ``shape`` with elements of ``size`` bytes."""
    strides: list[int] = []
    step = size
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
