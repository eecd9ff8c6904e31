"""Tiny GLM-4.5 checkpoints: grouped-query attention with biases and q/k norms, experts and MTP as DeepSeek-V3 has them.

Names and shapes: transformers/models/glm4_moe/modeling_glm4_moe.py, and for MTP the layout of zai-org/GLM-4.5's index.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import write_safetensors
from tests.support.tiny_families import Config, Shape, _gated_mlp, _gqa, _moe, _mtp_extras

CONFIG: Config = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 12,
    "intermediate_size": 20,
    "max_position_embeddings": 4096,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 6,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 14,
}


def write_glm(out: Path, **overrides: Any) -> Path:
    """One F32 file, every element a pattern of its own (the MTP copies aside); returns ``out``."""
    config = CONFIG | overrides
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    layers = config["num_hidden_layers"]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        block = _gqa(config)
        if config["use_qk_norm"]:
            block |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config["head_dim"],))
        if layer < config["first_k_dense_replace"]:
            block |= _gated_mlp("mlp.", config["intermediate_size"], config["hidden_size"])
        else:
            block |= _moe(config)
        if layer >= layers:
            block |= _mtp_extras(config, copies=True)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    tensors: dict[str, tuple[str, Shape, bytes]] = {}
    at = 0x3C000001
    for name, shape in shapes.items():
        source = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        copied = source.get(name.split(".", 3)[-1]) if name.startswith("model.layers.") else None
        if copied:
            tensors[name] = tensors[copied]
            continue
        tensors[name] = ("F32", shape, np.arange(at, at + prod(shape)).astype("<u4").tobytes())
        at += prod(shape)
    out.mkdir()
    write_safetensors(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(config))
    return out
