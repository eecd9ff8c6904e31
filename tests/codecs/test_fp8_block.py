"""Block-scaled FP8 against torch's own float8, and the claim that the way back is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconvert.codecs import fp8_block, small_floats
from mtpconvert.codecs.fp8_block import Blocks
from mtpconvert.errors import CheckpointError

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
SCALES = st.tuples(st.integers(-124, 118), st.integers(0, (1 << 23) - 1))  # exponent, mantissa: all of [2^-124, 2^119)


def scale_of(parts: tuple[int, int]) -> np.float32:
    return np.uint32((parts[0] + 127) << 23 | parts[1]).view(np.float32)


def by_torch(codes: np.ndarray, scales: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    wide = torch.from_numpy(scales).repeat_interleave(blocks[0], 0)[: codes.shape[0]]
    wide = wide.repeat_interleave(blocks[1], 1)[:, : codes.shape[1]]
    return (values * wide).bfloat16().view(torch.uint16).numpy()


def drawn(seed: int, rows: int, columns: int, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    codes = FINITE[draw.integers(0, len(FINITE), (rows, columns))]
    grid = blocks.scale_shape((rows, columns))
    scales = np.ldexp(draw.uniform(1, 2, grid), draw.integers(-124, 119, grid)).astype(np.float32)
    return codes, np.minimum(scales, np.nextafter(np.float32(2.0**119), np.float32(0)))


def test_every_code_has_torchs_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(small_floats.e4m3_values(), values)
    assert np.signbit(small_floats.e4m3_values()[0x80])


def test_rounding_to_e4m3_is_torchs() -> None:
    exact = small_floats.e4m3_values()[:0x7F].astype(np.float64)
    halves = (exact[1:] + exact[:-1]) / 2  # the ties, and their neighbours
    values = np.concatenate([exact, halves, np.nextafter(halves, 0), np.nextafter(halves, 1e9)]).astype(np.float32)
    values = np.concatenate([values, np.random.default_rng(1).normal(0, 40, 20_000).astype(np.float32)])
    values = np.clip(np.concatenate([values, -values]), -448, 448)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(small_floats.to_e4m3(values), expected)


def test_rounding_to_bf16_is_torchs() -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits = bits[(bits & 0x7F800000) != 0x7F800000]
    values = np.concatenate([bits.view(np.float32), np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(small_floats.round_to_bf16(values), expected)


@settings(max_examples=300, deadline=None)
@given(st.lists(SCALES, min_size=8, max_size=8))
def test_every_code_comes_back_whatever_the_scale(parts: list[tuple[int, int]]) -> None:
    blocks = Blocks(1, 254)
    codes = np.tile(FINITE, (8, 1))
    scales = np.array([scale_of(one) for one in parts])[:, None]
    values = fp8_block.decode(codes, scales, blocks)
    np.testing.assert_array_equal(values, by_torch(codes, scales, (1, 254)))
    again, same, renewed = fp8_block.encode(values, scales, blocks, "F32")
    assert renewed == 0
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(same, scales)


@pytest.mark.parametrize("exponent", [-124, -123, -118, 0, 117, 118])
def test_the_ends_of_the_range_of_scales(exponent: int) -> None:
    mantissas = np.linspace(0, (1 << 23) - 1, 400).astype(np.uint32)
    scales = ((np.uint32(exponent + 127) << np.uint32(23)) | mantissas).view(np.float32)[:, None]
    codes = np.tile(FINITE, (len(scales), 1))
    values = fp8_block.decode(codes, scales, Blocks(1, 254))
    again, _, renewed = fp8_block.encode(values, scales, Blocks(1, 254), "F32")
    assert renewed == 0
    np.testing.assert_array_equal(again, codes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_part_is_decoded_as_the_whole_is(rows: int, columns: int, high: int, wide: int, data: st.DataObject) -> None:
    blocks = Blocks(high, wide)
    codes, scales = drawn(rows * 41 + columns, rows, columns, blocks)
    expected = by_torch(codes, scales, (high, wide))
    top = data.draw(st.integers(0, rows - 1))
    bottom = data.draw(st.integers(top + 1, rows))
    left = data.draw(st.integers(0, (columns - 1) // wide)) * wide
    right = data.draw(st.integers(left + 1, columns))
    got = fp8_block.decode(codes[top:bottom, left:right], scales, blocks, top, left)
    np.testing.assert_array_equal(got, expected[top:bottom, left:right])


def test_a_changed_block_gets_a_scale_of_its_own_and_its_neighbours_keep_theirs() -> None:
    codes, scales = np.full((4, 4), 0x38, np.uint8), np.full((2, 2), 0.25, np.float32)  # 0x38 is 1.0
    values = fp8_block.decode(codes, scales, Blocks(2, 2))
    values[2, 1] = 0x42E0  # 112.0 = 448 / 4
    values[3, 0] = 0x3E80  # 0.25 stays 0.25: with the scale 112 / 448 it is 1.0 again, and 112 is 448
    again, new, renewed = fp8_block.encode(values, scales, Blocks(2, 2), "F32")
    assert renewed == 0  # 0.25 happens to be the right scale: nothing had to change
    assert again[2, 1] == 0x7E
    values[2, 1] = 0x4360  # 224.0 = 448 / 2 does not fit under 0.25 x 448
    again, new, renewed = fp8_block.encode(values, scales, Blocks(2, 2), "F32")
    assert renewed == 1
    assert new.tolist() == [[0.25, 0.25], [0.5, 0.25]]
    assert again[2:, :2].tolist() == [[0x30, 0x7E], [0x30, 0x30]]  # 0.5, 448; 0.5, 0.5
    assert (again[:2] == 0x38).all()
    assert (again[2:, 2:] == 0x38).all()
    assert scales.tolist() == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.parametrize(
    ("dtype", "blocks", "expected"),
    [
        ("F32", Blocks(1, 2), np.float32(np.float32(300.0) / np.float32(448.0))),
        ("BF16", Blocks(1, 2), 0.671875),  # 300 / 448 = 0.66964 lies between 0.66796875 and 0.671875: upwards
        ("F8_E8M0", Blocks(1, 2), 1.0),
        ("F32", Blocks(1, 2, powers_of_two=True), 1.0),
    ],
)
def test_a_new_scale_is_rounded_up_in_the_references_dtype(dtype: str, blocks: Blocks, expected: float) -> None:
    values = torch.tensor([[300.0, 0.1875]]).bfloat16().view(torch.uint16).numpy()
    codes, new, renewed = fp8_block.encode(values, np.array([[2.0**-20]], np.float32), blocks, dtype)
    assert (renewed, new[0, 0]) == (1, expected)
    assert 0 < codes[0, 0] <= 0x7E
    stored = fp8_block.write_scales(new, dtype)
    np.testing.assert_array_equal(fp8_block.read_scales(stored, dtype, (1, 1)), new)


def test_zeros_and_signs() -> None:
    scales = np.array([[0.3]], np.float32)
    codes, new, renewed = fp8_block.encode(np.array([[0, 0x8000]], np.uint16), scales, Blocks(1, 2), "F32")
    assert (codes.tolist(), new.tolist(), renewed) == ([[0, 0x80]], scales.tolist(), 0)


@pytest.mark.parametrize(
    ("bits", "words"), [(0x7FC0, "NaN or infinity"), (0xFF80, "NaN or infinity"), (0x7F7F, "2\\^119")]
)
def test_what_fp8_cannot_hold_is_refused(bits: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fp8_block.encode(np.array([[bits]], np.uint16), np.array([[1.0]], np.float32), Blocks(1, 1), "F32")


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 2.0**-125, 2.0**119])
def test_scales_that_break_exactness_are_refused(scale: float) -> None:
    scales = np.ones((3, 2), np.float32)
    fp8_block.check_scales("w_scale_inv", scales, "file")
    scales[1, 0] = scale
    with pytest.raises(CheckpointError, match=r"w_scale_inv: 1 of 6 scales .* at block \[1, 0\]"):
        fp8_block.check_scales("w_scale_inv", scales, "file")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused(code: int) -> None:
    fp8_block.check_codes("w", FINITE, "file")
    with pytest.raises(CheckpointError, match="w holds NaN codes"):
        fp8_block.check_codes("w", np.append(FINITE, np.uint8(code)), "file")
