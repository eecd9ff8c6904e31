"""Hugging Face directories that are as they should be, or nearly: what must not be found, and what any depth shows.

The faults themselves stand in the fault table (tests/support/faults_huggingface.py, tests/audit/test_fault_table.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mtpconvert.audit.api import audit
from tests.support.faults_huggingface import FAMILY, L1
from tests.support.sabotage import change_tensor, drop, edit_shard, home_of, reindex
from tests.support.tiny import read_safetensors, write_safetensors, write_tiny


def fused(root: Path) -> None:
    """Only the trunk: experts of layer 1 stacked, gate and up together, as transformers 5 writes them. No fault."""
    tensors = read_safetensors(root)
    stem = L1 + "mlp.experts."
    part = {
        p: [
            np.frombuffer(tensors[f"{stem}{e}.{p}_proj.weight"][2], "<u2").reshape(
                tensors[f"{stem}{e}.{p}_proj.weight"][1]
            )
            for e in range(4)
        ]
        for p in ("gate", "up", "down")
    }
    both = np.stack([np.concatenate(pair) for pair in zip(part["gate"], part["up"], strict=True)])
    down = np.stack(part["down"])
    home = home_of(root, stem + "0.up_proj.weight")
    drop(lambda name: name.startswith(stem))(root)
    edit_shard(
        home,
        lambda t: t.update(
            {
                stem + "gate_up_proj": ("BF16", both.shape, both.tobytes()),
                stem + "down_proj": ("BF16", down.shape, down.tobytes()),
            }
        ),
    )
    reindex(root)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(FAMILY, tmp_path_factory.mktemp("hf") / "left")


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_any_depth_is_clean_and_its_loss_is_counted(tmp_path: Path, layers: int) -> None:
    left = write_tiny(FAMILY, tmp_path / "left", mtp_layers=layers)
    shutil.copytree(left, tmp_path / "right")
    report = audit(left, tmp_path / "right")
    assert report.verdict("warning") == "pass"
    assert report.mtp.left["layers"] == report.mtp.right["layers"] == layers
    if layers:
        drop(lambda n: n.startswith("model.layers.") and int(n.split(".")[2]) >= 3)(tmp_path / "right")
        found = [f for f in audit(left, tmp_path / "right").findings if f.code == "mtp-layer-missing"]
        assert [f.tensor for f in found] == [f"model.layers.{3 + k}.*" for k in range(layers)]


def test_experts_stacked_is_no_loss(original: Path, tmp_path: Path) -> None:
    """transformers 5 saves experts stacked or one by one, as the day goes: equal numbers, other names."""
    shutil.copytree(original, tmp_path / "right")
    fused(tmp_path / "right")
    report = audit(original, tmp_path / "right")
    assert not [f.message for f in report.findings if f.severity.label == "error"]
    assert report.tensors == 99


def test_nothing_to_compare_fails(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        write_safetensors(
            tmp_path / side / "model.safetensors", {f"{side}.weight": ("F32", (1,), bytes([ord(side), 0, 0, 0]))}
        )
        (tmp_path / side / "config.json").write_text("{}")
    assert "nothing-compared" in {f.code for f in audit(tmp_path / "a", tmp_path / "b").findings}


def test_nan_payloads_and_signed_zeros_are_bits(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "left")
    change_tensor("model.norm.weight", lambda x: np.resize(np.array([0x7FC1, 0x7F80, 0x8000], "<u2"), x.shape))(
        tmp_path / "left"
    )
    shutil.copytree(tmp_path / "left", tmp_path / "right")
    assert audit(tmp_path / "left", tmp_path / "right").verdict("warning") == "pass"
    change_tensor("model.norm.weight", lambda x: np.where(x == 0x7FC1, 0x7FC2, x).astype(x.dtype))(tmp_path / "right")
    assert "bytes-differ" in {f.code for f in audit(tmp_path / "left", tmp_path / "right").findings}
