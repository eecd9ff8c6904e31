"""w - 1 and back: what torch computes, and which values come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtpconvert.codecs import minus_one

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def every_finite(dtype: str) -> torch.Tensor:
    if dtype == "F32":
        bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=torch.Generator().manual_seed(1))
        values = bits.to(torch.int32).view(torch.float32)
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(TYPES[dtype])
    return values[values.isfinite()]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_what_torch_computes(dtype: str) -> None:
    values = every_finite(dtype)
    assert minus_one.less_one(raw(values), dtype) == raw((values.float() - 1).to(TYPES[dtype]))
    assert minus_one.plus_one(raw(values), dtype) == raw((values.float() + 1).to(TYPES[dtype]))


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_between_a_half_and_two_is_lost(dtype: str) -> None:
    values = every_finite(dtype)
    inside = values[(values >= 0.5) & (values <= 2)]
    assert len(inside) > 100
    assert minus_one.lost_elements(raw(inside), dtype) == 0


def test_small_values_in_bf16_are_lost_and_restored_where_megatron_did_not_change_them() -> None:
    values = torch.tensor([0.1, 1.0, 0.3, -0.0, 1.5]).bfloat16()
    kept = minus_one.less_one(raw(values), "BF16")
    # 0.1 is 0.10009765625 and less one -0.8984375 (steps of 2^-8 there), which gives 0.1015625; 0.3 is
    # 0.30078125 and less one -0.69921875, exactly; -0.0 becomes -1 and 0.0
    assert minus_one.lost_elements(raw(values), "BF16") == 2
    now = bytearray(kept)
    now[4:6] = raw(torch.tensor([-0.5]).bfloat16())  # training moved the third
    back, count = minus_one.restored(bytes(now), raw(values), "BF16")
    assert count == 4
    assert back == raw(torch.tensor([0.1, 1.0, 0.5, -0.0, 1.5]).bfloat16())


def test_a_mask_is_not_fooled_by_nan() -> None:
    values = torch.tensor([float("nan"), float("inf"), 1.0])
    assert minus_one.lost_elements(raw(values), "F32") == 0
    assert np.isnan(np.frombuffer(minus_one.less_one(raw(values), "F32"), "<f4")[0])
