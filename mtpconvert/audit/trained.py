"""``--trained``: a training lies between the two sides. The form must hold, the values differ, and look trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import MtpLayers
from mtpconvert.audit.outcomes import Bits
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.statistics import Statistics, statistics_of
from mtpconvert.audit.windows import Buffer, Reader

_SPREAD = 0.03  # relative spread of deviations that counts as "one standard deviation"
_APART = 0.10  # relative spread in the base that counts as "different ones"
_FEW = 3  # matrices from which a common deviation says something


@dataclass(slots=True)
class _Pairs:
    """Left tensors that each right tensor is made of, and its state against the base."""

    sources: dict[str, list[str]]
    equal: set[str]
    unequal: set[str]


def check_trained(left: Side, right: Side, plan: Plan, bits: Bits, here: MtpLayers, there: MtpLayers) -> list[Finding]:
    """Findings about values, each with the statistic behind it."""
    mtp_names = there.all_names()
    sources: dict[str, list[str]] = {}
    for pair in plan.all_pairs(left):
        if not pair.copy:
            sources.setdefault(pair.right.tensor, []).append(pair.left.tensor)
    pairs = _Pairs(sources, bits.equal, bits.unequal)
    copies = {outcome.pair.right.tensor for outcome in bits.outcomes if outcome.pair.copy == "right"}
    found = [*_stale(pairs, mtp_names - copies, there), *_copies(bits, pairs, right, left)]
    one, two, buffer = Reader(left), Reader(right), Buffer()
    try:
        before = {n: statistics_of(left, n, one, buffer) for n in left.inventory if n not in left.broken}
        after = {n: statistics_of(right, n, two, buffer) for n in right.inventory if n not in right.broken}
    finally:
        one.close()
        two.close()
    base = {name: [s for n in dict.fromkeys(pairs.sources.get(name, [])) if (s := before.get(n))] for name in after}
    found += _values(after, base, mtp_names)
    for layer, names in there.names.items():
        found += _fresh(layer, {n: s for n in names if n not in copies and (s := after.get(n))}, base)
    return found


def _stale(pairs: _Pairs, mtp_names: set[str], there: MtpLayers) -> list[Finding]:
    compared = pairs.equal | pairs.unequal
    mtp, trunk = compared & mtp_names, compared - there.all_names()
    mtp_moved, trunk_moved = mtp & pairs.unequal, trunk & pairs.unequal
    figures = f"{len(trunk_moved)} of {len(trunk)} trunk tensors changed, {len(mtp_moved)} of {len(mtp)} MTP tensors"
    detail = {"trunk_changed": len(trunk_moved), "mtp_changed": len(mtp_moved)}
    if compared and not mtp_moved and not trunk_moved:
        text = f"not one value differs from the base: {figures}"
        return [finding("nothing-changed", text, side="both", statistic=detail)]
    found: list[Finding] = []
    for layer, names in there.names.items():
        mine = set(names) & compared & mtp_names
        if mine and trunk_moved and not mine & pairs.unequal:
            text = f"MTP layer {layer} equals the base bit for bit while the trunk was trained: {figures}"
            pattern = f"{there.prefix.get(layer, '')}*"
            found.append(finding("mtp-stale", text, tensor=pattern, mtp=True, statistic=detail))
    if mtp_moved and trunk and not trunk_moved:
        text = f"MTP was trained and the trunk equals the base: {figures}"
        found.append(finding("trunk-stale", text, statistic=detail))
    return found


def _copies(bits: Bits, pairs: _Pairs, right: Side, left: Side) -> list[Finding]:
    """A copy of the embedding or the head that kept the base's values while its source moved on."""
    found: list[Finding] = []
    for outcome in bits.outcomes:
        pair = outcome.pair
        if pair.copy != "right" or outcome.equal or pair.right.tensor not in left.inventory:
            continue
        if pair.right.tensor in bits.unchanged:
            text = (
                f"{pair.right.tensor} was left at the base's values; {pair.left.tensor}, which it repeats, was trained "
                f"({outcome.differing} of {outcome.total} elements differ)"
            )
            found.append(finding("copy-stale", text, tensor=pair.right.tensor, count=outcome.differing))
    return found


