"""Any range of a decoded tensor is what torch makes of the whole one; stacked matrices have scales of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpconvert.convert.decoded_reader import DecodedReader
from mtpconvert.convert.inspect_bytes import windows
from mtpconvert.convert.packings import packing_of
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.tensors import whole
from tests.support.tiny_fp8 import FINITE

CONFIG = {"text_config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}}}
Opened = tuple[DecodedReader, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A matrix, and three stacked ones whose rows are no multiple of a block's."""
    draw = torch.Generator().manual_seed(2)
    tensors, expected = {}, {}
    for name, shape in (("matrix.weight", (11, 9)), ("experts.down_proj", (3, 7, 10))):
        codes = FINITE[torch.randint(254, shape, generator=draw)].view(torch.float8_e4m3fn)
        grid = (*shape[:-2], -(-shape[-2] // 3), -(-shape[-1] // 4))
        scales = torch.rand(grid, generator=draw) + 0.1
        wide = scales.repeat_interleave(3, -2)[..., : shape[-2], :].repeat_interleave(4, -1)[..., : shape[-1]]
        tensors |= {name: codes, name + "_scale_inv": scales}
        expected[name] = (codes.float() * wide).bfloat16().view(torch.uint16).numpy()
    return opened(tensors, tmp_path_factory.mktemp("fp8")), expected


def opened(tensors: dict[str, torch.Tensor], folder: Path) -> DecodedReader:
    save_file(tensors, folder / "model.safetensors")
    raw = SafetensorsReader(folder)
    reader = DecodedReader(raw, packing_of(CONFIG, raw.inventory(), str(folder)))
    reader.check_scales()
    return reader


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["matrix.weight", "experts.down_proj"]), data=st.data())
def test_any_range(fp8: Opened, name: str, data: st.DataObject) -> None:
    reader, expected = fp8
    flat = expected[name].reshape(-1).view("u1")
    start = data.draw(st.integers(0, flat.size // 2 - 1)) * 2
    stop = data.draw(st.integers(start // 2 + 1, flat.size // 2)) * 2
    (chunk,) = reader.chunks(name)
    buffer = bytearray(stop - start)
    reader.read(chunk.file, memoryview(buffer), chunk.offset + start)
    np.testing.assert_array_equal(np.frombuffer(buffer, "u1"), flat[start:stop])


def test_it_presents_bf16_and_no_scales(fp8: Opened) -> None:
    specs = fp8[0].inventory()
    assert {name: (spec.dtype, spec.shape) for name, spec in specs.items()} == {
        "matrix.weight": ("BF16", (11, 9)),
        "experts.down_proj": ("BF16", (3, 7, 10)),
    }


def test_mxfp4_is_transposed_as_transformers_does(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=draw, dtype=torch.uint8)
    reader = opened({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, tmp_path)
    expected = convert_moe_packed_tensors(blocks, scales)
    spec = reader.inventory()["gate_up_proj"]
    assert (spec.dtype, spec.shape) == ("BF16", tuple(expected.shape)) == ("BF16", (2, 96, 6))
    got = np.frombuffer(b"".join(windows(reader, whole(spec.name, spec.shape), 2)), "<u2").reshape(spec.shape)
    np.testing.assert_array_equal(got, expected.contiguous().view(torch.uint16).numpy())


def test_scales_leave_memory_and_come_back(fp8: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpconvert.convert.decoded_reader._KEPT", 1)
    read: Callable[[str], bytes] = lambda name: b"".join(windows(fp8[0], whole(name, fp8[1][name].shape), 2))  # noqa: E731
    for name in ("matrix.weight", "experts.down_proj", "matrix.weight"):
        assert read(name) == fp8[1][name].tobytes()
