"""Configs and tensor lists of the tiny Hugging Face checkpoints that ``tiny.write_tiny`` writes; no torch.

Names, shapes and config fields are those that transformers 5.24 writes for the class named beside each family;
``tests/stores/test_tiny.py`` holds them against ``save_pretrained``. Dims are distinct where the family lets them be
(36 hidden, 44 or 52 ffn, 12 expert ffn, ...), so that an exchange of two axes changes a shape.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
Shape = tuple[int, ...]

_COMMON: Config = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_hidden_layers": 3,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 98,
}

CONFIGS: dict[str, Config] = {
    # transformers/models/deepseek_v3: DeepseekV3ForCausalLM; MTP layout of deepseek-ai/DeepSeek-V3 README_WEIGHTS.md
    "deepseek_v3": _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "head_dim": 6,
        "hidden_size": 36,
        "intermediate_size": 44,
        "kv_lora_rank": 18,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 12,
        "n_group": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "q_lora_rank": 28,
        "qk_head_dim": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "v_head_dim": 14,
    },
    # transformers/models/qwen3: Qwen3ForCausalLM; 2 groups of 3 query heads, head_dim * heads != hidden
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 10,
        "hidden_size": 36,
        "intermediate_size": 52,
        "layer_types": ["full_attention"] * 3,
        "max_position_embeddings": 4096,
        "max_window_layers": 28,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    # transformers/models/qwen2: Qwen2ForCausalLM; q, k, v biases, tied, 2 groups of 3 query heads
    "qwen2": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": 36,
        "intermediate_size": 52,
        "layer_types": ["full_attention"] * 3,
        "max_position_embeddings": 4096,
        "max_window_layers": 28,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    # transformers/models/llama: LlamaForCausalLM; 4 groups of 2 query heads
    "llama": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 6,
        "hidden_size": 48,
        "intermediate_size": 68,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
    },
    # transformers/models/mistral: MistralForCausalLM; head_dim 10 where hidden / heads is 6
    "mistral": _COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 10,
        "hidden_size": 36,
        "intermediate_size": 52,
        "max_position_embeddings": 4096,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
}


def _mla(c: Config) -> dict[str, Shape]:
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    shapes = {"input_layernorm.weight": (hidden,)}
    if c["q_lora_rank"] is None:
        shapes["self_attn.q_proj.weight"] = (query, hidden)
    else:
        shapes |= {
            "self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            "self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            "self_attn.q_b_proj.weight": (query, c["q_lora_rank"]),
        }
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
        "self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
        "self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
        "self_attn.o_proj.weight": (hidden, heads * c["v_head_dim"]),
        "post_attention_layernorm.weight": (hidden,),
    }


def _gated_mlp(prefix: str, ffn: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


def _moe(c: Config) -> dict[str, Shape]:
    experts, ffn, hidden = c["n_routed_experts"], c["moe_intermediate_size"], c["hidden_size"]
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for expert in range(experts):
        shapes |= _gated_mlp(f"mlp.experts.{expert}.", ffn, hidden)
    return shapes | _gated_mlp("mlp.shared_experts.", ffn * c["n_shared_experts"], hidden)


def _gqa(c: Config) -> dict[str, Shape]:
    hidden = c["hidden_size"]
    head = c.get("head_dim") or hidden // c["num_attention_heads"]
    rows = {"q": c["num_attention_heads"] * head, "k": c["num_key_value_heads"] * head}
    rows["v"] = rows["k"]
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for part, height in rows.items():
        shapes[f"self_attn.{part}_proj.weight"] = (height, hidden)
        if c["model_type"] == "qwen2" or c.get("attention_bias"):
            shapes[f"self_attn.{part}_proj.bias"] = (height,)
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if c["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes | {"post_attention_layernorm.weight": (hidden,)}


def _mtp_extras(c: Config, *, copies: bool) -> dict[str, Shape]:
    hidden = c["hidden_size"]
    shapes: dict[str, Shape] = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,)}
    shapes |= {"eh_proj.weight": (hidden, 2 * hidden), "shared_head.norm.weight": (hidden,)}
    if copies:
        shapes |= dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), (c["vocab_size"], hidden))
    return shapes


def units(config: Config, mtp_layers: int, *, copies: bool) -> list[dict[str, Shape]]:
    """The tensors in units that a shard never splits: embedding, each trunk layer, and last of all the final trunk
    layer together with the final norm, the head and every MTP layer."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    embedding: dict[str, Shape] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    blocks = []
    for layer in range(layers + mtp_layers):
        if config["model_type"] == "deepseek_v3":
            dense = layer < config["first_k_dense_replace"]
            block = _mla(config)
            block |= _gated_mlp("mlp.", config["intermediate_size"], hidden) if dense else _moe(config)
        else:
            block = _gqa(config) | _gated_mlp("mlp.", config["intermediate_size"], hidden)
        if layer >= layers:
            block |= _mtp_extras(config, copies=copies)
        blocks.append({f"model.layers.{layer}.{name}": shape for name, shape in block.items()})
    tail = {name: shape for block in blocks[layers - 1 :] for name, shape in block.items()}
    tail["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tail["lm_head.weight"] = (config["vocab_size"], hidden)
    return [embedding, *blocks[: layers - 1], tail]
