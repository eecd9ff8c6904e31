"""Tiles between the chunks of two stores, as strided copies of bytes. Integer arithmetic only; moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from mtpconvert.mapping.prove import refinement
from mtpconvert.stores.base import Chunk
from mtpconvert.tensors import Block, Tile

Dim = tuple[int, int, int]  # how many, step in the source, step in the target (bytes)
_Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """``run`` bytes at ``source`` of file ``file`` go to ``target``, counted from the target chunk's start.

    Repeated over ``dims``, which are ordered by falling target step, and none overlaps the next inside the target.
    """

    file: int
    source: int
    target: int
    dims: tuple[Dim, ...]
    run: int

    @property
    def nbytes(self) -> int:
        total = self.run
        for count, _, _ in self.dims:
            total *= count
        return total

    @property
    def source_span(self) -> int:
        """Bytes from the first to behind the last source byte."""
        return self.run + sum((count - 1) * step for count, step, _ in self.dims)

    @property
    def target_span(self) -> int:
        return self.run + sum((count - 1) * step for count, _, step in self.dims)


@dataclass(frozen=True, slots=True)
class _View:
    """Where a chunk holds a part of a block: an interval per extent of the block, and an affine byte address."""

    ranges: tuple[_Interval, ...]
    base: int
    steps: tuple[int, ...]
    file: int


def pieces_of(tile: Tile, to_mcore: bool, sources: Sequence[Chunk], target: Chunk, itemsize: int) -> Iterator[Piece]:
    """The pieces of ``tile`` that land in the ``target`` chunk; ``itemsize`` in bytes.

    ``sources``: chunks of the tile's source tensor, at least all that meet this target.
    """
    source_block, target_block = (tile.hf, tile.mcore) if to_mcore else (tile.mcore, tile.hf)
    targets = list(_views(target_block, target, tile.perm if not to_mcore else None))
    if not targets:
        return
    for chunk in sources:
        for source in _views(source_block, chunk, tile.perm if to_mcore else None):
            for wanted in targets:
                if (piece := _meet(source, wanted, target.offset, itemsize)) is not None:
                    yield piece


def _views(block: Block, chunk: Chunk, perm: tuple[int, ...] | None) -> Iterator[_View]:
    owners = refinement(block.shape, block.grid)
    assert owners is not None  # prove has decided it
    factors = [1] * len(owners)
    for position in range(len(owners) - 2, -1, -1):
        if owners[position] == owners[position + 1]:
            factors[position] = factors[position + 1] * block.grid[position + 1]
    steps = [factor * chunk.strides[axis] for factor, axis in zip(factors, owners, strict=True)]
    base = chunk.offset - sum(start * step for (start, _), step in zip(chunk.box, chunk.strides, strict=True))
    base += sum(start * step for (start, _), step in zip(block.box, steps, strict=True))
    kept = [position for position, (start, stop) in enumerate(block.box) if stop - start != 1]
    cuts: list[list[tuple[_Interval, ...]]] = []
    for axis, size in enumerate(block.shape):
        mine = [position for position, owner in enumerate(owners) if owner == axis]
        intervals = [block.box[position] for position in mine]
        start, stop = chunk.box[axis]
        if (start, stop) == (0, size):
            cuts.append([tuple(intervals)])
        else:
            axes = [(*block.box[position], factors[position]) for position in mine]
            cuts.append(list(_cut(axes, start, stop)))
    order = [position for axis in range(len(block.shape)) for position, owner in enumerate(owners) if owner == axis]
    for parts in product(*cuts):
        box = dict(zip(order, (interval for part in parts for interval in part), strict=True))
        ranges = [(box[p][0] - block.box[p][0], box[p][1] - block.box[p][0]) for p in kept]
        kept_steps = [steps[p] for p in kept]
        if perm is not None:
            ranges = [ranges[p] for p in perm]
            kept_steps = [kept_steps[p] for p in perm]
        yield _View(tuple(ranges), base, tuple(kept_steps), chunk.file)


def _cut(axes: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[_Interval, ...]]:
    """Boxes of all indices with start <= sum(index * factor) < stop. ``axes``: (first, last, factor) each."""
    if not axes:
        if start <= 0 < stop:
            yield ()
        return
    first, last, factor = axes[0]
    inner = axes[1:]
    whole = (max(first, -(-start // factor)), min(last, stop // factor))
    low, high = start // factor, stop // factor
    if start % factor and first <= low < last:
        for rest in _cut(inner, start - low * factor, min(factor, stop - low * factor)):
            yield ((low, low + 1), *rest)
    if whole[0] < whole[1]:
        yield (whole, *((a, b) for a, b, _ in inner))
    if stop % factor and first <= high < last and (high > low or not start % factor):
        for rest in _cut(inner, 0, stop - high * factor):
            yield ((high, high + 1), *rest)


def _meet(source: _View, target: _View, target_start: int, itemsize: int) -> Piece | None:
    offset, wanted = source.base, target.base - target_start
    dims: list[Dim] = []
    for (a, b), (c, d), step, goal in zip(source.ranges, target.ranges, source.steps, target.steps, strict=True):
        low, high = max(a, c), min(b, d)
        if low >= high:
            return None
        offset += low * step
        wanted += low * goal
        if high - low > 1:
            dims.append((high - low, step, goal))
    return Piece(source.file, offset, wanted, *_coalesce(dims, itemsize))


def _coalesce(dims: list[Dim], itemsize: int) -> tuple[tuple[Dim, ...], int]:
    """Fewest dims, ordered by falling target step, and the longest run."""
    dims.sort(key=lambda dim: dim[2])
    run = itemsize
    merged: list[Dim] = []
    for count, step, goal in dims:
        if not merged and step == run and goal == run:
            run *= count
        elif merged and step == merged[-1][0] * merged[-1][1] and goal == merged[-1][0] * merged[-1][2]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1], merged[-1][2])
        else:
            merged.append((count, step, goal))
    return tuple(reversed(merged)), run


def clip(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The parts of ``piece`` whose target bytes lie in [start, stop)."""
    low, high = start - piece.target, stop - piece.target
    if low >= piece.target_span or high <= 0:
        return
    if low <= 0 and high >= piece.target_span:
        yield piece
        return
    if not piece.dims:
        skip, end = max(low, 0), min(high, piece.run)
        yield Piece(piece.file, piece.source + skip, piece.target + skip, (), end - skip)
        return
    (count, step, goal), inner = piece.dims[0], piece.dims[1:]
    inner_span = Piece(piece.file, 0, 0, inner, piece.run).target_span
    first = max(0, -(-low // goal))  # the first index that starts at or behind low
    last = min(count, (high - inner_span) // goal + 1)  # behind the last index that ends at or before high
    if first > 0 and low < (first - 1) * goal + inner_span:
        yield from clip(_at(piece, first - 1), start, stop)
    if first < last:
        taken = ((last - first, step, goal), *inner) if last - first > 1 else inner
        yield Piece(piece.file, piece.source + first * step, piece.target + first * goal, taken, piece.run)
    tail = max(last, first)
    if tail < count and tail * goal < high:
        yield from clip(_at(piece, tail), start, stop)


def _at(piece: Piece, index: int) -> Piece:
    """``piece`` with its outermost dim fixed at ``index``."""
    _, step, goal = piece.dims[0]
    return Piece(piece.file, piece.source + index * step, piece.target + index * goal, piece.dims[1:], piece.run)
