"""A model published in FP8 means in Megatron what its dequantised weights mean in transformers, on trunk and MTP."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import Run
from tests.support.tiny import write_tiny
from tests.support.tiny_fp8 import pack_fp8, read_all


def test_trunk_and_mtp_agree(run: Run, tmp_path: Path) -> None:
    source = pack_fp8(write_tiny("deepseek_v3", tmp_path / "fp8", fill="normal"), extreme=False)
    assert run("hf2mcore", source, tmp_path / "mcore").code == 0
    plain = tmp_path / "bf16"
    assert run("mcore2hf", tmp_path / "mcore", plain, "--dtype", "bfloat16").code == 0
    assert {str(tensor.dtype) for tensor in read_all(plain).values()} == {"torch.bfloat16", "torch.float32"}
    report = run("parity", plain, tmp_path / "mcore", "--require-mtp", "--json").json
    assert (report["verdict"], report["trunk"], report["mtp"]["verdicts"]) == ("pass", "pass", {"1": "pass"})
    assert max(point["relative"] for point in report["points"]) < 1e-5
