"""``minus_one``: a norm's scale w against w - 1, which Megatron keeps where its norms compute 1 + the stored weight.

megatron/core's ``layernorm_zero_centered_gamma`` holds for every norm of the model, and transformers' gated norm of a
delta net multiplies by w (modeling_qwen3_next.py:Qwen3NextRMSNormGated). The difference is computed in float32 and
rounded to the tensor's dtype, ties to even. For w in [0.5, 2] that is exact and adding 1 gives the same bits;
elsewhere it may not, so every element is tried, and what does not come back keeps its original beside the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpconvert.codecs.small_floats import from_bf16, round_to_bf16

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = ("BF16", "F16", "F32")


def less_one(raw: bytes | memoryview, dtype: str) -> bytes:
    """The bytes of w - 1 for those of w."""
    return _added(raw, dtype, -1.0)


def plus_one(raw: bytes | memoryview, dtype: str) -> bytes:
    """The bytes of 1 + m for those of m."""
    return _added(raw, dtype, 1.0)


def lost_elements(raw: bytes | memoryview, dtype: str) -> int:
    """How many elements have other bits after ``less_one`` and ``plus_one``."""
    import numpy as np

    before, after = (np.frombuffer(one, _kind(dtype)) for one in (raw, plus_one(less_one(raw, dtype), dtype)))
    return int(np.count_nonzero(before != after))


def restored(raw: bytes | memoryview, original: bytes | memoryview, dtype: str) -> tuple[bytes, int]:
    """``plus_one`` of ``raw``, with the original's bits wherever ``raw`` still is their ``less_one``; and how many
    elements these are."""
    import numpy as np

    now, kept, then = (np.frombuffer(one, _kind(dtype)) for one in (raw, original, less_one(original, dtype)))
    same = now == then
    new = np.frombuffer(plus_one(raw, dtype), _kind(dtype))
    return np.where(same, kept, new).tobytes(), int(np.count_nonzero(same))


def _kind(dtype: str) -> str:
    return "<u4" if dtype == "F32" else "<u2"


def _added(raw: bytes | memoryview, dtype: str, number: float) -> bytes:
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        if dtype == "BF16":
            values: NDArray[np.float32] = from_bf16(np.frombuffer(raw, "<u2")) + np.float32(number)
            return round_to_bf16(values).tobytes()
        if dtype == "F16":
            wide = np.frombuffer(raw, "<f2").astype(np.float32) + np.float32(number)
            return wide.astype("<f2").tobytes()
        return (np.frombuffer(raw, "<f4") + np.float32(number)).tobytes()
