"""What Megatron must hold for the tensors of an HF model, in plain numpy: one statement per Megatron parameter.

Written from megatron-core 0.16.1 and transformers 5.24, with neither a mapping file nor mtpconvert open. Names are the
keys of a torch_dist checkpoint of a Transformer Engine model, the layer's number written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


def fused_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, groups: int) -> np.ndarray:
    """attention.py:SelfAttention.get_query_key_value_tensors: "q1 q2 k1 v1 | q3 q4 k2 v2 | ...", head by head.

    transformers' repeat_kv gives query head h the key h // (heads / groups), so group g has queries g*n .. g*n+n-1.
    """
    size, per_group = len(q) // heads, heads // groups
    rows = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows.append(q[head * size : (head + 1) * size])
        rows.append(k[group * size : (group + 1) * size])
        rows.append(v[group * size : (group + 1) * size])
    return np.concatenate(rows)


def fc1(hf: Arrays, prefix: str) -> np.ndarray:
    """mlp.py:MLP.forward: ``x_glu, x_linear = torch.chunk(x, 2, dim=-1)``, the activation on the first: gate first."""
    return np.concatenate([hf[f"{prefix}gate_proj.weight"], hf[f"{prefix}up_proj.weight"]])


def padded(table: np.ndarray, multiple: int) -> np.ndarray:
    """Megatron-LM, training/tokenizer: vocabulary rows up to the next multiple; rows of no token are zeros here."""
    rows = -(-len(table) // multiple) * multiple
    return np.concatenate([table, np.zeros((rows - len(table), *table.shape[1:]), table.dtype)])


def megatron_tensors(config: Mapping[str, Any], hf: Arrays, mtp_layers: int, multiple: int) -> dict[str, np.ndarray]:
    """Every Megatron parameter of the model ``config`` with the HF tensors ``hf``."""
    mcore = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"], multiple),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings"):
        mcore["output_layer.weight"] = padded(hf["lm_head.weight"], multiple)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        mcore |= _layer(config, hf, f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    for depth in range(mtp_layers):
        source, target = f"model.layers.{layers + depth}.", f"mtp.layers.{depth}."
        mcore |= _layer(config, hf, source, f"{target}transformer_layer.")
        # multi_token_prediction.py:_concat_embeddings: cat((enorm(embedding), hnorm(hidden))), as DeepSeek
        mcore[f"{target}enorm.weight"] = hf[f"{source}enorm.weight"]
        mcore[f"{target}hnorm.weight"] = hf[f"{source}hnorm.weight"]
        mcore[f"{target}eh_proj.weight"] = hf[f"{source}eh_proj.weight"]
        mcore[f"{target}final_layernorm.weight"] = hf[f"{source}shared_head.norm.weight"]
    return mcore


def _layer(config: Mapping[str, Any], hf: Arrays, source: str, target: str) -> dict[str, np.ndarray]:
    attention, mlp = f"{source}self_attn.", f"{source}mlp."
    parts: dict[str, np.ndarray] = {}
    if "kv_lora_rank" in config:  # multi_latent_attention.py:MLASelfAttention; its input norm stands alone
        parts["input_layernorm.weight"] = hf[f"{source}input_layernorm.weight"]
        if config.get("q_lora_rank"):
            parts["self_attention.linear_q_down_proj.weight"] = hf[f"{attention}q_a_proj.weight"]
            parts["self_attention.linear_q_up_proj.layer_norm_weight"] = hf[f"{attention}q_a_layernorm.weight"]
            parts["self_attention.linear_q_up_proj.weight"] = hf[f"{attention}q_b_proj.weight"]
        else:
            parts["self_attention.linear_q_proj.weight"] = hf[f"{attention}q_proj.weight"]
        parts["self_attention.linear_kv_down_proj.weight"] = hf[f"{attention}kv_a_proj_with_mqa.weight"]
        parts["self_attention.linear_kv_up_proj.layer_norm_weight"] = hf[f"{attention}kv_a_layernorm.weight"]
        parts["self_attention.linear_kv_up_proj.weight"] = hf[f"{attention}kv_b_proj.weight"]
    else:
        heads = config["num_attention_heads"]
        kind = config["model_type"]
        groups = config.get("num_key_value_heads") or {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(kind, heads)
        parts["self_attention.linear_qkv.layer_norm_weight"] = hf[f"{source}input_layernorm.weight"]
        for part in ("weight", "bias"):
            if f"{attention}q_proj.{part}" in hf:
                q, k, v = (hf[f"{attention}{name}_proj.{part}"] for name in "qkv")
                parts[f"self_attention.linear_qkv.{part}"] = fused_qkv(q, k, v, heads, groups)
        if f"{attention}q_norm.weight" in hf:
            parts["self_attention.q_layernorm.weight"] = hf[f"{attention}q_norm.weight"]
            parts["self_attention.k_layernorm.weight"] = hf[f"{attention}k_norm.weight"]
    parts["self_attention.linear_proj.weight"] = hf[f"{attention}o_proj.weight"]
    norm = hf[f"{source}post_attention_layernorm.weight"]
    if f"{mlp}gate.weight" not in hf:
        parts["mlp.linear_fc1.layer_norm_weight"] = norm
        parts["mlp.linear_fc1.weight"] = fc1(hf, mlp)
        parts["mlp.linear_fc2.weight"] = hf[f"{mlp}down_proj.weight"]
    else:
        experts = range(config["n_routed_experts"])
        parts["pre_mlp_layernorm.weight"] = norm
        parts["mlp.router.weight"] = hf[f"{mlp}gate.weight"]
        parts["mlp.router.expert_bias"] = hf[f"{mlp}gate.e_score_correction_bias"]
        parts["mlp.shared_experts.linear_fc1.weight"] = fc1(hf, f"{mlp}shared_experts.")
        parts["mlp.shared_experts.linear_fc2.weight"] = hf[f"{mlp}shared_experts.down_proj.weight"]
        # moe/experts.py:sharded_state_dict: expert e of all at index e of a leading axis
        parts["mlp.experts.experts.linear_fc1.weight"] = np.stack([fc1(hf, f"{mlp}experts.{e}.") for e in experts])
        parts["mlp.experts.experts.linear_fc2.weight"] = np.stack(
            [hf[f"{mlp}experts.{e}.down_proj.weight"] for e in experts]
        )
    return {target + name: values for name, values in parts.items()}
