"""The level "bits": read everything, turn what differs into findings with a place in words and a cause."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mtpconvert.audit.causes import Explainer
from mtpconvert.audit.checksums import check_records
from mtpconvert.audit.compare import Bench, compare_pairs
from mtpconvert.audit.describe import Description
from mtpconvert.audit.dtypes import code_of_change, dtypes_of, right_bits
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.less_one import about_less_one
from mtpconvert.audit.outcomes import Bits, Outcome
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.words import index_words, meaning, role_place


def audit_bits(left: Side, right: Side, one: Description, two: Description, plan: Plan, trained: bool) -> Bits:
    """Compare every pair of the plan; check CRCs of records. With ``trained`` differences are the normal case."""
    bits = Bits()
    bits.outcomes, sums = compare_pairs(plan.all_pairs(left), left, right)
    for side in (left, right):
        bits.findings += check_records(side, sums[side.label])
    by_tensor: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in bits.outcomes:
        if not outcome.pair.copy:
            bits.nbytes += outcome.nbytes
            by_tensor[outcome.pair.right.tensor].append(outcome)
    for name, outcomes in by_tensor.items():
        same = all(outcome.equal for outcome in outcomes)
        (bits.equal if same else bits.unequal).add(name)
        if same and left.kind == right.kind:
            bits.unchanged.add(name)
    bench = Bench(left, right)
    try:
        if not trained:
            words = _Words(left, right, one, two, Explainer(bench, left, right, one, two, plan))
            for name, outcomes in by_tensor.items():
                bad = [outcome for outcome in outcomes if not outcome.equal]
                bits.findings += words.about(name, bad, outcomes) if bad else []
            bits.findings += _padding(plan, left, right, bench) + about_less_one(bench, bits.outcomes, left, right)
        else:
            bits.findings += [_unread(o, right) for o in bits.outcomes if o.error is not None]
        bits.findings += _copies(bits, left, right, trained)
        _renames(bench, plan, left, right, bits)
    finally:
        bench.close()
    return bits


def _unread(outcome: Outcome, side: Side) -> Finding:
    error = outcome.error
    assert error is not None
    name = outcome.pair.right.tensor
    return finding("chunk-unreadable", f"{name}: {error.what} ({error.where})", side="both", tensor=name)


class _Words:
    """Findings about tensors that differ."""

    def __init__(self, left: Side, right: Side, one: Description, two: Description, explainer: Explainer) -> None:
        self.left, self.right, self.explainer = left, right, explainer
        self.meanings = {"left": _by_tensor(one.usable), "right": _by_tensor(two.usable)}

    def about(self, name: str, bad: list[Outcome], outcomes: list[Outcome]) -> list[Finding]:
        """One finding per tensor of the right (plus one for bytes that cannot be read)."""
        found = [_unread(outcome, self.right) for outcome in bad if outcome.error is not None][:1]
        changed = [outcome for outcome in bad if outcome.values is not None]
        if changed:
            found.append(self._dtype(name, changed))
        differing = [outcome for outcome in bad if outcome.first is not None]
        if differing:
            found.append(self._bytes(name, differing, outcomes))
        return found

    def _dtype(self, name: str, changed: list[Outcome]) -> Finding:
        before, after = dtypes_of(changed[0].pair, self.left, self.right)
        source = changed[0].pair.left.tensor
        text = f"{name}: {before} on the left ({source}), {after} on the right"
        lost = sum(outcome.values.changed for outcome in changed)
        total = sum(outcome.values.total for outcome in changed)
        if not changed[0].values.comparable:
            return finding("narrowed", text + "; the values cannot be compared", side="both", tensor=name, other=source)
        one, two = changed[0].values.before, changed[0].values.after
        text += f"; {lost} of {total} values changed, {one} distinct values became {two}"
        if lost and right_bits(after) >= right_bits(before):
            return finding("bytes-differ", text, side="both", tensor=name, other=source, count=lost)
        code = code_of_change(name, before, after)
        if code == "widened":
            text += ": exact"
        return finding(code, text, side="both", tensor=name, other=source, count=lost)

    def _bytes(self, name: str, bad: list[Outcome], outcomes: list[Outcome]) -> Finding:
        first = min(bad, key=lambda outcome: self._place(outcome)[1])
        left_index, right_index = self._place(first)
        source = first.pair.left.tensor
        shape = self.right.inventory[name].shape
        count = sum(outcome.differing for outcome in bad)
        total = sum(outcome.total for outcome in outcomes)
        here = index_words(left_index, self.left.inventory[source].shape)
        there = index_words(right_index, shape)
        where = there if source == name else f"{there} (left: {source}, {here})"
        known = meaning(self.meanings["right"].get(name, []), right_index) or (
            meaning(self.meanings["left"].get(source, []), left_index))  # fmt: skip
        role = role_place(*known) if known else None
        cause = self.explainer.explain(bad)
        decoded = " once dequantised" if source in self.left.packed or name in self.right.packed else ""
        if step := bad[0].pair.less_one:
            decoded += f" once one is {'subtracted' if step == 'right' else 'added'}"
        text = f"{name}: {count} of {total} elements differ{decoded}, the first at {where}"
        text += f", which is {role}" if role else ""
        text += f"; cause: {cause}" if cause else ""
        code = "narrowed" if cause and cause.startswith("rounded to") else "bytes-differ"
        return finding(
            code,
            text,
            side="both",
            tensor=name,
            other=source,
            count=count,
            index=list(right_index),
            role=role,
            cause=cause,
        )

    def _place(self, outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
        one, two = self.explainer.bench.operands(outcome.pair, self.left, self.right)
        assert outcome.first is not None
        return _unpacked(one, outcome.first), _unpacked(two, outcome.first)


def _unpacked(operand: Any, index: tuple[int, ...]) -> tuple[int, ...]:
    """The index in the tensor; for packed dtypes the index of the byte's row, which is all that can be said."""
    shape = operand.side.inventory[operand.tensor].shape
    place = operand.tensor_index(index)
    if len(place) == len(shape):
        return tuple(place)
    return (*([0] * (len(shape) - 1)), place[0]) if shape else ()


