"""``fp8_block``: F8_E4M3 weights with one scale for each block of rows and columns, against bf16.

Decoding is float32(value) x scale, the product rounded to float32, then to the nearest bf16, ties to even
(deepseek-ai/DeepSeek-V3 inference/kernel.py:weight_dequant_kernel; transformers integrations/finegrained_fp8.py).
Encoding with the kept scale gives the original codes back wherever the bf16 value was not changed: bf16 has 8
significant bits and e4m3 has 4, so that dividing by the same scale cannot leave the code's rounding interval while
the product is a finite bf16 number. Scales in [2^-124, 2^119) guarantee that: 448 x 2^119 is below 2^128, and the
least product, 2^-133, is bf16's smallest number. Every block is checked by decoding again; a block that differs was
changed by training and gets the scale amax / 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mtpconvert.codecs.small_floats import E4M3_MAX, e4m3_values, from_bf16, from_e8m0, round_to_bf16, to_e4m3
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALE_SUFFIX = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
MIN_SCALE, SCALE_LIMIT = 2.0**-124, 2.0**119


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows and columns of a block (``quantization_config.weight_block_size``), and how scales are kept.

    ``powers_of_two``: scales are powers of two (``scale_fmt: ue8m0``, or the dtype F8_E8M0), new ones too.
    """

    rows: int
    columns: int
    powers_of_two: bool = False

    def scale_shape(self, shape: Shape) -> Shape:
        """One scale for each block of the last two axes, the last blocks partial; leading axes stay."""
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns))


def read_scales(raw: bytes | memoryview, dtype: str, shape: Shape) -> NDArray[np.float32]:
    """The float32 values of stored scales."""
    import numpy as np

    if dtype == "F32":
        return np.frombuffer(raw, "<f4").reshape(shape)
    if dtype == "BF16":
        return from_bf16(np.frombuffer(raw, "<u2")).reshape(shape)
    return from_e8m0(np.frombuffer(raw, np.uint8)).reshape(shape)


def write_scales(scales: NDArray[np.float32], dtype: str) -> bytes:
    """Scales, each of which ``dtype`` holds exactly, as they are stored."""
    import numpy as np

    bits = np.ascontiguousarray(scales).view(np.uint32)
    if dtype == "F32":
        return bits.astype("<u4").tobytes()
    if dtype == "BF16":
        return (bits >> 16).astype("<u2").tobytes()
    return (bits >> 23).astype(np.uint8).tobytes()


def check_scales(name: str, scales: NDArray[np.float32], where: str) -> None:
    """Raise CheckpointError for a scale with which the way back is not exact: zero, negative, NaN, extreme."""
    import numpy as np

    bad = np.argwhere(~((scales >= MIN_SCALE) & (scales < SCALE_LIMIT)))
    if len(bad):
        block = tuple(bad[0].tolist())
        raise CheckpointError(
            f"{name}: {len(bad)} of {scales.size} scales are not in [2^-124, 2^119), the first is"
            f" {float(scales[block])!r} at block {list(block)}",
            where=where,
            next_step="the checkpoint is damaged, or its scales mean something else; get it again from its source",
        )


def check_codes(name: str, codes: NDArray[np.uint8], where: str) -> None:
    """Raise CheckpointError for a NaN among the weights: its sign would not come back."""
    import numpy as np

    if count := int(np.count_nonzero((codes & 0x7F) == 0x7F)):
        raise CheckpointError(
            f"{name} holds NaN codes (0x7F or 0xFF), {count} in the rows just read",
            where=where,
            next_step="no trained weight is NaN: the checkpoint is damaged; get it again from its source",
        )


