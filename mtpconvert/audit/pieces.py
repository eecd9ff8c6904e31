"""Pairs cut down to single meanings (one projection, one expert), and where else a piece's bytes are found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtpconvert.audit.compare import Bench, is_equal
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.vocabulary import ROLES
from mtpconvert.tensors import Block, Shape

_PREFIX = 64  # elements read of each piece to sort them; equality is decided on all bytes
_MOST = 200_000  # pieces in the index; beyond, no search


def refine(pair: Pair, placements: dict[str, list[Placement]]) -> list[Pair]:
    """A pair of whole tensors as one pair per meaning of the left tensor, single experts apart; else as it stands."""
    if pair.role is None and pair.left.tensor in placements:
        pairs = []
        for placement in placements[pair.left.tensor]:
            block = placement.block
            right = Block(pair.right.tensor, block.shape, block.grid, block.box)
            pairs.append(Pair(block, right, placement.role, placement.part, placement.perm, placement.perm, pair.copy))
        return [single for refined in pairs for single in _experts(refined)]
    return list(_experts(pair))


def _experts(pair: Pair) -> Iterator[Pair]:
    """One pair per expert where a stacked tensor holds many (no order of axes: experts come first as they stand)."""
    role, part = pair.role, pair.part
    stacked = role is not None and part is not None and ROLES.get(role.name, ((),))[0][:1] == ("expert",)
    if not stacked or part is None or pair.left_order or pair.right_order or part[0][1] - part[0][0] == 1:
        yield pair
        return
    for number in range(part[0][1] - part[0][0]):
        left, right = _nth(pair.left, number), _nth(pair.right, number)
        start = part[0][0] + number
        yield replace(pair, left=left, right=right, part=((start, start + 1), *part[1:]))


def _nth(block: Block, number: int) -> Block:
    """The block at one index of its first axis that is longer than one."""
    box = list(block.box)
    axis = next(at for at, (start, stop) in enumerate(box) if stop - start != 1)
    start = box[axis][0] + number
    box[axis] = (start, start + 1)
    return Block(block.tensor, block.shape, block.grid, tuple(box))


class Pieces:
    """Every piece of a plan by extents and first elements of its left side: answers "whose bytes are these?"."""

    def __init__(
        self, bench: Bench, left: Side, right: Side, pairs: list[Pair], placements: dict[str, list[Placement]]
    ) -> None:
        self._bench, self._left, self._right = bench, left, right
        self._pairs, self._placements = pairs, placements
        self._index: dict[tuple[Any, ...], list[Pair]] | None = None

    def _build(self) -> dict[tuple[Any, ...], list[Pair]]:
        index: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
        if len(self._pairs) > _MOST:
            return index
        for whole in self._pairs:
            if whole.copy or whole.left.tensor in self._left.broken or whole.right.tensor in self._right.broken:
                continue
            for pair in refine(whole, self._placements):
                one, _ = self._bench.operands(pair, self._left, self._right)
                index[one.extents, one.size, self._head(one)].append(pair)
        return index

    def _head(self, operand: Any) -> bytes:
        """The first elements along the last axis."""
        extents: Shape = operand.extents
        if 0 in extents:
            return b""
        window = (*(((0, 1),) * (len(extents) - 1)), (0, min(_PREFIX, extents[-1]))) if extents else ()
        length = self._bench.read(operand, window, self._bench.one)
        return self._bench.one.view[:length].tobytes()

    def whose(self, pair: Pair) -> list[Pair]:
        """Pieces whose left bytes stand where the right bytes of ``pair`` should be (not ``pair`` itself)."""
        if self._index is None:
            self._index = self._build()
        _, two = self._bench.operands(pair, self._left, self._right)
        found = []
        for other in self._index.get((two.extents, two.size, self._head(two)), []):
            if other.left == pair.left:
                continue
            one, _ = self._bench.operands(other, self._left, self._right)
            if is_equal(self._bench, one, two):
                found.append(other)
        return found

    def exchanged(self, pair: Pair, other: Pair) -> bool:
        """Whether the right side of ``other`` holds the left of ``pair`` too."""
        one, _ = self._bench.operands(pair, self._left, self._right)
        _, two = self._bench.operands(other, self._left, self._right)
        return is_equal(self._bench, one, two)
