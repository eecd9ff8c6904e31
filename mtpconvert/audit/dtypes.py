"""Dtypes that changed, without reading a byte."""

from __future__ import annotations

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.plan import Plan
from mtpconvert.audit.readers.side import Side, same_tensors


def check_dtypes(left: Side, right: Side, plan: Plan) -> list[Finding]:
    """One finding per right tensor whose dtype is not its source's. ``bits`` adds what it did to the values."""
    seen: dict[str, Finding] = {}
    for name in () if same_tensors(left, right) else plan.common:
        before, after = left.inventory[name].dtype, right.inventory[name].dtype
        if before != after:
            seen[name] = _changed(name, name, before, after)
    for pair in plan.pairs:
        before, after = dtypes_of(pair, left, right)
        if before == after or pair.right.tensor in seen:
            continue
        seen[pair.right.tensor] = _changed(pair.right.tensor, pair.left.tensor, before, after)
    return list(seen.values())


def _changed(name: str, source: str, before: str, after: str) -> Finding:
    code = code_of_change(name, before, after)
    text = f"{name}: {before} on the left ({source}), {after} on the right"
    return finding(code, text, side="both", tensor=name, other=source)


def code_of_change(name: str, before: str, after: str) -> str:
    """The finding for a tensor that has another dtype, as long as no value of it is other.

    transformers writes a router's weight in F32 whatever it read, by ``_keep_in_fp32_modules_strict`` of most families
    with experts (modeling_deepseek_v3.py: ``["e_score_correction_bias", "gate.weight"]``): exact, and no fault.
    """
    if right_bits(after) < right_bits(before):
        return "narrowed"
    router = name.endswith("gate.weight") and after == "F32" and before in ("BF16", "F16")
    return "widened" if router else "dtype-changed"


def dtypes_of(pair: Pair, left: Side, right: Side) -> tuple[str, str]:
    first = right if pair.copy == "right" else left
    second = left if pair.copy == "left" else right
    return first.inventory[pair.left.tensor].dtype, second.inventory[pair.right.tensor].dtype


def right_bits(dtype: str) -> int:
    """Bits of precision that matter for "narrower": mantissa bits of a float, all bits of an integer."""
    return {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2, "F8_E8M0": 0}.get(dtype, 64)
