"""Packings that are compared as bytes: every part of them is a tensor, counted, missed by name, MTP's among the rest.

Names, shapes and dtypes as the tools write them: compressed-tensors 0.12 (pack-quantized, float-quantized), GPTQModel,
AutoAWQ, NVIDIA ModelOpt (NVFP4).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.api import audit
from tests.support.sabotage import drop, edit_shard
from tests.support.tiny import write_safetensors
from tests.support.tiny_families import Shape

WIDTH = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
LINEAR = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
KEPT = ["lm_head", "re:.*eh_proj"]

# Of a linear layer of 128 inputs and 64 outputs: name -> dtype, shape.
KINDS: dict[str, tuple[dict[str, tuple[str, Shape]], dict[str, Any]]] = {
    "compressed-tensors INT4": (
        {"weight_packed": ("I32", (64, 16)), "weight_scale": ("BF16", (64, 4)), "weight_shape": ("I64", (2,))},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": KEPT},
    ),
    "compressed-tensors FP8": (
        {"weight": ("F8_E4M3", (64, 128)), "weight_scale": ("BF16", (64, 1))},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": KEPT},
    ),
    "GPTQ": (
        {"qweight": ("I32", (16, 64)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 64)), "g_idx": ("I32", (128,))},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head", "eh_proj"]},
    ),
    "AWQ": (
        {"qweight": ("I32", (128, 8)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 64))},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head", "eh_proj"]},
    ),
    "NVFP4": (
        {"weight": ("U8", (64, 64)), "weight_scale": ("F8_E4M3", (64, 8)), "weight_scale_2": ("F32", ()),
         "input_scale": ("F32", ())},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*eh_proj"]},
    ),
}  # fmt: skip
MTP = "model.layers.2."


def write(folder: Path, kind: str) -> Path:
    parts, scheme = KINDS[kind]
    tensors: dict[str, tuple[str, Shape, bytes]] = {}

    def add(name: str, dtype: str, shape: Shape) -> None:
        size = prod(shape) * WIDTH[dtype]
        tensors[name] = (dtype, shape, bytes((len(tensors) * 7 + at) % 120 for at in range(size)))

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        add(name, "BF16", (98, 128))
    for layer in range(3):
        add(f"model.layers.{layer}.input_layernorm.weight", "BF16", (128,))
        for linear in LINEAR:
            for part, (dtype, shape) in parts.items():
                add(f"model.layers.{layer}.{linear}.{part}", dtype, shape)
    for name, shape in (("eh_proj", (128, 256)), ("enorm", (128,)), ("hnorm", (128,))):
        add(f"{MTP}{name}.weight", "BF16", shape)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "vocab_size": 98, "quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_compared_and_mtp_is_counted(kind: str, tmp_path: Path) -> None:
    left, right = write(tmp_path / "left", kind), write(tmp_path / "right", kind)
    report = audit(left, right)
    assert report.verdict("warning") == "pass", [found.message for found in report.findings]
    parts = KINDS[kind][0]
    many = 4 + len(LINEAR) * len(parts)
    nbytes = 2 * (3 * 128 + 128 * 256) + len(LINEAR) * sum(
        prod(shape) * WIDTH[dtype] for dtype, shape in parts.values()
    )
    assert report.mtp.right == {"layers": 1, "tensors": many, "bytes": nbytes}
    assert report.mtp.layers[0].equal == many


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_one_byte_of_any_part_of_mtp_is_found(kind: str, part: int, tmp_path: Path) -> None:
    parts = list(KINDS[kind][0])
    if part >= len(parts):
        return
    left, right = write(tmp_path / "left", kind), write(tmp_path / "right", kind)
    name = f"{MTP}mlp.up_proj.{parts[part]}"

    def flip(tensors: Any) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))

    edit_shard(right / "model.safetensors", flip)
    report = audit(left, right)
    assert [(f.code, f.tensor) for f in report.failing("warning")] == [("bytes-differ", name)]
    assert "1 of them not equal" in report.mtp.layers[0].sentence


@pytest.mark.parametrize("kind", KINDS)
def test_mtp_lost_with_its_scales_is_missed_tensor_by_tensor(kind: str, tmp_path: Path) -> None:
    left, right = write(tmp_path / "left", kind), write(tmp_path / "right", kind)
    drop(lambda name: name.startswith(MTP), fix_index=False)(right)
    report = audit(left, right, level="headers")
    many = 4 + len(LINEAR) * len(KINDS[kind][0])
    lost = [found.tensor for found in report.failing("error") if found.code == "mtp-tensor-missing"]
    assert len(lost) == many
    assert f"0 of {many} tensors present" in report.mtp.layers[0].sentence


@pytest.mark.parametrize(
    ("kind", "scales"),
    [("compressed-tensors INT4", "weight_scale"), ("compressed-tensors FP8", "weight_scale"), ("GPTQ", "scales"),
     ("AWQ", "scales")],
)  # fmt: skip
def test_codes_without_scales_are_a_fault_of_the_side_itself(kind: str, scales: str, tmp_path: Path) -> None:
    side = write(tmp_path / "side", kind)
    drop(lambda name: name == f"{MTP}mlp.up_proj.{scales}", fix_index=False)(side)
    found = [f for f in audit(side, side, level="headers").failing("error") if f.side == "right"]
    codes = next(iter(KINDS[kind][0]))
    assert [(f.code, f.tensor) for f in found] == [("scale-missing", f"{MTP}mlp.up_proj.{codes}")]
