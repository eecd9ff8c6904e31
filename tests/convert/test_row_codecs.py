"""Norms that Megatron keeps less one: there and back bit for bit, whatever their values; trained ones as trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import Run, run
from tests.support.dist_read import read_torch_dist
from tests.support.family_tables import write_case
from tests.support.mcore_edit import resaved
from tests.support.tiny import sha256_tree

__all__ = ["run"]

NORM = "model.layers.1.linear_attn.norm.weight"
KEPT = "decoder.layers.1.self_attention.out_norm.weight"


def source(folder: Path, norm: torch.Tensor) -> Path:
    """A tiny bf16 Qwen3-Next whose second layer has this norm."""
    write_case("Qwen3-Next", folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name: torch.ones_like(tensor) for name, tensor in tensors.items() if "linear_attn.norm" in name}
    tensors[NORM] = norm.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_ordinary_scales_need_nothing_kept(run: Run, memory: Path) -> None:
    norm = torch.linspace(0.5, 2, 8)
    hf = source(memory / "hf", norm)
    there = run("hf2mcore", hf, memory / "mcore")
    assert there.code == 0, there.err
    assert "3 norms are kept less one" in there.err
    assert "do not come back" not in there.err
    stored = read_torch_dist(memory / "mcore" / "release")
    np.testing.assert_array_equal(stored[KEPT], (norm.bfloat16() - 1).view(torch.uint16).numpy())
    assert not (memory / "mcore" / "hf_assets" / "mtpconvert" / "originals").exists()
    assert run("mcore2hf", memory / "mcore", memory / "back").code == 0
    assert sha256_tree(memory / "back") == sha256_tree(hf)


def test_originals_are_kept_where_adding_one_does_not_give_them_back(run: Run, memory: Path) -> None:
    norm = torch.tensor([0.1, 0.2, 1.0, -0.0, 0.01, 1.5, 3.0, -2.0])
    hf = source(memory / "hf", norm)
    there = run("hf2mcore", hf, memory / "mcore")
    assert "elements of 1 do not come back by adding one: their originals are kept in hf_assets" in there.err
    back = run("mcore2hf", memory / "mcore", memory / "back")
    assert (back.code, "8 are originals that were kept" in back.err) == (0, True), back.err
    assert sha256_tree(memory / "back") == sha256_tree(hf)
    assert run("roundtrip", hf).code == 0

    def train(tensors: dict[str, torch.Tensor]) -> None:
        tensors[KEPT][2] = 0.25

    resaved(memory / "mcore" / "release", memory / "trained" / "release", train)
    (memory / "trained" / "latest_checkpointed_iteration.txt").write_text("release")
    assert run("mcore2hf", memory / "trained", memory / "after", "--reference", hf).code == 0
    after = load_file(memory / "after" / "model.safetensors")[NORM]
    expected = norm.bfloat16()
    expected[2] = 1.25
    assert after.view(torch.int16).equal(expected.view(torch.int16))


def test_an_original_of_another_dtype_than_megatrons_is_no_original(run: Run, memory: Path) -> None:
    norm = torch.tensor([0.1, 0.2, 1.0, -0.0, 0.01, 1.5, 3.0, -2.0])
    hf = source(memory / "hf", norm)
    assert run("hf2mcore", hf, memory / "mcore").code == 0
    tensors = load_file(hf / "model.safetensors")
    tensors[NORM] = tensors[NORM].float()
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    back = run("mcore2hf", memory / "mcore", memory / "back", "--reference", hf)
    assert back.code == 0, back.err
    after = load_file(memory / "back" / "model.safetensors")[NORM]
    assert after.equal(1 + (norm.bfloat16() - 1))
