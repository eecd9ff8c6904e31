"""Which items of a tensor meet an interval of its first axis: 512 experts' tiles are not tried against 512 chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar

from mtpconvert.mapping.prove import refinement
from mtpconvert.tensors import Block

T = TypeVar("T")


class ByFirstAxis(Generic[T]):
    """Items with a half-open interval each; ``meeting`` keeps the order of their starts."""

    def __init__(self, items: Iterable[tuple[tuple[int, int], T]]) -> None:
        self._items = sorted(items, key=lambda item: item[0])
        self._starts = [interval[0] for interval, _ in self._items]
        self._longest = max((stop - start for (start, stop), _ in self._items), default=0)

    def meeting(self, start: int, stop: int) -> list[T]:
        first = bisect_left(self._starts, start - self._longest + 1)
        last = bisect_left(self._starts, stop)
        return [item for interval, item in self._items[first:last] if interval[1] > start]


def first_axis(block: Block) -> tuple[int, int]:
    """The smallest interval of the tensor's first axis that holds the block; (0, 1) for a scalar."""
    if not block.shape:
        return (0, 1)
    owners = refinement(block.shape, block.grid)
    assert owners is not None  # prove has decided it
    low = high = 0
    for position, owner in enumerate(owners):
        if owner == 0:
            start, stop = block.box[position]
            low, high = low * block.grid[position] + start, high * block.grid[position] + stop - 1
    return (low, high + 1)
