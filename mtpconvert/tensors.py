"""What a tensor is, without its numbers: names, shapes and dtypes as strings and integers. No torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # one half-open interval [start, stop) per axis

# Bits per element, under the names that safetensors headers use (safetensors 0.8.0, tensor.rs: enum Dtype).
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint: its logical name, its whole shape, its dtype as safetensors spells it."""

    name: str
    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk; sub-byte dtypes are packed, and a whole tensor of them fills whole bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


Inventory = dict[str, TensorSpec]


def inventory_of(specs: Iterable[TensorSpec]) -> Inventory:
    return {spec.name: spec for spec in specs}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one tensor: ``grid`` refines ``shape`` into more axes (a reshape), ``box`` cuts each grid axis.

    The product of the consecutive grid axes that refine one axis of ``shape`` is that axis, so a Block never
    straddles an axis of the tensor. ``mapping.prove`` decides that; nothing here does.
    """

    tensor: str
    shape: Shape
    grid: Shape
    box: Box

    @property
    def extents(self) -> Shape:
        """Length of the box along each grid axis that is longer than one."""
        return tuple(stop - start for start, stop in self.box if stop - start != 1)

    @property
    def volume(self) -> int:
        return prod(stop - start for start, stop in self.box)


def size_words(nbytes: int) -> str:
    """Bytes for people: 1234567 -> "1.2 MB" (powers of 1000, as disks, file managers and model cards count)."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def whole(tensor: str, shape: Shape) -> Block:
    return Block(tensor, shape, shape, tuple((0, n) for n in shape))


@dataclass(frozen=True, slots=True)
class Tile:
    """One relation: this block of this HF tensor equals that block of that Megatron tensor, element for element.

    ``perm`` is None, or the order in which the HF block's extents are taken to give the Megatron block's.
    """

    hf: Block
    mcore: Block
    perm: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """Megatron elements that no HF element stands behind: vocabulary padding, written as zero bytes."""

    mcore: Block


@dataclass(frozen=True, slots=True)
class Copy:
    """An HF tensor that repeats another one (``tie``, ``copy_of``) and has no place of its own in Megatron."""

    tensor: str
    source: str
    shape: Shape
    tie: bool  # the model has one parameter for both (tied embeddings); else a second, equal copy is published
