"""A Block of a tensor, as strided stretches of the files that hold it.

Pure integer arithmetic. A piece's interval along one axis of the tensor, written in the mixed radix of the grid axes
that refine it, is a union of at most 2k-1 boxes (k grid axes): so a chunk cut anywhere, inside a query group too,
meets a block in a few boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from mtpconvert.audit.readers.side import Piece
from mtpconvert.tensors import Block, Box, Shape


@dataclass(frozen=True, slots=True)
class Segment:
    """``box`` in the block's own coordinates (one axis per grid axis, 0 at the block's corner) lies in ``file``:
    its first element at byte ``offset``, one element further along axis i ``strides[i]`` bytes further."""

    box: Box
    file: int
    offset: int
    strides: Shape


def grid_groups(shape: Shape, grid: Shape) -> list[list[int]]:
    """For each axis of ``shape`` the grid axes that refine it. ValueError if the grid is no refinement."""
    groups: list[list[int]] = []
    at = 0
    for extent in shape:
        group: list[int] = []
        size = 1
        while size != extent or not group:
            if at == len(grid) or grid[at] == 0 or size > extent:
                raise ValueError(f"grid {grid} does not refine shape {shape}")
            size *= grid[at]
            group.append(at)
            at += 1
        groups.append(group)
    for rest in range(at, len(grid)):
        if grid[rest] != 1:
            raise ValueError(f"grid {grid} does not refine shape {shape}")
        if groups:
            groups[-1].append(rest)
    return groups


def _radix_boxes(start: int, stop: int, grid: Shape) -> Iterator[Box]:
    """Disjoint boxes over ``grid`` whose row-major positions are exactly ``[start, stop)``, in order."""
    if len(grid) <= 1:
        if start < stop:
            yield ((start, stop),) if grid else ()
        return
    inner = 1
    for extent in grid[1:]:
        inner *= extent
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in _radix_boxes(start - first * inner, stop - first * inner, grid[1:]):
            yield ((first, first + 1), *box)
        return
    whole_from = first if start % inner == 0 else first + 1
    whole_to = last + 1 if stop % inner == 0 else last
    if whole_from != first:
        for box in _radix_boxes(start - first * inner, inner, grid[1:]):
            yield ((first, first + 1), *box)
    if whole_from < whole_to:
        yield ((whole_from, whole_to), *((0, extent) for extent in grid[1:]))
    if whole_to != last + 1:
        for box in _radix_boxes(0, stop - last * inner, grid[1:]):
            yield ((last, last + 1), *box)


def segments_of(block: Block, pieces: Sequence[Piece]) -> list[Segment]:
    """Where the elements of ``block`` lie. Their union is the block if the pieces cover the tensor."""
    groups = grid_groups(block.shape, block.grid)
    found: list[Segment] = []
    for piece in pieces:
        strides = [0] * len(block.grid)
        choices: list[list[Box]] = []
        for axis, group in enumerate(groups):
            step = piece.strides[axis]
            for at in reversed(group):
                strides[at] = step
                step *= block.grid[at]
            start, stop = piece.box[axis]
            choices.append(list(_radix_boxes(start, stop, tuple(block.grid[at] for at in group))))
        origin = sum(start * stride for (start, _), stride in zip(piece.box, piece.strides, strict=True))
        for parts in product(*choices):
            flat = tuple(interval for part in parts for interval in part)
            if len(flat) != len(block.grid):  # a tensor without axes under a grid of unit axes
                flat = tuple((0, 1) for _ in block.grid)
            meet = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(flat, block.box, strict=True))
            if any(start >= stop for start, stop in meet):
                continue
            offset = piece.offset - origin + sum(start * strides[at] for at, (start, _) in enumerate(meet))
            local = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(meet, block.box, strict=True))
            found.append(Segment(local, piece.file, offset, tuple(strides)))
    return found
