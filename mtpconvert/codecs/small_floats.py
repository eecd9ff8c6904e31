"""Small floating-point formats as bits: e4m3fn and e8m0 (OCP 8-bit and microscaling formats), bf16. numpy only."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

E4M3_MAX = 448.0  # the largest finite e4m3fn value


@cache
def e4m3_values() -> NDArray[np.float32]:
    """float32 value of each code of e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits, no infinity."""
    import numpy as np

    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(exponent == 15) & (mantissa == 7)] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest e4m3fn codes of finite values, ties to even, saturating at 448."""
    import numpy as np

    sign = ((values.view(np.uint32) >> 24) & 0x80).astype(np.uint8)
    size = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    # Normal numbers: round the mantissa to three bits in the float's own bits, then move the exponent's bias 127 -> 7.
    bits = size.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20
    subnormal = np.rint(size * np.float32(2.0**9)).astype(np.uint32)
    code = np.where(size >= np.float32(2.0**-6), rounded - np.uint32(120 << 3), subnormal)
    return code.astype(np.uint8) | sign


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Upper halves of float32 values, rounded to nearest, ties to even; a NaN stays one."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_e8m0(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """2 ** (code - 127); 255 is NaN, and 0 (2 ** -127) is subnormal in float32."""
    import numpy as np

    with np.errstate(over="ignore"):
        return np.where(codes == 255, np.float32(np.nan), np.ldexp(np.float32(1), codes.astype(np.int32) - 127))
