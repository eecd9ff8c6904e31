"""MXFP4 as gpt-oss publishes it, against bf16 (Hugging Face and Megatron) and itself; transformers is the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpconvert.audit.api import audit
from mtpconvert.audit.mxfp4 import byte_values
from mtpconvert.audit.report_model import Report
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.to_mcore import ToMcore, hf2mcore
from tests.support.command_line import Run, run
from tests.support.family_tables import CASES
from tests.support.scratch import memory, scratch

__all__ = ["memory", "run"]
SCHEME = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@dataclass
class Models:
    """The same numbers three times; ``tensors`` of the MXFP4 directory."""

    mxfp4: Path
    bf16: Path
    megatron: Path
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with scratch() as root:
        case = replace(CASES["gpt-oss"], changes={"hidden_size": 64, "intermediate_size": 32, "dtype": "bfloat16"})
        draw = torch.Generator().manual_seed(3)
        packed, plain = {}, {}
        for name, shape in case.shapes().items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = shape
                blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
                scales = torch.randint(100, 140, (experts, rows, columns // 32), generator=draw, dtype=torch.uint8)
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
                assert plain[name].shape == shape
            else:
                packed[name] = plain[name] = torch.randn(shape, generator=draw).bfloat16()
        config = case.config()
        mxfp4 = write(root / "mxfp4", packed, config | {"quantization_config": SCHEME})
        bf16 = write(root / "bf16", plain, config)
        hf2mcore(bf16, root / "megatron", ToMcore(), Callbacks(gate=None))
        yield Models(mxfp4, bf16, root / "megatron", packed)


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def harmed(models: Models, folder: Path, **tensors: torch.Tensor) -> Path:
    config = json.loads((models.mxfp4 / "config.json").read_text())
    return write(folder, {**models.tensors, **tensors}, config)


def codes_of(report: Report) -> set[str]:
    return {found.code for found in report.failing("warning")}


def test_every_byte_under_every_scale() -> None:
    """The low half of a byte comes first; 255 is no number (OCP Microscaling 1.0, 5.4.1)."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    byte = torch.arange(256)
    pairs = torch.cat([table, -table])[torch.stack([byte % 16, byte // 16], dim=1)]
    expected = (pairs * 2.0 ** (torch.arange(255).double() - 127)[:, None, None]).float().bfloat16()
    found = byte_values().view("<u2").reshape(256, 256, 2)
    assert np.array_equal(found[:255], expected.view(torch.int16).numpy().view("<u2"))
    assert ((found[255] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_mxfp4_equals_bf16_and_megatron_both_ways(models: Models, memory: Path, level: str) -> None:
    copy = harmed(models, memory / "copy")
    for left, right in ((models.mxfp4, models.megatron), (models.megatron, models.mxfp4), (models.mxfp4, copy)):
        assert codes_of(audit(left, right, level=level)) == set()
    for left, right in ((models.mxfp4, models.bf16), (models.bf16, models.mxfp4)):
        report = audit(left, right, level=level)
        assert codes_of(report) == {"dequantised"}
        assert {found.tensor for found in report.failing("warning")} == {
            f"model.layers.{n}.mlp.experts.{name}_proj" for n in range(3) for name in ("gate_up", "down")
        }


def test_conversions_pass_their_gate(models: Models, memory: Path, run: Run) -> None:
    there = run("hf2mcore", models.mxfp4, memory / "mc", "--audit", "bits")
    assert there.code == 0, there.err
    back = run("mcore2hf", memory / "mc", memory / "back", "--dtype", "bfloat16", "--audit", "bits")
    assert back.code == 0, back.err
    report = audit(models.mxfp4, memory / "back")
    assert codes_of(report) == {"dequantised"} and report.verdict("error") == "pass"


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["box by box", "expert by expert"])
def test_windows_within_an_expert(memory: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Of 1,165 columns each: the second begins in the middle of a byte."""
    monkeypatch.setattr("mtpconvert.audit.mxfp4._KEPT", kept)
    draw = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (2, 900, 45, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(120, 135, (2, 900, 45), generator=draw, dtype=torch.uint8)
    packed = write(memory / "packed", {"x_blocks": blocks, "x_scales": scales}, {"quantization_config": SCHEME})
    whole = convert_moe_packed_tensors(blocks, scales).contiguous()
    assert codes_of(audit(packed, write(memory / "whole", {"x": whole}, {}))) == {"dequantised"}
    whole[1, 1439, 899] += 1
    [found] = audit(packed, write(memory / "harmed", {"x": whole}, {})).failing("error")
    assert "1 of 2592000 elements differ once dequantised, the first at index [1, 1439, 899]" in found.message


def test_one_nibble_is_found_where_it_stands(models: Models, memory: Path) -> None:
    """Expert 2, row 5 (an up row), byte 7 of group 1: its high half is element 32 + 15."""
    blocks = models.tensors[GATE_UP + "_blocks"].clone()
    blocks[2, 5, 1, 7] ^= 0x30
    right = harmed(models, memory / "right", **{GATE_UP + "_blocks": blocks})
    [found] = audit(models.megatron, right).failing("error")
    assert found.code == "bytes-differ" and found.tensor == GATE_UP
    assert "1 of 16384 elements differ once dequantised, the first at index [2, 47, 5]" in found.message
    assert "expert.up" in found.message
    [found] = audit(models.bf16, right).failing("error")
    assert "the first at index [2, 47, 5]" in found.message
    assert {(f.code, f.tensor) for f in audit(models.mxfp4, right).failing("warning")} == {
        ("bytes-differ", GATE_UP + "_blocks")
    }


def test_one_scale_is_found(models: Models, memory: Path) -> None:
    scales = models.tensors[DOWN + "_scales"].clone()
    scales[3, 63, 0] += 1
    right = harmed(models, memory / "right", **{DOWN + "_scales": scales})
    [found] = audit(models.megatron, right).failing("error")
    assert found.tensor == DOWN and "the first at index [3, " in found.message and ", 63]" in found.message


def test_scales_that_are_missing_misshaped_or_nan(models: Models, memory: Path) -> None:
    config = json.loads((models.mxfp4 / "config.json").read_text())
    lost = write(memory / "lost", {n: t for n, t in models.tensors.items() if n != DOWN + "_scales"}, config)
    report = audit(models.megatron, lost)
    assert ("scale-missing", DOWN + "_blocks") in {(f.code, f.tensor) for f in report.failing("error")}
    short = harmed(
        models, memory / "short", **{DOWN + "_scales": models.tensors[DOWN + "_scales"][:, :-1].contiguous()}
    )
    report = audit(models.megatron, short, level="headers")
    assert ("scale-shape", DOWN + "_scales") in {(f.code, f.tensor) for f in report.failing("error")}
    scales = models.tensors[DOWN + "_scales"].clone()
    scales[0, 1, 0] = 255
    report = audit(models.mxfp4, harmed(models, memory / "nan", **{DOWN + "_scales": scales}))
    assert ("scale-invalid", DOWN + "_scales") in {(f.code, f.tensor) for f in report.failing("error")}
