"""Megatron arguments for a checkpoint that carries none, from the other side's config.json and roles.

Argument names: megatron/training/arguments.py; config keys: the ``configuration_*.py`` of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from mtpconvert.audit.mtp import count_keys
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.told import facts_from_roles

# What no tensor of a checkpoint tells.
_FROM_CONFIG = ("norm_epsilon", "moe_router_topk", "mtp_num_layers")


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def facts_of(config: dict[str, Any], placements: list[Placement]) -> dict[str, Any]:
    """What a Hugging Face checkpoint says, under Megatron's names: from its roles, the rest from its config."""
    said = facts_from_config(config)
    return {name: said[name] for name in _FROM_CONFIG if name in said} | facts_from_roles(placements)


def facts_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """What the config says by the usual keys, for an architecture whose roles are not known.

    Flags that only a tensor can tell are left out.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    layers = _first(config, "num_hidden_layers")
    heads = _first(config, "num_attention_heads")
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts")
    counts = [count.value for count in count_keys(config) if count.value is not None]
    facts: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": _first(config, "hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": _first(config, "num_key_value_heads") or heads,
        "group_query_attention": True,
        "kv_channels": _first(config, "head_dim"),
        "ffn_hidden_size": _first(config, "intermediate_size"),
        "vocab_size": _first(config, "vocab_size"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "mtp_num_layers": max(counts) if counts else None,
        "norm_epsilon": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
        "num_experts": experts,
        "moe_router_topk": _first(config, "num_experts_per_tok"),
    }
    if experts:
        width = _first(config, "moe_intermediate_size")
        shared = _first(config, "n_shared_experts")
        dense = _first(config, "first_k_dense_replace") or 0
        facts |= {
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * shared if width and shared else None,
            "moe_layer_freq": [int(layer >= dense) for layer in range(layers or 0)],
        }
    if _first(config, "kv_lora_rank"):
        facts |= {
            "multi_latent_attention": True,
            "q_lora_rank": _first(config, "q_lora_rank"),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": _first(config, "qk_nope_head_dim"),
            "qk_pos_emb_head_dim": _first(config, "qk_rope_head_dim"),
            "v_head_dim": _first(config, "v_head_dim"),
            "kv_channels": None,
            "num_query_groups": None,
        }
    return {key: value for key, value in facts.items() if value is not None}


# Arguments whose value must agree with the config's, and what a difference does.
COMPARED: dict[str, str] = {
    "num_layers": "another number of trunk layers is built",
    "hidden_size": "no tensor fits",
    "num_attention_heads": "queries are cut into other heads",
    "num_query_groups": "rows of linear_qkv are read in other groups",
    "kv_channels": "rows of linear_qkv are cut into other heads",
    "ffn_hidden_size": "gate and up are cut at another row",
    "moe_ffn_hidden_size": "gate and up of experts are cut at another row",
    "moe_shared_expert_intermediate_size": "gate and up of the shared expert are cut at another row",
    "moe_layer_freq": "other layers are built as MoE",
    "moe_router_topk": "another number of experts answers",
    "num_experts": "experts are lost or invented",
    "vocab_size": "tokens go out of range",
    "untie_embeddings_and_output_weights": "the head is another matrix",
    "multi_latent_attention": "attention of another kind is built",
    "q_lora_rank": "the query latent has another width",
    "kv_lora_rank": "the latent and the rotary key are cut at another row",
    "qk_head_dim": "heads are cut at other rows",
    "qk_pos_emb_head_dim": "heads are cut at other rows",
    "v_head_dim": "heads are cut at other rows",
    "norm_epsilon": "norms compute something else",
    "attention_output_gate": "rows of linear_qkv are read as gates, or gates as queries",
    "experimental_attention_variant": "attention of another kind is built",
    "linear_attention_freq": "other layers are built as delta nets",
    "linear_num_key_heads": "a delta net's rows are cut into other heads",
    "linear_key_head_dim": "a delta net's rows are cut into other heads",
    "linear_num_value_heads": "a delta net's rows are cut into other heads",
    "linear_value_head_dim": "a delta net's rows are cut into other heads",
    "linear_conv_kernel_dim": "a delta net's convolutions have another length",
    "dsa_indexer_n_heads": "index queries are cut into other heads",
    "dsa_indexer_head_dim": "index queries are cut into other heads",
    "softmax_type": "sinks are added to every softmax, or left out",
    "moe_shared_expert_gate": "the shared expert's output is scaled, or not",
}
