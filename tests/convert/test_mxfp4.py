"""gpt-oss as published (MXFP4) becomes in Megatron what its bf16 form, decoded by transformers, becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.command_line import Run, run
from tests.support.dist_read import read_torch_dist
from tests.support.family_tables import CASES
from tests.support.tiny_fp8 import read_all

__all__ = ["run"]


def two_forms(folder: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with MXFP4 experts, and the same with the experts in bf16."""
    case = replace(CASES["gpt-oss"], changes={"hidden_size": 64, "intermediate_size": 96, "dtype": "bfloat16"})
    draw = torch.Generator().manual_seed(7)
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, shape in case.shapes().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(90, 140, (experts, rows, columns // 32), generator=draw, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        else:
            packed[name] = plain[name] = torch.randn(shape, generator=draw).bfloat16()
    config = case.config()
    for kind, tensors in (("mxfp4", packed), ("bf16", plain)):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
        table = config | ({"quantization_config": {"quant_method": "mxfp4"}} if kind == "mxfp4" else {})
        (folder / kind / "config.json").write_text(json.dumps(table))
    return folder / "mxfp4", folder / "bf16"


def test_in_and_back_as_bf16(run: Run, memory: Path) -> None:
    packed, plain = two_forms(memory)
    there = run("hf2mcore", packed, memory / "one")
    assert (there.code, "tensors are MXFP4: decoded to bf16, exactly" in there.err) == (0, True), there.err
    assert run("hf2mcore", plain, memory / "two").code == 0
    one, two = (read_torch_dist(memory / name / "release") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, bits in two.items():
        np.testing.assert_array_equal(one[name], bits, err_msg=name)
    refused = run("mcore2hf", memory / "one", memory / "back")
    assert (refused.code, "as mxfp4, which nothing here writes" in refused.err) == (10, True), refused.err
    assert run("mcore2hf", memory / "one", memory / "back", "--dtype", "bfloat16").code == 0
    expected, found = read_all(plain), read_all(memory / "back")
    assert found.keys() == expected.keys()
    assert all(found[name].view(torch.int16).equal(tensor.view(torch.int16)) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((memory / "back" / "config.json").read_text())


def test_the_round_trip_command(run: Run, memory: Path) -> None:
    packed, _ = two_forms(memory)
    done = run("roundtrip", packed)
    assert done.code == 0, done.err


@pytest.mark.parametrize("case", ["twice", "flat", "no scales", "a scale too large"])
def test_refused(case: str, run: Run, memory: Path) -> None:
    packed, _ = two_forms(memory)
    stem = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(packed / "model.safetensors")
    words = f"{stem} is there in plain numbers and as blocks"
    if case == "twice":
        tensors[stem] = torch.zeros(1).bfloat16()
    elif case == "a scale too large":
        tensors[stem + "_scales"][0, 0, 0], words = 253, f"{stem}_scales: 1 scales are NaN or above"
    else:
        words = f"{stem}_blocks"
        if case == "flat":
            tensors[stem + "_blocks"] = torch.zeros(16, dtype=torch.uint8)
        else:
            del tensors[stem + "_scales"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    for command in (["hf2mcore", packed, memory / "out"], ["roundtrip", packed]):
        result = run(*command)
        assert (result.code, words in result.err) == (6, True), result.err
