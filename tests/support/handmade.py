# ruff: noqa: E501 (tables of names)
"""Megatron torch_dist checkpoints from hand-written arithmetic: no mapping file, no converter, no auditor.

The layouts are written out from megatron-core's own code (attention.py ``get_query_key_value_tensors``: rows grouped by
query group, q then k then v; mlp.py ``apply_swiglu_sharded_factory``: gate then up; experts.py: experts stacked on a new
first axis; multi_token_prediction.py: eh_proj reads [embedding, hidden]) and saved with torch's own DCP.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import read_safetensors

Arrays = dict[str, np.ndarray]
_KINDS = {"BF16": "<u2", "F32": "<u4"}


def read_arrays(root: Path) -> Arrays:
    """Every tensor of an HF directory as an array of bit patterns."""
    tensors = read_safetensors(root)
    return {
        name: np.frombuffer(data, _KINDS[dtype]).reshape(shape).copy() for name, (dtype, shape, data) in tensors.items()
    }


def megatron_arrays(hf: Arrays, config: dict[str, Any], *, rows: int | None = None) -> Arrays:
    """The canonical (Transformer Engine) names and layouts; vocabulary padded with zeros to ``rows``."""
    out: Arrays = {}
    layers = config["num_hidden_layers"]
    depth = config.get("num_nextn_predict_layers", 0)
    out["embedding.word_embeddings.weight"] = _padded(hf["model.embed_tokens.weight"], rows)
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = _padded(hf["lm_head.weight"], rows)
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for n in range(layers):
        _layer(out, hf, config, f"model.layers.{n}.", f"decoder.layers.{n}.")
    for k in range(depth):
        source, target = f"model.layers.{layers + k}.", f"mtp.layers.{k}."
        if source + "enorm.weight" not in hf:
            continue
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("shared_head.norm", "final_layernorm"),
        ):
            out[f"{target}{theirs}.weight"] = hf[f"{source}{ours}.weight"]
        _layer(out, hf, config, source, f"{target}transformer_layer.")
    return {name: np.ascontiguousarray(value) for name, value in out.items()}


def _padded(value: np.ndarray, rows: int | None) -> np.ndarray:
    if rows is None or rows == len(value):
        return value
    return np.concatenate([value, np.zeros((rows - len(value), value.shape[1]), value.dtype)])


def _layer(out: Arrays, hf: Arrays, c: dict[str, Any], s: str, t: str) -> None:
    attention = f"{t}self_attention."
    out[f"{attention}linear_proj.weight"] = hf[f"{s}self_attn.o_proj.weight"]
    if "kv_lora_rank" in c:
        out[f"{t}input_layernorm.weight"] = hf[f"{s}input_layernorm.weight"]
        for theirs, ours in (
            ("linear_q_down_proj.weight", "q_a_proj.weight"), ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight"),
            ("linear_q_up_proj.weight", "q_b_proj.weight"), ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"),
            ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight"), ("linear_kv_up_proj.weight", "kv_b_proj.weight"),
        ):  # fmt: skip
            out[attention + theirs] = hf[f"{s}self_attn.{ours}"]
    else:
        out[f"{attention}linear_qkv.layer_norm_weight"] = hf[f"{s}input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{s}self_attn.q_proj.{kind}" in hf:
                out[f"{attention}linear_qkv.{kind}"] = _grouped(
                    *(hf[f"{s}self_attn.{p}_proj.{kind}"] for p in "qkv"), c
                )
        for norm in ("q_norm", "k_norm"):
            if f"{s}self_attn.{norm}.weight" in hf:
                out[f"{attention}{norm[0]}_layernorm.weight"] = hf[f"{s}self_attn.{norm}.weight"]
    if f"{s}mlp.gate.weight" in hf:
        _experts(out, hf, c, s, t)
    else:
        out[f"{t}mlp.linear_fc1.layer_norm_weight"] = hf[f"{s}post_attention_layernorm.weight"]
        out[f"{t}mlp.linear_fc1.weight"] = np.concatenate(
            [hf[f"{s}mlp.gate_proj.weight"], hf[f"{s}mlp.up_proj.weight"]]
        )
        out[f"{t}mlp.linear_fc2.weight"] = hf[f"{s}mlp.down_proj.weight"]


def _grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray, c: dict[str, Any]) -> np.ndarray:
    groups = c["num_key_value_heads"]
    parts = [
        np.concatenate([a[g] for a in (x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v))]) for g in range(groups)
    ]
    return np.concatenate(parts)


def _experts(out: Arrays, hf: Arrays, c: dict[str, Any], s: str, t: str) -> None:
    out[f"{t}pre_mlp_layernorm.weight"] = hf[f"{s}post_attention_layernorm.weight"]
    out[f"{t}mlp.router.weight"] = hf[f"{s}mlp.gate.weight"]
    out[f"{t}mlp.router.expert_bias"] = hf[f"{s}mlp.gate.e_score_correction_bias"]
    gate, up, down = (
        [hf[f"{s}mlp.experts.{e}.{p}_proj.weight"] for e in range(c["n_routed_experts"])]
        for p in ("gate", "up", "down")
    )
    out[f"{t}mlp.experts.experts.linear_fc1.weight"] = np.stack(
        [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
    )
    out[f"{t}mlp.experts.experts.linear_fc2.weight"] = np.stack(down)
    shared = f"{s}mlp.shared_experts."
    out[f"{t}mlp.shared_experts.linear_fc1.weight"] = np.concatenate(
        [hf[f"{shared}gate_proj.weight"], hf[f"{shared}up_proj.weight"]]
    )
    out[f"{t}mlp.shared_experts.linear_fc2.weight"] = hf[f"{shared}down_proj.weight"]


def megatron_args(c: dict[str, Any], rows: int | None = None) -> dict[str, Any]:
    """The arguments that training with this model would have stored (megatron/training/arguments.py)."""
    args: dict[str, Any] = {
        "num_layers": c["num_hidden_layers"], "hidden_size": c["hidden_size"], "num_attention_heads": c["num_attention_heads"],
        "group_query_attention": "kv_lora_rank" not in c, "num_query_groups": c["num_key_value_heads"],
        "kv_channels": c.get("head_dim"), "ffn_hidden_size": c["intermediate_size"], "norm_epsilon": c["rms_norm_eps"],
        "padded_vocab_size": rows or c["vocab_size"], "untie_embeddings_and_output_weights": not c["tie_word_embeddings"],
        "add_bias_linear": False, "add_qkv_bias": c["model_type"] == "qwen2", "qk_layernorm": c["model_type"] in ("qwen3", "deepseek_v3"),
        "mtp_num_layers": c.get("num_nextn_predict_layers") or None, "num_experts": c.get("n_routed_experts"),
        "multi_latent_attention": "kv_lora_rank" in c, "normalization": "RMSNorm", "swiglu": True,
    }  # fmt: skip
    if "kv_lora_rank" in c:
        args |= {
            "q_lora_rank": c["q_lora_rank"], "kv_lora_rank": c["kv_lora_rank"], "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"], "v_head_dim": c["v_head_dim"], "rotary_interleaved": True,
            "moe_ffn_hidden_size": c["moe_intermediate_size"], "moe_router_topk": c["num_experts_per_tok"],
            "moe_shared_expert_intermediate_size": c["moe_intermediate_size"] * c["n_shared_experts"],
            "moe_layer_freq": [int(n >= c["first_k_dense_replace"]) for n in range(c["num_hidden_layers"])],
            "moe_router_enable_expert_bias": True,
        }  # fmt: skip
    return args


def write_torch_dist(root: Path, arrays: Arrays, args: dict[str, Any] | None, *, iteration: str = "release") -> Path:
    """``root`` as Megatron-LM's ``--load`` expects it, saved by ``torch.distributed.checkpoint``; returns the iteration."""
    import torch
    from torch.distributed import checkpoint

    folder = root / iteration
    folder.mkdir(parents=True)
    kinds = {"<u2": torch.bfloat16, "<u4": torch.float32}
    state = {
        name: torch.from_numpy(value.view({2: np.int16, 4: np.int32}[value.itemsize]).copy()).view(
            kinds[value.dtype.str]
        )
        for name, value in arrays.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    if args is not None:
        common["args"] = argparse.Namespace(**args)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text(iteration)
    return folder


def write_pair(hf_root: Path, megatron_root: Path, *, rows: int | None = None, with_args: bool = True) -> None:
    """The Megatron side of the HF checkpoint at ``hf_root``."""
    config = json.loads((hf_root / "config.json").read_text())
    arrays = megatron_arrays(read_arrays(hf_root), config, rows=rows)
    write_torch_dist(megatron_root, arrays, megatron_args(config, rows) if with_args else None)
