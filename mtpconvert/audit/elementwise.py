"""Causes that show element by element: zeroed, rounded, negated, off by one, a flipped bit. Streamed, any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtpconvert.audit.values import is_float, to_bfloat16, widen

# The order is that of preference where several fit.
TESTS = ("zeroed", "bfloat16", "float16", "constant", "negated", "bytes", "plus", "minus")


def elementwise_cause(windows: Iterator[tuple[Any, Any, Any]], dtype: str) -> str | None:
    """What turns every left element into its right one, if one of the known changes does for all of them."""
    import numpy as np

    alive = set(TESTS)
    constant: Any = None
    flips: list[tuple[int, int]] = []
    differing, bits = 0, 0
    with np.errstate(all="ignore"):
        for _, one, two in windows:
            alive = {name for name in alive if _holds(name, one, two, dtype)}
            if "constant" in alive:
                constant = two[0] if constant is None else constant
                if (two != constant).any():
                    alive.discard("constant")
            where = np.flatnonzero(one != two)
            differing += len(where)
            if len(where) and len(flips) < 2:
                bits += int(sum(bin(int(one[at]) ^ int(two[at])).count("1") for at in where[:2]))
                flips += [(int(one[at]), int(two[at])) for at in where[:2]]
    if not differing:
        return None
    for name in TESTS:
        if name in alive:
            return _WORDS[name]
    if differing == 1:
        return "one bit flipped" if bits == 1 else "one element changed"
    return None


_WORDS = {
    "zeroed": "zeroed",
    "bfloat16": "rounded to bfloat16",
    "float16": "rounded to float16",
    "constant": "every element is the same number",
    "negated": "negated",
    "bytes": "byte order reversed",
    "plus": "1 was added (a norm stored as 1 + w)",
    "minus": "1 was subtracted (a norm stored as w - 1)",
}


def _holds(name: str, one: Any, two: Any, dtype: str) -> bool:
    import numpy as np

    if name == "zeroed":
        return not two.any()
    if name == "constant":
        return True
    if name == "bytes":
        return one.dtype.itemsize > 1 and bool((one.byteswap() == two).all())
    if not is_float(dtype) or dtype == "F8_E8M0":
        return False
    if name == "bfloat16":
        return dtype == "F32" and bool(((to_bfloat16(one).astype(np.uint32) << 16) == two).all())
    if name == "float16":
        return dtype == "F32" and bool(
            (one.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32) == two).all()
        )
    if name == "negated":
        return bool(((one ^ two) == (1 << (one.dtype.itemsize * 8 - 1))).all())
    before, after = widen(one, dtype), widen(two, dtype)
    step = 1.0 if name == "plus" else -1.0
    tolerance = np.maximum(np.abs(after), np.abs(before)) * (2.0 ** {"BF16": -8, "F16": -11}.get(dtype, -23)) + 1e-9
    return bool((np.abs(before + step - after) <= tolerance).all()) and bool((before != after).all())
