# ruff: noqa: E501 (tables)
"""``quantization_config`` against what is stored, after field reports 61 to 65 and 103 to 107."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconvert.audit.api import audit
from tests.support.tiny import write_safetensors

BF16, FP8, U8 = (
    ("BF16", (4, 4), bytes(range(1, 33))),
    ("F8_E4M3", (4, 4), bytes(range(1, 17))),
    ("U8", (4, 2), bytes(range(8))),
)
SCALE = ("F32", (1, 1), bytes([0, 0, 128, 63]))
FP8_TRUNK = {
    f"model.layers.{n}.self_attn.o_proj.{k}": v
    for n in (0, 1)
    for k, v in (("weight", FP8), ("weight_scale_inv", SCALE))
}
PACKED = {
    f"model.layers.{n}.self_attn.o_proj.{k}": v
    for n in (0, 1)
    for k, v in (("weight_packed", U8), ("weight_scale", FP8))
}
CODES, SCALES = ("U8", (1, 2, 1, 16), bytes(range(32))), ("U8", (1, 2, 1), bytes([127, 128]))
BLOCKS = {
    f"model.layers.{n}.mlp.experts.down_proj_{part}": value
    for n in (0, 1)
    for part, value in (("blocks", CODES), ("scales", SCALES))
}
MTP = {f"mtp.{name}.weight": BF16 for name in ("fc", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj")}
GATE = {"model.layers.1.mlp.gate.weight": BF16, "model.embed_tokens.weight": BF16, "lm_head.weight": BF16}


def write(root: Path, tensors: dict[str, Any], scheme: dict[str, Any] | None, nested: bool = False) -> Path:
    root.mkdir()
    write_safetensors(root / "model.safetensors", tensors)
    config: dict[str, Any] = {
        "num_hidden_layers": 2,
        "mtp_num_hidden_layers": 1 if any(n.startswith("mtp") for n in tensors) else 0,
    }
    if scheme is not None:
        (config.setdefault("text_config", {}) if nested else config)["quantization_config"] = scheme
    (root / "config.json").write_text(json.dumps(config))
    return root


def found(root: Path) -> dict[str, str]:
    report = audit(root, root)
    return {f.code: f.message for f in report.findings if f.severity.label == "error"}


@pytest.mark.parametrize(
    ("tensors", "scheme", "code", "words"),
    [
        (FP8_TRUNK | GATE, {"quant_method": "fp8"}, None, ""),
        (PACKED | MTP | GATE, {"quant_method": "modelopt", "ignore": ["mtp.*"]}, None, ""),
        (PACKED | MTP | GATE, {"quant_method": "modelopt", "ignore": ["re:mtp\\..*"]}, None, ""),
        (PACKED | MTP | GATE, {"quant_method": "modelopt", "exclude": ["mtp.layers.0*"]}, "quant-mtp-plain", 'add to quantization_config.exclude: "mtp.fc"'),
        (PACKED | MTP | GATE, {"quant_method": "modelopt"}, "quant-mtp-plain", "3 modules are stored as BF16"),
        (PACKED | {"model.layers.0.mlp.up_proj.weight": BF16}, {"quant_method": "gptq"}, "quant-plain", '"model.layers.0.mlp.up_proj"'),
        (GATE | {"model.layers.0.mlp.up_proj.weight": BF16}, {"quant_method": "fp8"}, "quant-stale-config", "remove quantization_config"),
        (FP8_TRUNK | GATE, None, "quant-undeclared", "2 modules are quantised"),
        (PACKED | GATE, {"quant_method": "x", "ignore": ["model.layers.0.self_attn.o_proj"]}, "quant-excluded-packed", "layers.0.self_attn.o_proj"),
        (FP8_TRUNK | {"model.layers.1.new.weight": FP8}, {"quant_method": "fp8"}, "scale-missing", "model.layers.1.new.weight"),
        (FP8_TRUNK | {"model.layers.1.new.weight": BF16, "model.layers.1.new.weight_scale_inv": SCALE}, {"quant_method": "fp8", "ignore": ["model.layers.1.new"]}, "scale-orphan", "model.layers.1.new.weight_scale_inv"),
        (PACKED | {"model.layers.1.block_sparse_moe.gate.weight_packed": U8, "model.layers.1.block_sparse_moe.gate.weight_scale": FP8}, {"quant_method": "x"}, "router-quantised", "block_sparse_moe.gate"),
        # DeepSeek-V3.2 keeps these plain and says so nowhere; a pattern names parents, as in gpt-oss
        (FP8_TRUNK | GATE | {"model.layers.0.self_attn.indexer.weights_proj.weight": BF16, "mtp.0.eh_proj.weight": BF16}, {"quant_method": "fp8"}, None, ""),
        (BLOCKS | GATE | {"model.layers.0.self_attn.q_proj.weight": BF16}, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, None, ""),
        (BLOCKS | GATE | {"model.layers.0.self_attn.q_proj.weight": BF16}, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}, "quant-plain", '"model.layers.0.self_attn.q_proj"'),
        (BLOCKS | {"model.layers.1.mlp.experts.up_proj_blocks": CODES}, {"quant_method": "mxfp4"}, "scale-missing", "up_proj_blocks"),
        (BLOCKS | {"model.layers.1.mlp.experts.up_proj_scales": SCALES}, {"quant_method": "mxfp4"}, "scale-orphan", "up_proj_scales"),
        (FP8_TRUNK | {"mtp.0.eh_proj.weight": FP8, "mtp.0.eh_proj.weight_scale_inv": SCALE}, {"quant_method": "fp8"}, "quant-never-packed", "F8_E4M3"),
        (FP8_TRUNK | {"model.layers.0.input_layernorm.weight": FP8, "model.layers.0.input_layernorm.weight_scale_inv": SCALE}, {"quant_method": "fp8"}, "quant-never-packed", "input_layernorm"),
        (FP8_TRUNK | {"model.layers.0.mlp.experts.gate_up_proj": FP8, "model.layers.0.mlp.experts.gate_up_proj_scale_inv": SCALE}, {"quant_method": "fp8"}, None, ""),
        (FP8_TRUNK | {"model.layers.0.mlp.experts.gate_up_proj": FP8}, {"quant_method": "fp8"}, "scale-missing", "gate_up_proj"),
        (FP8_TRUNK | MTP | GATE, {"quant_method": "fp8"}, "quant-mtp-plain", "add to quantization_config.modules_to_not_convert"),
    ],
)  # fmt: skip
def test_scheme_against_storage(
    tmp_path: Path, tensors: dict[str, Any], scheme: dict[str, Any] | None, code: str | None, words: str
) -> None:
    codes = found(write(tmp_path / "x", tensors, scheme))
    assert set(codes) == ({code} if code else set())
    assert code is None or words in codes[code]


def test_a_nested_stale_scheme_is_named_by_its_path(tmp_path: Path) -> None:
    codes = found(write(tmp_path / "x", GATE, {"quant_method": "fp8"}, nested=True))
    assert "remove text_config.quantization_config" in codes["quant-stale-config"]


def test_leftover_and_lost_schemes_name_the_modules_from_headers_alone(tmp_path: Path) -> None:
    """Of bf16 under an FP8 scheme those that it covers: not the router, the embedding and what it excludes."""
    plain = (
        GATE | {f"model.layers.{n}.mlp.up_proj.weight": BF16 for n in range(3)} | {"model.embed_tokens.weight": BF16}
    )
    stale = write(tmp_path / "stale", plain, {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.2"]})
    lost = write(tmp_path / "lost", FP8_TRUNK | GATE, None)
    report = {f.code: f for f in audit(stale, lost, level="headers").findings}
    covered = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert report["quant-stale-config"].detail["modules"] == covered
    assert f"stored plain: {', '.join(covered)}; remove quantization_config" in report["quant-stale-config"].message
    packed = sorted(name.removesuffix(".weight") for name, spec in FP8_TRUNK.items() if spec[0] == "F8_E4M3")
    assert report["quant-undeclared"].detail["modules"] == packed
    assert report["quant-undeclared"].message.endswith(", ".join(packed))