def _by_tensor(placements: list[Placement]) -> dict[str, list[Placement]]:
    table: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        table[placement.block.tensor].append(placement)
    return table


def _copies(bits: Bits, left: Side, right: Side, trained: bool) -> list[Finding]:
    """Copies, ties and replicas inside one side against what they repeat."""
    found: list[Finding] = []
    for outcome in bits.outcomes:
        pair = outcome.pair
        if not pair.copy:
            continue
        if outcome.equal:
            bits.copies.append(f"{pair.copy}: {pair.right.tensor} = {pair.left.tensor}")
            if pair.copy == "right" and pair.right.tensor not in bits.unequal:
                bits.equal.add(pair.right.tensor)
            continue
        if outcome.error is not None:
            found.append(_unread(outcome, right))
            continue
        if pair.copy == "right":
            bits.equal.discard(pair.right.tensor)
            bits.unequal.add(pair.right.tensor)
        name = pair.right.tensor
        text = f"{name} repeats {pair.left.tensor}, and {outcome.differing} of {outcome.total} elements differ"
        found.append(finding("copy-differs", text, side=pair.copy, tensor=pair.right.tensor, other=pair.left.tensor))
    return found


def _padding(plan: Plan, left: Side, right: Side, bench: Bench) -> list[Finding]:
    """Rows beyond the vocabulary: not compared, but said when they hold numbers."""
    from mtpconvert.audit.windows import Operand, windows

    found: list[Finding] = []
    for placement in plan.padding:
        side = right if not right.is_huggingface else left
        operand = Operand(side, placement.block)
        filled = 0
        for window in windows(operand.extents, operand.size):
            length = bench.read(operand, window, bench.one)
            filled += int((bench.one.array[:length] != 0).any())
        if filled:
            name, start = placement.block.tensor, placement.block.box[0][0]
            text = f"{name}: padding rows from {start} on hold numbers that no token reads"
            found.append(finding("padding-nonzero", text, side=side.label, tensor=placement.block.tensor))
    return found


def _renames(bench: Bench, plan: Plan, left: Side, right: Side, bits: Bits) -> None:
    """A missing and an unexpected tensor of equal bytes: renamed. Both leave the lists of the plan."""
    from mtpconvert.audit.compare import is_equal
    from mtpconvert.audit.windows import Operand
    from mtpconvert.tensors import whole

    if left.kind != right.kind:
        return
    by_shape: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name in plan.unexpected:
        spec = right.inventory[name]
        if name not in right.broken:
            by_shape[spec.shape, spec.dtype].append(name)
    for name in list(plan.missing):
        lost = left.inventory.get(name)
        if lost is None or name in left.broken or lost.numel == 0:
            continue
        for other in by_shape[lost.shape, lost.dtype]:
            one, two = Operand(left, whole(name, lost.shape)), Operand(right, whole(other, lost.shape))
            if is_equal(bench, one, two):
                by_shape[lost.shape, lost.dtype].remove(other)
                plan.missing.remove(name)
                plan.unexpected.remove(other)
                plan.matched.add(name)
                text = f"{name} is called {other} on the right (equal bytes)"
                bits.findings.append(finding("tensor-renamed", text, side="both", tensor=other, other=name))
                bits.unequal.add(other)
                break