def _values(
    after: dict[str, Statistics | None], base: dict[str, list[Statistics]], mtp_names: set[str]
) -> list[Finding]:
    found: list[Finding] = []
    for name, now in after.items():
        then = base.get(name, [])
        if now is None:
            continue
        mtp = name in mtp_names or None
        if now.finite < now.count and (not then or all(s.finite == s.count for s in then)):
            text = f"{name}: {now.count - now.finite} of {now.count} values are NaN or infinite, none in the base"
            found.append(finding("values-not-finite", text, tensor=name, mtp=mtp, statistic=now.count - now.finite))
        bias = name.endswith(("e_score_correction_bias", "expert_bias"))
        if bias and now.zero:
            text = f"{name}: all {now.count} values are zero; routing then ignores what balancing learnt"
            found.append(finding("router-bias-zero", text, tensor=name, mtp=mtp))
        elif now.constant and now.count > 1 and not (now.ones and _is_norm(name)) and not all(s.constant for s in then):
            spread = f"; the base had a deviation of {then[0].deviation:.3g}" if then else ""
            text = f"{name}: all {now.count} values are {now.value:g}{spread}"
            found.append(finding("values-constant", text, tensor=name, mtp=mtp, statistic=now.value))
    return found


def _is_norm(name: str) -> bool:
    return "norm" in name


def _fresh(layer: int, now: dict[str, Statistics], base: dict[str, list[Statistics]]) -> list[Finding]:
    """Norms exactly one; matrices zero-mean with one deviation across tensors whose deviations differed in the base."""
    norms = {n: s for n, s in now.items() if _is_norm(n) and base.get(n) and not all(b.ones for b in base[n])}
    matrices = {n: s for n, s in now.items() if not _is_norm(n) and base.get(n) and s.count > 64 and not s.constant}
    reset = [n for n, s in norms.items() if s.ones]
    alike = _one_deviation(list(matrices.values()))
    apart = _spread([b.deviation for n in matrices for b in base[n]]) > _APART
    prefix = min(now, key=len).rsplit(".", 2)[0] if now else ""
    if reset and len(reset) == len(norms):
        text = f"MTP layer {layer} looks freshly initialised: all {len(reset)} norms are exactly 1, not so in the base"
        if alike is not None:
            text += f"; its {len(matrices)} matrices all have a standard deviation of {alike:.4g}"
        figures = {"norms": len(reset), "deviation": alike}
        return [finding("fresh-init", text, tensor=f"{prefix}.*", mtp=True, statistic=figures)]
    if alike is not None and apart:
        deviations = [b.deviation for n in matrices for b in base[n]]
        text = (
            f"MTP layer {layer} looks freshly initialised: its {len(matrices)} matrices are zero-mean with one "
            f"standard deviation ({alike:.4g}); in the base {min(deviations):.4g} to {max(deviations):.4g}"
        )
        return [finding("fresh-init", text, tensor=f"{prefix}.*", mtp=True, statistic={"deviation": alike})]
    return []


def _spread(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value) and value > 0]
    return (max(finite) - min(finite)) / max(finite) if len(finite) > 1 else 0.0


def _one_deviation(matrices: list[Statistics]) -> float | None:
    """The common deviation, if there are enough matrices, all zero-mean (within sampling error) and alike."""
    if len(matrices) < _FEW:
        return None
    centred = all(abs(s.mean) <= 6 * s.deviation / math.sqrt(s.count) for s in matrices)
    noise = max(3 / math.sqrt(2 * s.count) for s in matrices)
    deviations = [s.deviation for s in matrices]
    return sum(deviations) / len(deviations) if centred and _spread(deviations) <= _SPREAD + 2 * noise else None
