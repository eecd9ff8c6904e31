"""Exact cover: both directions of an expansion are mutually inverse bijections, decided in integers.

This looks at blocks only and trusts no op. If every grid refines its shape, the boxes of each tile have the same
extents, and on each side the boxes of every tensor are disjoint with volumes that sum to the tensor (Fills counted
on the Megatron side), then every element of either side has exactly one partner. What it does not say: that it is
the right partner. That is the auditor's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from mtpconvert.errors import NotABijectionError
from mtpconvert.tensors import Block, Box, Fill, Shape, Tile


@dataclass(frozen=True, slots=True)
class Proof:
    """Totals for people: what was covered on each side."""

    tiles: int
    hf_tensors: int
    mcore_tensors: int
    elements: int  # related elements, the same on both sides
    filled: int  # Megatron elements written as zeros


def prove(tiles: Sequence[Tile], fills: Sequence[Fill]) -> Proof:
    """Decide that ``tiles`` relate every element of both sides exactly once. Raises NotABijectionError."""
    hf: dict[str, list[Block]] = {}
    mcore: dict[str, list[Block]] = {}
    for tile in tiles:
        _same_extents(tile)
        hf.setdefault(tile.hf.tensor, []).append(tile.hf)
        mcore.setdefault(tile.mcore.tensor, []).append(tile.mcore)
    for fill in fills:
        mcore.setdefault(fill.mcore.tensor, []).append(fill.mcore)
    for side, blocks in (("Hugging Face", hf), ("Megatron", mcore)):
        for name, parts in blocks.items():
            _covers(side, name, parts)
    elements = sum(tile.hf.volume for tile in tiles)
    return Proof(len(tiles), len(hf), len(mcore), elements, sum(fill.mcore.volume for fill in fills))


def refinement(shape: Shape, grid: Shape) -> list[int] | None:
    """For each grid axis the axis of ``shape`` that it refines, or None where ``grid`` does not refine ``shape``.

    Consecutive grid axes must multiply to each axis of the shape; unit axes may stand anywhere.
    """
    products = [1] * len(shape)
    owners: list[int] = []
    axis = 0
    for size in grid:
        while axis + 1 < len(shape) and products[axis] == shape[axis]:
            axis += 1
        if not shape:
            return None
        owners.append(axis)
        products[axis] *= size
    return owners if products == list(shape) else None


def _same_extents(tile: Tile) -> None:
    extents = tile.hf.extents
    if tile.perm is not None:
        if sorted(tile.perm) != list(range(len(extents))):
            raise NotABijectionError(f"{tile.perm} is no order of {len(extents)} axes", where=_at(tile.hf))
        extents = tuple(extents[axis] for axis in tile.perm)
    if extents != tile.mcore.extents:
        raise NotABijectionError(
            f"a block of {extents} is related to a block of {tile.mcore.extents}",
            where=f"{_at(tile.hf)} and {_at(tile.mcore)}",
        )


def _covers(side: str, name: str, blocks: Sequence[Block]) -> None:
    shape = blocks[0].shape
    if min(shape, default=0) < 0:
        raise NotABijectionError(f"{shape} is no shape", where=name)
    for block in blocks:
        if block.shape != shape:
            raise NotABijectionError(f"{side} tensor is {shape} in one row and {block.shape} in another", where=name)
        if block.grid != shape and refinement(shape, block.grid) is None:
            raise NotABijectionError(f"the grid {block.grid} does not refine the shape {shape}", where=name)
        inside = len(block.box) == len(block.grid) and all(
            0 <= start < stop <= size for (start, stop), size in zip(block.box, block.grid, strict=True)
        )
        if not inside and prod(shape) != 0:
            raise NotABijectionError(f"the box {block.box} is empty or outside its grid {block.grid}", where=name)
    volume, size = sum(block.volume for block in blocks), prod(shape)
    if len(blocks) > 1 and (overlap := _overlap(blocks)):
        raise NotABijectionError(f"{side} elements are related twice: {overlap}", where=name)
    if volume != size:
        raise NotABijectionError(f"{side} tensor has {size} elements, of which {volume} are related", where=name)


def _overlap(blocks: Sequence[Block]) -> str | None:
    if all(block.grid == blocks[0].grid for block in blocks):
        return _overlap_of_boxes([block.box for block in blocks], 0)
    runs = sorted(run for block in blocks for run in linear_runs(block))
    for (start, length), (following, _) in pairwise(runs):
        if start + length > following:
            return f"element {following}"
    return None


def _overlap_of_boxes(boxes: Sequence[Box], axis: int) -> str | None:
    """A description of two overlapping boxes, or None. Boxes that agree on an axis are compared on the next."""
    if axis == len(boxes[0]):
        return f"{boxes[0]} twice"
    slabs: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        slabs.setdefault(box[axis], []).append(box)
    ordered = sorted(slabs)
    if any(one[1] > other[0] for one, other in pairwise(ordered)):
        return _overlap_of_pairs(boxes)
    for slab in slabs.values():
        if len(slab) > 1 and (found := _overlap_of_boxes(slab, axis + 1)):
            return found
    return None


def _overlap_of_pairs(boxes: Sequence[Box]) -> str | None:
    """Intervals cross on an axis: sort along it and compare each box with those that start before it ends."""
    ordered = sorted(boxes)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other[0][0] >= one[0][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True)):
                return f"{one} and {other}"
    return None


def linear_runs(block: Block) -> Iterable[tuple[int, int]]:
    """(first element, count) of every contiguous run of the block, in C order of its tensor."""
    grid, box = block.grid, block.box
    axis = len(grid)
    length = 1
    while axis > 0:  # the trailing axes that are taken whole, and the first before them, make one run
        axis -= 1
        start, stop = box[axis]
        length *= stop - start
        if stop - start != grid[axis]:
            break
    strides = [prod(grid[position + 1 :]) for position in range(len(grid))]
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    offsets = [base]
    for position in range(axis):
        start, stop = box[position]
        offsets = [offset + step * strides[position] for offset in offsets for step in range(stop - start)]
    return [(offset, length) for offset in offsets]


def _at(block: Block) -> str:
    return f"{block.tensor} {block.box}"
