"""Numbers behind bits: widening every float dtype to float64, and what a change of dtype did to the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def widen(raw: Any, dtype: str) -> Any:
    """An array of unsigned bit patterns as float64 (integers as they are). KeyError for dtypes without a value."""
    import numpy as np

    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in ("F16", "F32", "F64"):
        return raw.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).astype(np.float64)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _small_floats(dtype)[raw]
    signed = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
    return raw.view(signed[dtype]).astype(np.float64) if dtype in signed else raw.astype(np.float64)


def _small_floats(dtype: str) -> Any:
    """All 256 values of an FP8 format (OCP 8-bit floating point, table 1)."""
    import numpy as np

    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    bits = np.arange(256)
    exponent, mantissa = (bits >> mantissa_bits) & (0x7F >> mantissa_bits), bits & ((1 << mantissa_bits) - 1)
    scale = 1 << mantissa_bits
    value = np.where(
        exponent == 0, np.ldexp(mantissa / scale, 1 - bias), np.ldexp(1 + mantissa / scale, exponent - bias)
    )
    if dtype == "F8_E4M3":
        value[(bits & 0x7F) == 0x7F] = np.nan
    else:
        value[(bits & 0x7C) == 0x7C] = np.nan
        value[(bits & 0x7F) == 0x7C] = np.inf
    return np.where(bits & 0x80, -value, value)


def to_bfloat16(raw: Any) -> Any:
    """float32 bit patterns rounded to nearest even, as bfloat16 bit patterns (NaN kept quiet)."""
    import numpy as np

    wide = raw.astype(np.uint64)
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (raw & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, ((raw >> 16) | 0x40).astype(np.uint16), rounded)


@dataclass(slots=True)
class Values:
    """``changed`` of ``total`` values differ; ``before``/``after`` distinct values of a sample of up to 4M elements."""

    before_dtype: str
    after_dtype: str
    changed: int = 0
    total: int = 0
    before: int = 0
    after: int = 0
    largest: float = 0.0
    comparable: bool = True


def compare_values(bench: Any, one: Any, two: Any) -> Values:
    """Value by value over two operands of different dtypes, windows at a time."""
    import numpy as np

    result = Values(one.dtype, two.dtype)
    if (
        one.extents != two.extents
        or not (is_float(one.dtype) and is_float(two.dtype))
        or "F8_E8M0" in (one.dtype, two.dtype)
    ):
        result.comparable = False
        return result
    seen: tuple[list[Any], list[Any]] = ([], [])
    for _, first, second in bench.arrays(one, two):
        a, b = widen(first, one.dtype), widen(second, two.dtype)
        differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
        result.changed += int(np.count_nonzero(differs))
        result.total += len(a)
        if differs.any():
            gap = np.abs(a[differs] - b[differs])
            result.largest = max(result.largest, float(np.nanmax(gap, initial=0.0)))
        if result.total <= 1 << 22:
            seen[0].append(np.unique(first))
            seen[1].append(np.unique(second))
    result.before = len(np.unique(np.concatenate(seen[0]))) if seen[0] else 0
    result.after = len(np.unique(np.concatenate(seen[1]))) if seen[1] else 0
    return result
