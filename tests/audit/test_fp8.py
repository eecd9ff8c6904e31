"""FP8 in blocks against bf16, and against itself: the auditor's arithmetic, real conversions, ledger, findings.

Faults stand in the fault table (tests/support/faults_fp8.py); expected numbers come from torch.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mtpconvert.audit.api import audit
from mtpconvert.audit.dequantise import Codes, fp8_words
from mtpconvert.audit.report_model import Report
from tests.support.command_line import Run, run
from tests.support.faults_fp8 import BETWEEN, Fault, S, Sides, plain, same_values, scale
from tests.support.scratch import memory, scratch
from tests.support.tiny import sha256_tree, write_tiny
from tests.support.tiny_fp8 import FINITE, dequantised, pack_fp8, read

__all__ = ["memory", "run"]
O_PROJ = "model.layers.3.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    with scratch() as root:
        yield Sides(root)


def codes_of(report: Report, severity: str = "warning") -> set[str]:
    return {found.code for found in report.failing(severity)}


# The arithmetic


@pytest.mark.parametrize("by_table", [True, False])
def test_every_code_under_every_kind_of_scale_is_as_torch_has_it(by_table: bool) -> None:
    """Subnormal, ordinary and largest scales; all 256 codes; looked up in a table, and one by one."""
    draw = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 128, (500,), generator=draw).float()
    scales = (1 + torch.rand(500, generator=draw)) * 2.0**exponents
    scales = torch.cat([scales, torch.tensor([2.0**-149, 2.0**-126, 3.4e38, 1.0, 0.0])])
    expected = (torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scales[:, None]).bfloat16()
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    held = scales.numpy()[:, None] if by_table else np.repeat(scales.numpy()[:, None], 2, axis=1)
    assert (held.size * 256 <= codes.size) == by_table
    found = np.empty(codes.shape, "<u2")
    fp8_words(Codes(codes, held, (0, 0), [np.arange(len(scales))[:, None], np.zeros((1, 1), int)]), found)
    number = ~torch.isnan(expected).numpy()
    assert np.array_equal(found[number], expected.view(torch.int16).numpy().view("<u2")[number])
    assert ((found[~number] & 0x7FFF) > 0x7F80).all()


def one_weight(folder: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> tuple[Path, Path]:
    """The same weight in FP8, and dequantised by torch, in two directories of an unknown architecture."""
    draw = torch.Generator().manual_seed(2)
    codes = FINITE[torch.randint(len(FINITE), (int(np.prod(shape)),), generator=draw)].view(torch.float8_e4m3fn)
    grid = [-(-extent // size) for extent, size in zip(shape, block, strict=True)]
    scales = (torch.rand(grid, generator=draw) + 0.5).to(dtype)
    tensors = {"x.weight": codes.reshape(shape), "x.weight_scale_inv": scales}
    scheme = {"quant_method": "fp8", "weight_block_size": list(block)}
    for name, held, config in (
        ("fp8", tensors, {"quantization_config": scheme}), ("bf16", dequantised(tensors, block), {}),
    ):  # fmt: skip
        (folder / name).mkdir()
        save_file(held, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "fp8", folder / "bf16"


@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    [
        ((300, 5000), (128, 128), torch.float32),  # several windows, none a multiple of the block; partial last blocks
        ((3, 1_200_000), (128, 128), torch.bfloat16),  # a row takes more than one window
        ((1_200_000, 3), (128, 128), torch.float16),
        ((700, 900), (1, 128), torch.float32),
        ((129, 127), (64, 32), torch.float8_e8m0fnu),
        ((5, 7), (1, 1), torch.float32),
        ((1, 1), (128, 128), torch.float32),
    ],
)
def test_windows_blocks_and_kinds_of_scale(
    memory: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
) -> None:
    fp8, bf16 = one_weight(memory, shape, block, dtype)
    for left, right in ((fp8, bf16), (bf16, fp8)):
        report = audit(left, right)
        assert codes_of(report) == {"dequantised"}
        assert report.nbytes == 2 * np.prod(shape)


def test_memory_stays_bounded_whatever_the_width(memory: Path) -> None:
    fp8, bf16 = one_weight(memory, (4, 2_000_000), (128, 128), torch.float32)
    audit(fp8, bf16)  # what is imported and cached once
    tracemalloc.start()
    try:
        audit(fp8, bf16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


# Real conversions, with their default gate


@pytest.mark.parametrize(
    ("block", "dtype"), [((16, 16), torch.float32), ((128, 128), torch.bfloat16), ((16, 128), torch.float32)]
)
def test_conversions_pass_their_gate(memory: Path, run: Run, block: tuple[int, int], dtype: torch.dtype) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"), block=block, scale_dtype=dtype)
    there = run("hf2mcore", source, memory / "mc", "--audit", "bits")
    assert there.code == 0, there.err
    back = run("mcore2hf", memory / "mc", memory / "back", "--audit", "bits")
    assert back.code == 0, back.err
    assert codes_of(audit(source, memory / "back")) == set()
    plain = run("mcore2hf", memory / "mc", memory / "bf16", "--dtype", "bfloat16", "--audit", "bits")
    assert plain.code == 0, plain.err
    report = audit(source, memory / "bf16")
    assert codes_of(report) == {"dequantised"} and report.verdict("error") == "pass"
    assert codes_of(audit(memory / "mc", memory / "bf16")) == set()


def test_scales_kept_for_the_way_back_are_the_sources(memory: Path, run: Run) -> None:
    """One bit off they give equal bf16 and other FP8; dropped MTP has none to keep."""
    source = pack_fp8(write_tiny("deepseek_v3", memory / "hf"), extreme=False)
    assert run("hf2mcore", source, memory / "mc").code == 0
    [file] = (memory / "mc" / "hf_assets" / "mtpconvert" / "scales").glob("*.safetensors")
    kept = read(file)
    kept[O_PROJ + S] = (kept[O_PROJ + S].view(torch.int32) ^ 1).view(torch.float32)
    del kept["model.layers.0.self_attn.o_proj.weight" + S]
    save_file(kept, file)
    found = audit(source, memory / "mc").failing("warning")
    assert {(f.code, f.tensor, bool(f.detail.get("mtp"))) for f in found} == {
        ("kept-scales", O_PROJ + S, True), ("kept-scales", "model.layers.0.self_attn.o_proj.weight" + S, False),
    }  # fmt: skip
    file.unlink()
    assert codes_of(audit(source, memory / "mc")) == {"kept-scales"}
    dropped = run("hf2mcore", source, memory / "dropped", "--mtp", "drop", "--audit", "bits")
    assert dropped.code == 0, dropped.err


# Sides and directions


@pytest.mark.parametrize("level", ["headers", "bits"])
def test_clean_sides_pass_both_ways_and_scales_are_in_the_ledger(sides: Sides, level: str) -> None:
    there, back = audit(sides.fp8, sides.megatron, level=level), audit(sides.megatron, sides.fp8, level=level)
    assert codes_of(there) == codes_of(back) == set()
    mtp = {name: tensor for name, tensor in sides.tensors.items() if name.startswith("model.layers.3.")}
    scales = [name for name in mtp if name.endswith("_scale_inv")]
    counted = {"layers": 1, "tensors": len(mtp), "bytes": sum(tensor.nbytes for tensor in mtp.values())}
    assert len(scales) == 20 and there.mtp.left == back.mtp.right == counted
    row = back.mtp.layers[0]
    assert (row.expected, row.right) == (len(mtp), len(mtp))
    assert row.equal == (len(mtp) if level == "bits" else None)
    assert {state.name: state.state for state in back.states() if state.name in scales} == dict.fromkeys(
        scales, "equal" if level == "bits" else "unread"
    )


def test_a_lost_scale_is_missing_from_the_ledger_too(sides: Sides, memory: Path) -> None:
    fault = Fault("to FP8", lambda t, c: t.pop(O_PROJ + "_scale_inv"), "", None)
    report = audit(*sides.pair(fault, memory / "right"))
    assert "51 of 52 tensors present" in report.mtp.layers[0].sentence


def test_bf16_of_fp8_is_a_warning_and_the_config_that_goes_with_it_is_right(sides: Sides, memory: Path) -> None:
    fault = Fault(BETWEEN, lambda t, c: (plain(lambda name: True)(t, c), c.pop("quantization_config")), "", None)
    fp8, bf16 = sides.pair(fault, memory / "bf16")
    for left, right in ((fp8, bf16), (bf16, fp8)):
        for level in ("headers", "bits"):
            report = audit(left, right, level=level)
            assert codes_of(report) == {"dequantised"}
            assert len(report.failing("warning")) == 68
    said = {found.tensor: found for found in audit(fp8, bf16).findings}[O_PROJ]
    assert said.severity.label == "warning" and said.detail["mtp"]
    assert said.message.endswith(
        "F8_E4M3 with scales on the left, BF16 on the right; dequantised, all 2016 values are equal"
    )


def test_bf16_beside_fp8_is_compared_by_value_where_it_is_bf16(sides: Sides, memory: Path) -> None:
    """MTP in bf16, trunk in FP8, and excluded as it should be; one value wrong, and one scale of the trunk."""

    def harm(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        plain(lambda name: name.startswith("model.layers.3."))(tensors, config)
        config["quantization_config"]["modules_to_not_convert"] = ["model.layers.3.*"]
        tensors[O_PROJ][7, 9] *= 2
        scale("model.layers.0.self_attn.o_proj.weight", lambda x: x * torch.tensor(1 + 2.0**-23))(tensors, config)

    report = audit(*sides.pair(Fault(BETWEEN, harm, "", None), memory / "right"))
    assert {(f.code, f.tensor) for f in report.failing("error")} == {
        ("bytes-differ", O_PROJ), ("bytes-differ", "model.layers.0.self_attn.o_proj.weight_scale_inv"),
    }  # fmt: skip
    found = next(f for f in report.failing("error") if f.tensor == O_PROJ)
    assert "1 of 2016 elements differ once dequantised, the first at row 7, column 9" in found.message


def test_requantised_weights_are_other_bytes_of_equal_value(sides: Sides, memory: Path) -> None:
    left = memory / "left"
    sides.write_fp8(left, {**sides.tensors, O_PROJ: clamped(sides.tensors[O_PROJ])}, sides.config)
    tensors = {**sides.tensors, O_PROJ: clamped(sides.tensors[O_PROJ])}
    same_values(O_PROJ)(tensors, {})
    report = audit(left, sides.write_fp8(memory / "right", tensors, sides.config))
    assert {(f.code, f.tensor, f.severity.label) for f in report.findings} == {
        ("bytes-differ", O_PROJ, "error"), ("bytes-differ", O_PROJ + "_scale_inv", "error"),
        ("requantised", O_PROJ, "note"),
    }  # fmt: skip


def clamped(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().clamp(-224, 224).to(torch.float8_e4m3fn)


def test_fp8_copied_is_equal_byte_by_byte(sides: Sides, memory: Path) -> None:
    shutil.copytree(sides.fp8, memory / "copy")
    report = audit(sides.fp8, memory / "copy")
    assert report.findings == [] and report.tensors == len(sides.tensors)
    assert sha256_tree(memory / "copy") == sha256_tree(sides.fp8)


def test_a_training_in_bf16_from_fp8(sides: Sides, memory: Path) -> None:
    """The base's numbers are the dequantised ones: what a training left alone is found unchanged."""
    moved = dict(sides.tensors)
    moved["model.layers.0.self_attn.q_a_proj.weight_scale_inv"] = (
        moved["model.layers.0.self_attn.q_a_proj.weight_scale_inv"] * 1.5
    )
    right = sides.write_megatron(memory / "right", moved)
    report = audit(sides.fp8, right, trained=True)
    assert codes_of(report) == {"mtp-stale"}
    assert codes_of(audit(sides.fp8, sides.megatron, trained=True)) == {"nothing-changed"}