def decode(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], blocks: Blocks, row: int = 0, column: int = 0
) -> NDArray[np.uint16]:
    """bf16 bits of ``codes`` [h, w], a part of one matrix that starts at ``row``, ``column``.

    ``scales``: of the whole matrix. ``column`` is a multiple of the block's columns. One table of 256 products for
    each block, then a look-up.
    """
    import numpy as np

    height, width = codes.shape
    top, left = row // blocks.rows, column // blocks.columns
    used = scales[top : -(-(row + height) // blocks.rows), left : left + -(-width // blocks.columns)]
    tables = _products(used)
    result = np.empty((height, width), np.uint16)
    for down in range(used.shape[0]):
        start = (top + down) * blocks.rows - row
        lines = slice(max(start, 0), min(start + blocks.rows, height))
        for across in range(used.shape[1]):
            part = slice(across * blocks.columns, min((across + 1) * blocks.columns, width))
            np.take(tables[down, across], codes[lines, part], out=result[lines, part], mode="clip")
    return result


def encode(
    values: NDArray[np.uint16], scales: NDArray[np.float32], blocks: Blocks, scale_dtype: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32], int]:
    """Codes and scales of bf16 bits [h, w], whole blocks of one matrix, and how many blocks got a new scale.

    ``scales``: the kept ones of these blocks. A changed block gets amax / 448, rounded up to what ``scale_dtype``
    holds so that no value exceeds 448; a block of zeros keeps its scale. Raises ValueError for a value that is not
    finite, or that needs a scale outside [2^-124, 2^119): FP8 has no way to write it.
    """
    import numpy as np

    result, codes = scales, np.empty(values.shape, np.uint8)
    tables = _products(scales)
    changed = 0
    for row in range(scales.shape[0]):
        lines = slice(row * blocks.rows, (row + 1) * blocks.rows)
        for column in range(scales.shape[1]):
            part = (lines, slice(column * blocks.columns, (column + 1) * blocks.columns))
            kept = _with_kept_scale(values[part], scales[row, column], tables[row, column])
            if kept is None:
                result = scales.copy() if result is scales else result
                exact = from_bf16(values[part])
                result[row, column] = scale = _new_scale(exact, blocks, scale_dtype)
                kept = to_e4m3(exact / scale)
                changed += 1
            codes[part] = kept
    return codes, result, changed


def _with_kept_scale(
    values: NDArray[np.uint16], scale: np.float32, table: NDArray[np.uint16]
) -> NDArray[np.uint8] | None:
    """The codes that ``table``, the products of all codes with ``scale``, makes ``values`` of; None without such."""
    import numpy as np

    exact = from_bf16(values)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.take(nearest_e4m3_by_upper_half(), (exact * (np.float32(1) / scale)).view(np.uint32) >> 16)
        if np.array_equal(np.take(table, codes), values):
            return codes
        if not np.isfinite(exact).all():
            return None
        codes = to_e4m3(exact / scale)
    return codes if np.array_equal(np.take(table, codes), values) else None


@cache
def nearest_e4m3_by_upper_half() -> NDArray[np.uint8]:
    """For the upper 16 bits of a float32 the e4m3 code nearest to what they say: five times faster than rounding.

    Dropping the lower bits moves a number by less than 1 part in 128, multiplying by a reciprocal by far less; an
    unchanged normal value lies within 1 part in 256 of its code, whose rounding interval is 1 part in 32 to a side.
    Subnormal bf16 values, of the smallest scales, may need the exact rounding.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):
        return to_e4m3(np.nan_to_num(from_bf16(np.arange(1 << 16, dtype=np.uint16)), nan=0.0))


def _products(scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of every code times every scale [.., 256]."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        return round_to_bf16(scales[..., None] * e4m3_values())


def _new_scale(values: NDArray[np.float32], blocks: Blocks, dtype: str) -> np.float32:
    import numpy as np

    amax = np.max(np.abs(values))
    if not np.isfinite(amax):
        raise ValueError("it holds NaN or infinity")
    scale = max(np.float32(amax / np.float32(E4M3_MAX)), np.float32(MIN_SCALE))
    bits = int(scale.view(np.uint32))
    if blocks.powers_of_two or dtype == "F8_E8M0":
        bits = (bits + 0x7FFFFF) & 0x7F800000
    elif dtype == "BF16":
        bits = (bits + 0xFFFF) & 0xFFFF0000
    rounded = np.uint32(bits).view(np.float32)
    if rounded >= SCALE_LIMIT:
        raise ValueError(f"its largest value {float(amax)!r} needs a scale of 2^119 or more")
    return np.float32(rounded)
