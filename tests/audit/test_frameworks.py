# ruff: noqa: E501 (the table of families)
"""What the real frameworks write: megatron-core's saves at any parallel size pass, transformers' saves lose MTP and fail."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest

from mtpconvert.audit.api import audit
from mtpconvert.audit.roles.huggingface import FAMILIES as HF_FAMILIES
from tests.support import mcore_ranks
from tests.support.handmade import megatron_args, megatron_arrays, read_arrays, write_torch_dist
from tests.support.tiny import read_safetensors, write_safetensors, write_tiny


def clean(left: Path, right: Path) -> list[str]:
    report = audit(left, right)
    assert report.tensors > 0
    return [f"{f.code}: {f.message}" for f in report.findings if f.severity.label != "note"]


def test_a_real_save_of_two_ranks_passes(tmp_path: Path) -> None:
    """Chunks as two ranks write them: cut by rows (fc1), by columns (fc2, linear_proj)."""
    from tests.support.frameworks_convert import to_mcore

    hf = write_tiny("deepseek_v3", tmp_path / "hf")
    source = to_mcore(hf, tmp_path / "one", spec="local")
    mcore_ranks.run(
        "tests.support.mcore_jobs:resave", 2, source=str(source), target=str(tmp_path / "two"), spec="local", tp=2
    )
    assert clean(hf, tmp_path / "two") == []
    assert clean(tmp_path / "two", hf) == []
    assert clean(tmp_path / "one", tmp_path / "two") == []


def test_a_save_without_mtp_fails_by_name(tmp_path: Path) -> None:
    hf = write_tiny("deepseek_v3", tmp_path / "hf")
    from tests.support.frameworks_convert import to_mcore

    source = to_mcore(hf, tmp_path / "one", spec="local")
    mcore_ranks.run(
        "tests.support.mcore_jobs:resave", source=str(source), target=str(tmp_path / "two"), mtp_num_layers=None
    )
    report = audit(hf, tmp_path / "two")
    lost = [f for f in report.findings if f.code == "mtp-layer-missing"]
    assert [f.tensor for f in lost] == ["mtp.layers.0.*"]
    assert "0 of 19 tensors" in lost[0].message
    assert not [f for f in report.findings if f.code == "tensor-missing"], "the trunk is whole"


def test_stacked_and_per_layer_megatron_keys_are_one_model(tmp_path: Path) -> None:
    """Homogeneous blocks are saved under one key with a layer axis (transformer_block.py: sharded_state_dict)."""
    import numpy as np

    hf = write_tiny("qwen3", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    arrays = megatron_arrays(read_arrays(hf), config)
    write_torch_dist(tmp_path / "flat", arrays, megatron_args(config))
    tails = [name.removeprefix("decoder.layers.0.") for name in arrays if name.startswith("decoder.layers.0.")]
    stacked = {name: value for name, value in arrays.items() if not name.startswith("decoder.layers.")}
    for tail in tails:
        stacked[f"decoder.layers.{tail}"] = np.stack([arrays[f"decoder.layers.{n}.{tail}"] for n in range(3)])
    write_torch_dist(tmp_path / "stacked", stacked, megatron_args(config))
    assert clean(tmp_path / "flat", tmp_path / "stacked") == []
    assert clean(hf, tmp_path / "stacked") == []
    stacked["decoder.layers.mlp.linear_fc2.weight"][[0, 1]] = stacked["decoder.layers.mlp.linear_fc2.weight"][[1, 0]]
    shutil.rmtree(tmp_path / "stacked")
    write_torch_dist(tmp_path / "stacked", stacked, megatron_args(config))
    messages = clean(hf, tmp_path / "stacked")
    assert len(messages) == 1 and "trunk layer" in messages[0] and "exchanged" in messages[0]


# model type -> (tiny sizes, count key, its value, names of MTP tensors by the published layout)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
APPENDED = [
    f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj")
]
QWEN = [
    f"mtp.{name}.weight"
    for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.self_attn.o_proj")
]
FAMILIES = {
    "deepseek_v3": (MOE | MLA, "num_nextn_predict_layers", APPENDED, "model.layers.2."),
    "glm4_moe": (MOE, "num_nextn_predict_layers", APPENDED, "model.layers.2."),
    "glm4_moe_lite": (MOE | MLA, "num_nextn_predict_layers", APPENDED, "model.layers.2."),
    "hy_v3": (MOE, "num_nextn_predict_layers", [*APPENDED[:3], "model.layers.2.final_layernorm.weight"], "model.layers.2."),
    "qwen3_next": (MOE | {"layer_types": ["full_attention"] * 2}, "num_nextn_predict_layers", QWEN, "mtp."),
    "qwen3_5_text": ({"layer_types": ["full_attention"] * 2}, "mtp_num_hidden_layers", QWEN, "mtp."),
    "mellum": (MOE, "num_nextn_predict_layers", QWEN, "mtp."),
    "exaone_moe": (MOE | {"layer_types": ["full_attention"] * 2}, "num_nextn_predict_layers", QWEN, "mtp."),
    "ernie4_5_moe": (MOE, "num_nextn_predict_layers", [f"model.mtp_{n}.0.weight" for n in ("emb_norm", "hidden_norm", "linear_proj")] + ["model.mtp_block.0.self_attn.o_proj.weight"], "model.mtp_"),
    "mimo_v2_flash": ({"layer_types": ["full_attention"] * 2, "v_head_dim": 8} | MOE, "num_nextn_predict_layers", [f"model.mtp.layers.0.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "final_layernorm")], "model.mtp.layers.0."),
    "minimax_m2": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "num_mtp_modules", [f"model.mtp.layers.0.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "final_layernorm")], "model.mtp.layers.0."),
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_save_pretrained_leaves_out_is_found(tmp_path: Path, model_type: str) -> None:
    """from_pretrained drops MTP and save_pretrained does not write it: the config still declares it."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes, key, names, prefix = FAMILIES[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[model_type](**SIZES | sizes)
        setattr(config, key, 1)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "left")
        path = next((tmp_path / "left").glob("*.safetensors"))
        table = json.loads((tmp_path / "left" / "config.json").read_text()) | {key: 1}
        (tmp_path / "left" / "config.json").write_text(json.dumps(table))
        tensors = read_safetensors(path)
        for number, name in enumerate(names):
            shape: tuple[int, ...] = (32, 32) if name.endswith("o_proj.weight") else (32,)
            if name.endswith(("eh_proj.weight", "fc.weight", "linear_proj.0.weight")):
                shape = (32, 64)
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            tensors[name] = ("BF16", shape, bytes([number + 1, 0x3F]) * (size // 2))
        write_safetensors(path, tensors)
        AutoModelForCausalLM.from_pretrained(tmp_path / "left", dtype="auto").save_pretrained(tmp_path / "right")
    kept = {name for name in names if name in read_safetensors(tmp_path / "right")}
    assert not kept, "transformers keeps MTP now: this test is out of date"
    report = audit(tmp_path / "left", tmp_path / "right")
    assert report.verdict() == "fail"
    lost = [f for f in report.findings if f.code == "mtp-layer-missing"]
    assert len(lost) == 1 and f"{len(names)} tensors" in lost[0].message
    assert sorted(f.tensor or "" for f in report.findings if f.code == "mtp-tensor-missing") == sorted(names)
    assert report.mtp.layers[0].prefix.startswith(prefix.removesuffix("_"))
    again = audit(tmp_path / "left", tmp_path / "left")
    codes = {f.code for f in again.findings if f.severity.label == "error"}
    # the MTP layers of this test are scraps; only of families whose MTP layers have roles (of MiniMax-M2 none was ever
    # published) does the auditor know what is lacking
    known = table["architectures"][0] in HF_FAMILIES and model_type != "minimax_m2"
    assert codes == ({"mtp-layer-incomplete"} if known else set())


def test_the_router_that_transformers_widens_is_reported_and_passes(tmp_path: Path) -> None:
    """``_keep_in_fp32_modules_strict`` of modeling_deepseek_v3.py: ``gate.weight`` is written as F32."""
    import numpy as np
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    gate = "model.layers.1.mlp.gate.weight"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING["deepseek_v3"](**SIZES | MOE | MLA, num_nextn_predict_layers=0)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "left")
        path = next((tmp_path / "left").glob("*.safetensors"))
        tensors = read_safetensors(path)
        dtype, shape, raw = tensors[gate]
        if dtype == "F32":  # as published: BF16
            tensors[gate] = ("BF16", shape, (np.frombuffer(raw, "<u4") >> 16).astype("<u2").tobytes())
            write_safetensors(path, tensors)
        AutoModelForCausalLM.from_pretrained(tmp_path / "left", dtype="auto").save_pretrained(tmp_path / "right")
    again = next((tmp_path / "right").glob("*.safetensors"))
    saved = read_safetensors(again)
    assert saved[gate][0] == "F32"
    for level in ("headers", "bits"):
        report = audit(tmp_path / "left", tmp_path / "right", level=level)
        assert report.verdict() == "pass"
        (found,) = [one for one in report.findings if one.tensor == gate]
        assert (found.code, found.severity.label) == ("widened", "warning")
    assert "; 0 of 128 values changed, " in found.message and found.message.endswith(": exact")
    values = bytearray(saved[gate][2])
    values[0] ^= 1  # below what BF16 holds
    write_safetensors(again, saved | {gate: ("F32", saved[gate][1], bytes(values))})
    (found,) = [one for one in audit(tmp_path / "left", tmp_path / "right").findings if one.tensor == gate]
    assert (found.code, found.severity.label) == ("bytes-differ", "error")
