"""MXFP4 against what transformers makes of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpconvert.codecs import mxfp4
from mtpconvert.errors import CheckpointError


def test_every_byte_under_every_usable_scale_is_what_transformers_makes_of_it() -> None:
    scales = np.arange(1, 253, dtype=np.uint8)  # 0: transformers' own product underflows to zero in float32 tricks
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(len(scales), 0)
    given = torch.from_numpy(blocks)[None], torch.from_numpy(scales)[None, :, None].repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(*given).transpose(1, 2)  # [1, scales, 512]
    got = mxfp4.decode(blocks.reshape(-1, 16), scales.repeat(16)).reshape(len(scales), 512)
    np.testing.assert_array_equal(got, expected[0].contiguous().view(torch.uint16).numpy())


def test_the_smallest_scale_reaches_into_subnormal_bf16() -> None:
    got = mxfp4.decode(np.full((1, 16), 0x91, np.uint8), np.zeros(1, np.uint8))[0]
    # 0.5 x 2^-127 = 2^-128 = 32 x 2^-133; its negative second: the low nibble comes first
    assert got[:2].tolist() == [0x0020, 0x8020]


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_scales_that_bf16_cannot_follow_are_refused(scale: int) -> None:
    mxfp4.check_scales("w_scales", np.array([0, 252], np.uint8), "file")
    with pytest.raises(CheckpointError, match="w_scales: 1 scales"):
        mxfp4.check_scales("w_scales", np.array([0, scale], np.uint8), "file")
