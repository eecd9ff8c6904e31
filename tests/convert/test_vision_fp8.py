"""Vision in FP8 beside a language model: set aside as it is stored, codes and scales, and back with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import Run, run
from tests.support.family_tables import write_case
from tests.support.tiny import sha256_tree

__all__ = ["run"]
WEIGHT = "model.visual.merger.linear_fc1.weight"


def test_there_and_back(run: Run, memory: Path) -> None:
    write_case("Qwen3.5 with vision", memory / "hf")
    file = memory / "hf" / "model.safetensors"
    tensors = load_file(file)
    rows, columns = tensors[WEIGHT].shape
    tensors[WEIGHT] = torch.arange(rows * columns).remainder(120).to(torch.uint8).view(torch.float8_e4m3fn)
    tensors[WEIGHT] = tensors[WEIGHT].reshape(rows, columns)
    tensors[WEIGHT + "_scale_inv"] = torch.full((-(-rows // 16), -(-columns // 16)), 0.25)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((memory / "hf" / "config.json").read_text())
    plain = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and name != WEIGHT]
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [16, 16],
        "modules_to_not_convert": [*plain, "mtp.fc"],
    }  # fmt: skip
    (memory / "hf" / "config.json").write_text(json.dumps(config))
    there = run("hf2mcore", memory / "hf", memory / "mcore", "--audit", "bits")
    assert there.code == 0, there.err
    (memory / "config").mkdir()
    shutil.copy(memory / "hf" / "config.json", memory / "config")
    for folder in (None, memory / "hf", memory / "config"):
        reference = [] if folder is None else ["--reference", folder]
        back = run("mcore2hf", memory / "mcore", memory / "back", "--overwrite", "--audit", "bits", *reference)
        assert back.code == 0, back.err
        assert sha256_tree(memory / "back") == sha256_tree(memory / "hf")
    refused = run("mcore2hf", memory / "mcore", memory / "plain", "--dtype", "bfloat16")
    assert (refused.code, "tensors that are set aside are FP8" in refused.err) == (10, True), refused.err
