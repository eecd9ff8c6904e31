"""Why a tensor differs, when one cause fits exactly: every differing element is explained, or nothing is said."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

from mtpconvert.audit.compare import Bench, is_equal
from mtpconvert.audit.describe import Description
from mtpconvert.audit.elementwise import elementwise_cause
from mtpconvert.audit.exchange import exchange_words
from mtpconvert.audit.layouts import layout_cause, slice_cause, tail_cause
from mtpconvert.audit.less_one import less_one_cause
from mtpconvert.audit.outcomes import Outcome
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.pieces import Pieces, refine
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.vocabulary import ROLES
from mtpconvert.audit.scale_causes import scale_cause
from mtpconvert.audit.windows import windows
from mtpconvert.errors import CheckpointError

_IN_MEMORY = 24 << 20  # bytes of a tensor that is looked at as a whole
_MOST = 400  # tensors that are explained; beyond, an audit of a hopeless pair would take for ever
_SCALE_CAUSES = 2  # parts of one tensor that may each have other scales: gate and up


class Explainer:
    """Looks for causes; shares one Bench, so not to be used from several threads."""

    def __init__(
        self, bench: Bench, left: Side, right: Side, one: Description, two: Description, plan: Plan
    ) -> None:  # fmt: skip
        self.bench, self.left, self.right = bench, left, right
        self.left_meanings, self.right_meanings = _table(one.usable), _table(two.usable)
        self.pieces = Pieces(bench, left, right, plan.all_pairs(left), self.left_meanings)
        self._looked = 0

    def explain(self, bad: list[Outcome]) -> str | None:
        """The cause for all of ``bad`` (one tensor of the right); None if none fits, or too many were asked."""
        self._looked += 1
        if self._looked > _MOST:
            return None
        pairs = [pair for outcome in bad for pair in refine(outcome.pair, self.left_meanings)]
        try:
            pairs = [pair for pair in pairs if not self._same(pair)]
            return (
                self._less_one(bad)
                or self._elementwise(bad)
                or self._scales(bad)
                or self._exchange(pairs)
                or self._whole(bad)
                or self._slices(pairs)
            )
        except CheckpointError:
            return None  # bytes that cannot be read are a finding of their own

    def _same(self, pair: Pair) -> bool:
        return is_equal(self.bench, *self.bench.operands(pair, self.left, self.right))

    def _less_one(self, bad: list[Outcome]) -> str | None:
        causes = {
            less_one_cause(self.bench, outcome, self.left, self.right) if outcome.pair.less_one else None
            for outcome in bad
        }
        return causes.pop() if len(causes) == 1 else None

    def _elementwise(self, bad: list[Outcome]) -> str | None:
        causes = set()
        for outcome in bad:
            one, two = self.bench.operands(outcome.pair, self.left, self.right)
            causes.add(elementwise_cause(self.bench.arrays(one, two), one.dtype))
        return causes.pop() if len(causes) == 1 else None

    def _scales(self, bad: list[Outcome]) -> str | None:
        if not (self.left.packed or self.right.packed):
            return None
        causes = {scale_cause(self.bench, *self.bench.operands(outcome.pair, self.left, self.right)) for outcome in bad}
        return "; ".join(sorted(filter(None, causes))) if None not in causes and len(causes) <= _SCALE_CAUSES else None

    def _exchange(self, pairs: list[Pair]) -> str | None:
        moves: list[tuple[Pair, Pair, bool]] = []
        for pair in pairs:
            owners = self.pieces.whose(pair)
            if not owners:
                return None
            owner = min(owners, key=lambda other: _distance(pair, other))
            moves.append((pair, owner, self.pieces.exchanged(pair, owner)))
        return exchange_words(moves) if moves else None

    def _whole(self, bad: list[Outcome]) -> str | None:
        """Hypotheses about the layout of the whole right tensor."""
        if any(outcome.pair.less_one == "left" for outcome in bad):
            return None  # the right is not what it is compared as
        name = bad[0].pair.right.tensor
        spec = self.right.inventory[name]
        if spec.nbytes > _IN_MEMORY or not spec.shape:
            return None
        found = self._array(self.right, Pair(_all(name, spec.shape), _all(name, spec.shape), copy="right"))
        found = found.reshape(spec.shape)
        expected = found.copy()
        for outcome in bad:
            self._write(expected, outcome.pair)
        roles = {p.role.name: p for p in self.right_meanings.get(name, self.left_meanings.get(name, []))}
        if "padding" in roles:  # rows that nobody compares
            start = roles["padding"].block.box[0][0]
            expected, found = expected[:start], found[:start]
        parts = [(expected, found)]
        places = {p.role.place for p in self.right_meanings.get(name, self.left_meanings.get(name, []))}
        if len(places) == len(found) > 1:  # one key for all layers: a cause is one of each layer that differs
            parts = [(e, f) for e, f in zip(expected, found, strict=True) if (e != f).any()]
        causes = {layout_cause(e, f, roles) or tail_cause(e, f) for e, f in parts}
        return causes.pop() if len(causes) == 1 else None

    def _write(self, expected: Any, pair: Pair) -> None:
        """Put the left's elements where they belong in an array shaped like the right tensor."""
        one, _ = self.bench.operands(pair, self.left, self.right)
        block = pair.right
        view = expected.reshape(block.grid)[tuple(slice(start, stop) for start, stop in block.box)]
        view = view.squeeze(axis=tuple(at for at, extent in enumerate(view.shape) if extent == 1))
        if pair.right_order is not None:
            view = view.transpose(pair.right_order)
        view[...] = self._array(self.left, pair).reshape(one.extents)

    def _array(self, side: Side, pair: Pair) -> Any:
        import numpy as np

        one, two = self.bench.operands(pair, self.left, self.right)
        operand = one if one.side is side else two
        parts = []
        for window in windows(operand.extents, operand.size):
            length = self.bench.read(operand, window, self.bench.one)
            parts.append(self.bench.one.array[:length].copy())
        kind = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[operand.size]
        return np.concatenate(parts).view(kind) if parts else np.zeros(0, kind)

    def _slices(self, pairs: list[Pair]) -> str | None:
        """Heads, rows or columns that changed places inside each differing piece."""
        causes = set()
        for pair in pairs:
            one, two = self.bench.operands(pair, self.left, self.right)
            if prod(one.extents) * one.size > _IN_MEMORY:
                return None
            axes = _axis_names(pair, len(one.extents))
            first = self._array(one.side, pair).reshape(one.extents)
            second = self._second(pair).reshape(two.extents)
            causes.add(slice_cause(first, second, axes))
        return causes.pop() if len(causes) == 1 else None

    def _second(self, pair: Pair) -> Any:
        """The right operand of a pair, also where both are of one side."""
        mirrored = Pair(pair.right, pair.right, left_order=pair.right_order, right_order=pair.right_order,
                        copy=pair.copy or "right", less_one="right" if pair.less_one == "left" else "")  # fmt: skip
        return self._array(self.right if mirrored.copy == "right" else self.left, mirrored)


def _all(name: str, shape: tuple[int, ...]) -> Any:
    from mtpconvert.tensors import whole

    return whole(name, shape)


def _axis_names(pair: Pair, count: int) -> tuple[str, ...]:
    if pair.role is not None and pair.part is not None:
        names = ROLES.get(pair.role.name, ((), ""))[0]
        kept = tuple(n for n, (start, stop) in zip(names, pair.part, strict=False) if stop - start != 1)
        if len(kept) == count:
            return kept
    return {1: ("element",), 2: ("row", "column")}.get(count, tuple(f"axis-{at} slice" for at in range(count)))


def _distance(pair: Pair, other: Pair) -> tuple[bool, bool, str]:
    """Prefer an owner of the same layer, then of the same meaning."""
    if pair.role is None or other.role is None:
        return (True, True, other.left.tensor)
    return (pair.role.place != other.role.place, pair.role.name != other.role.name, other.left.tensor)


def _table(placements: list[Placement]) -> dict[str, list[Placement]]:
    table: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        if not placement.copy:
            table[placement.block.tensor].append(placement)
    return dict(table)
