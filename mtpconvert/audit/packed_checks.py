"""What is said of packed tensors once the plan and the comparison stand: scales that are no factors, and values that
are equal though bytes or dtypes are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from mtpconvert.audit.compare import Bench, is_equal, place_in
from mtpconvert.audit.dequantise import scale_values
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.outcomes import Bits
from mtpconvert.audit.packed import decoded, packed_of
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Packed, Side
from mtpconvert.audit.windows import Buffer, Operand, Reader, windows
from mtpconvert.audit.words import index_words
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import Shape, whole


def check_packed(left: Side, right: Side, plan: Plan, bits: Bits | None, trained: bool) -> list[Finding]:
    """Findings about both sides as they were compared; without ``bits`` no byte was read."""
    found = _dequantised(left, right, plan, bits) if left.kind == right.kind and not trained else []
    if bits is None:
        return found
    here, there = packed_of(left.stored or left)[0], packed_of(right.stored or right)[0]
    found += [*_values(left.stored or left, here.values()), *_values(right.stored or right, there.values())]
    return found + ([] if trained else _requantised(left, right, here, there, bits))


def _dequantised(left: Side, right: Side, plan: Plan, bits: Bits | None) -> list[Finding]:
    """HF against HF: codes and scales on one side, plain numbers on the other."""
    sources: dict[str, set[str]] = defaultdict(set)
    for pair in plan.all_pairs(left) if left.stored or right.stored else ():
        if not pair.copy and (pair.left.tensor in left.packed) != (pair.right.tensor in right.packed):
            sources[pair.right.tensor].add(pair.left.tensor)
    found: list[Finding] = []
    for name, theirs in sources.items():
        if bits is not None and name not in bits.equal:
            continue  # what differs is reported as such
        before, after = (", ".join(sorted({_kept(side, n) for n in names})) for side, names in
                         ((left, theirs), (right, {name})))  # fmt: skip
        numbers = right.inventory[name].numel
        said = "values not read" if bits is None else f"dequantised, all {numbers} values are equal"
        text = f"{name}: {before} on the left, {after} on the right; {said}"
        found.append(finding("dequantised", text, side="both", tensor=name, other=min(theirs)))
    return found


def _kept(side: Side, name: str) -> str:
    if name not in side.packed:
        return side.inventory[name].dtype
    stored, packed = (side.stored or side).inventory, side.packed[name]
    return f"{'MXFP4' if packed.scheme == 'mxfp4' else stored[packed.codes].dtype} with scales"


def _values(side: Side, packed: Iterable[Packed]) -> list[Finding]:
    """Every scale is a positive, finite factor."""
    import numpy as np

    reader, buffer = Reader(side), Buffer()
    found: list[Finding] = []
    try:
        for one in packed:
            spec = side.inventory[one.scales]
            operand = Operand(side, whole(one.scales, spec.shape))
            wrong, first = 0, None
            if one.scales in side.broken:
                continue
            for window in windows(operand.extents, operand.size):
                length = reader.fill(operand, window, buffer)
                words = buffer.array[:length].view({1: "u1", 2: "<u2", 4: "<u4"}[operand.size])
                values = scale_values(words, "F8_E8M0" if spec.dtype == "U8" else spec.dtype)
                bad = ~(np.isfinite(values) & (values > 0))
                if bad.any() and first is None:
                    at = int(np.argmax(bad))
                    first = operand.tensor_index(place_in(window, at)), float(values[at])
                wrong += int(np.count_nonzero(bad))
            if first is not None:
                found.append(_invalid(side, one, spec.shape, wrong, first))
    except CheckpointError:
        return found  # bytes that cannot be read are a finding of their own
    finally:
        reader.close()
    return found


def _invalid(side: Side, one: Packed, shape: Shape, wrong: int, first: tuple[Shape, float]) -> Finding:
    text = (
        f"{one.scales}: {wrong} of its scales are zero, negative or not finite; the first is {first[1]:g}, at "
        f"{index_words(first[0], shape)}"
    )
    return finding("scale-invalid", text, side=side.label, tensor=one.scales, count=wrong)


def _requantised(
    left: Side, right: Side, here: dict[str, Packed], there: dict[str, Packed], bits: Bits
) -> list[Finding]:  # fmt: skip
    """Codes on both sides, compared as bytes: where these differ, whether they stand for the same numbers."""
    found: list[Finding] = []
    for name in here.keys() & there.keys() - left.packed.keys() - right.packed.keys():
        one, two = here[name], there[name]
        reshaped = left.inventory[one.scales].shape != right.inventory[two.scales].shape
        if one.shape != two.shape or not (reshaped or {two.codes, two.scales} & bits.unequal):
            continue
        if {one.codes, one.scales} & left.broken or {two.codes, two.scales} & right.broken:
            continue
        first, second = decoded(left, {name: one}), decoded(right, {name: two})
        bench = Bench(first, second)
        try:
            same = is_equal(bench, Operand(first, whole(name, one.shape)), Operand(second, whole(name, one.shape)))
        except CheckpointError:
            continue
        finally:
            bench.close()
        if same:
            numbers = second.inventory[name].numel
            text = f"{name}: codes or scales differ, and all {numbers} values that they stand for are equal"
            found.append(finding("requantised", text, side="both", tensor=name))
    return sorted(found, key=lambda one: str(one.tensor))