def test_mtp_in_bf16_under_a_scheme_that_covers_it_is_named_module_by_module(sides: Sides, memory: Path) -> None:
    fault = Fault(BETWEEN, plain(lambda name: name.startswith("model.layers.3.")), "", None)
    report = audit(*sides.pair(fault, memory / "right"), level="headers")
    [found] = report.failing("error")
    packed = [name for name in sides.tensors if name.startswith("model.layers.3.") and name + S in sides.tensors]
    assert found.code == "quant-mtp-plain" and found.detail["mtp"]
    assert sorted(f"{module}.weight" for module in found.detail["modules"]) == sorted(packed)


def test_plain_numbers_quantised_are_narrowed(memory: Path) -> None:
    """bf16 rounded by torch to the nearest code under amax / 448; one code moved by one is no rounding any more."""
    plain_weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(4)).bfloat16()
    scales = torch.zeros(3, 2)
    codes = torch.zeros(300, 200, dtype=torch.float8_e4m3fn)
    for row in range(3):
        for column in range(2):
            at = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = plain_weight[at].abs().max().float() / 448
            codes[at] = (plain_weight[at].float() / scales[row, column]).to(torch.float8_e4m3fn)
    moved = codes.view(torch.uint8).clone()
    moved[100, 100] += 1
    scheme = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for name, tensors, config in (
        ("bf16", {"x.weight": plain_weight}, {}),
        ("fp8", {"x.weight": codes, "x.weight_scale_inv": scales}, scheme),
        ("moved", {"x.weight": moved.view(torch.float8_e4m3fn), "x.weight_scale_inv": scales}, scheme),
    ):
        (memory / name).mkdir()
        save_file(tensors, memory / name / "model.safetensors")
        (memory / name / "config.json").write_text(json.dumps(config))
    [found] = audit(memory / "bf16", memory / "fp8").failing("error")
    assert found.code == "narrowed" and found.detail["cause"].startswith("rounded to F8_E4M3")
    [found] = audit(memory / "bf16", memory / "moved").failing("error")
    assert found.code == "bytes-differ" and found.detail.get("cause") is None
