"""``mxfp4``: blocks of 32 FP4 (e2m1) values, two in a byte, low nibble first, with one e8m0 scale each.

Every value is a small multiple of a power of two, so bf16 holds it exactly: at most 3 significant bits, and exponents
down to 2^-128, which subnormal bf16 reaches. Layout: openai/gpt-oss torch/weights.py (``_get_mxfp4_tensor``) and
transformers integrations/mxfp4.py (``convert_moe_packed_tensors``): ``<name>_blocks`` U8 [.., rows, groups, 16] and
``<name>_scales`` U8 [.., rows, groups] give rows of groups x 32 values. Only the way to bf16 exists here.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from mtpconvert.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
GROUP = 32  # values that share a scale; 16 bytes of them
_LARGEST_SCALE = 252  # 6 x 2^(252 - 127) is finite in bf16, the next power is not
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1: sign, two exponent bits (bias 1), one mantissa bit


def decode(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """bf16 bits [n, 32] of ``blocks`` [n, 16] with ``scales`` [n]."""
    import numpy as np

    table = _table()
    first = scales.astype(np.uint16)[:, None] << 4
    result = np.empty((len(blocks), GROUP), np.uint16)
    np.take(table, first | (blocks & 15), out=result[:, 0::2], mode="clip")
    np.take(table, first | (blocks >> 4), out=result[:, 1::2], mode="clip")
    return result


def check_scales(name: str, scales: NDArray[np.uint8], where: str) -> None:
    """Raise CheckpointError for a scale that is NaN, or with which 6 would be infinite in bf16."""
    import numpy as np

    if count := int(np.count_nonzero(scales > _LARGEST_SCALE)):
        raise CheckpointError(
            f"{name}: {count} scales are NaN or above 2^125",
            where=where,
            next_step="the checkpoint is damaged; get it again from its source",
        )


@cache
def _table() -> NDArray[np.uint16]:
    """bf16 bits for scale x 16 + code."""
    import numpy as np

    values = np.array([*_SIZES, *(-size for size in _SIZES)])
    with np.errstate(over="ignore"):
        products = np.ldexp(values[None, :], np.arange(256)[:, None] - 127).astype(np.float32)
    bits: NDArray[np.uint32] = products.view(np.uint32)
    return (bits >> 16).astype(np.uint16).reshape(-1)
