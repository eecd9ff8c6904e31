"""As ``family_tables``, for the families that ``--dialect bridge`` writes: cases, and elements of published sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.family_tables import (
    Case,
    Config,
    Shapes,
    _deepseek,
    _ends,
    _gqa,
    appended,
    beside_vision,
    deepseek_extras,
    qwen_mtp,
    transformers_shapes,
    write_shapes,
)


def without_tied_head(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if "lm_head" not in name}


def mimo_v2_mtp(config: Config, trunk: Shapes, depth: int) -> Shapes:
    """vLLM's mimo_v2_mtp.py:MiMoV2MTPLayer: the attention of a sliding layer, a dense MLP, and norms of its own."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    groups = config.get("swa_num_key_value_heads") or 2 * config["num_key_value_heads"]
    norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    layer: Shapes = {f"{norm}.weight": (hidden,) for norm in norms}
    layer |= {
        "eh_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (heads * config["head_dim"], hidden),
        "self_attn.k_proj.weight": (groups * config["head_dim"], hidden),
        "self_attn.v_proj.weight": (groups * config["v_head_dim"], hidden),
        "self_attn.o_proj.weight": (hidden, heads * config["v_head_dim"]),
        "self_attn.attention_sink_bias": (heads,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {f"model.mtp.layers.{depth}.{name}": shape for name, shape in layer.items()}


def pangu_trunk(config: Config) -> Shapes:
    """The publisher's modeling_openpangu_moe.py: DeepSeek-V3's modules, a norm more on either side of the MLP, and no
    bias in the router, which vLLM's openpangu.py gives it where ``router_enable_expert_bias`` says so."""
    like = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    spelled = {
        "attention_q_lora_dim": "q_lora_rank", "attention_kv_lora_dim": "kv_lora_rank",
        "attention_qk_dim": "qk_nope_head_dim", "attention_qk_rope_dim": "qk_rope_head_dim",
        "attention_v_dim": "v_head_dim", "num_routed_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts", "num_dense_layers": "first_k_dense_replace",
    }  # fmt: skip
    shapes: Shapes = {}
    for name, shape in transformers_shapes({spelled.get(k, k): v for k, v in config.items()} | like).items():
        if not name.endswith("e_score_correction_bias") or config.get("router_enable_expert_bias"):
            shapes[name] = shape
        if name.endswith("post_attention_layernorm.weight"):
            for side in ("pre", "post"):
                shapes[name.replace("post_attention", f"{side}_mlp")] = shape
    return shapes


PUBLISHED_SPELLING: Config = {  # of the publisher, which transformers' config class does not read
    "layer_types": ..., "mlp_layer_types": ..., "rms_norm_eps": ..., "rope_parameters": ..., "sliding_window_size": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1, 1, 1], "num_hidden_layers": 6,
    "layernorm_epsilon": 1e-6, "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
    "swa_num_key_value_heads": 4, "swa_head_dim": 12, "swa_v_head_dim": 10, "swa_num_attention_heads": 8,
    "routed_scaling_factor": None, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip
PANGU_SPELLING: Config = {  # of configuration_openpangu_moe.py; the tiny config has vLLM's
    "q_lora_rank": ..., "kv_lora_rank": ..., "qk_nope_head_dim": ..., "qk_rope_head_dim": ..., "v_head_dim": ...,
    "n_routed_experts": ..., "n_shared_experts": ..., "first_k_dense_replace": ..., "num_nextn_predict_layers": ...,
    "attention_q_lora_dim": 28, "attention_kv_lora_dim": 18, "attention_qk_dim": 10, "attention_qk_rope_dim": 6,
    "attention_v_dim": 14, "num_routed_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1,
    "num_mtp_layers": 2,
}  # fmt: skip


def mimo_v2_published(config: Config) -> Shapes:
    """The same model in transformers' words."""
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in config["hybrid_layer_pattern"]]
    mlps = ["sparse" if sparse else "dense" for sparse in config["moe_layer_freq"]]
    return transformers_shapes(config | {"layer_types": kinds, "mlp_layer_types": mlps})


BRIDGE_CASES: dict[str, Case] = {
    name: replace(case, dialect="bridge", specs=("te",))
    for name, case in {
        "Gemma 2": Case("Gemma2ForCausalLM"),
        "Gemma 2, layers not listed": Case("Gemma2ForCausalLM", {"layer_types": ...}),
        "Gemma 3": Case("Gemma3ForCausalLM"),
        "Gemma 3 with vision": Case(
            "Gemma3ForConditionalGeneration", trunk=lambda config: without_tied_head(beside_vision(config))
        ),
        "Gemma 3 with vision, as the modules are named": Case(
            "Gemma3ForConditionalGeneration", trunk=lambda config: without_tied_head(beside_vision(config, saved=False))
        ),
        "GLM-4": Case("Glm4ForCausalLM"),
        "GLM-4 without biases": Case("Glm4ForCausalLM", {"attention_bias": False, "tie_word_embeddings": True}),
        "OLMo 2": Case("Olmo2ForCausalLM"),
        "OLMo 2, as many groups as heads": Case("Olmo2ForCausalLM", {"num_key_value_heads": 6}),
        "OLMo 3": Case("Olmo3ForCausalLM"),
        "Mellum 2": Case("MellumForCausalLM", mtp=qwen_mtp, depths=1),
        "Mellum 2 without MTP": Case(
            "MellumForCausalLM", {"num_nextn_predict_layers": ..., "mlp_layer_types": ["sparse"] * 4}
        ),
        "MiniMax-M2": Case("MiniMaxM2ForCausalLM"),
        "MiMo-V2-Flash": Case("MiMoV2FlashForCausalLM", mtp=mimo_v2_mtp, depths=3),
        "MiMo-V2-Flash as published": Case(
            "MiMoV2FlashForCausalLM", PUBLISHED_SPELLING, trunk=mimo_v2_published, mtp=mimo_v2_mtp, depths=3
        ),
        "openPangu-Ultra-MoE": Case(
            "PanguUltraMoEForCausalLM", trunk=pangu_trunk, mtp=appended(deepseek_extras), depths=1
        ),
        "openPangu-Ultra-MoE, keys of its first release": Case(
            "PanguUltraMoEForCausalLM",
            PANGU_SPELLING | {"router_enable_expert_bias": True},
            trunk=pangu_trunk,
            mtp=appended(deepseek_extras),
            depths=2,
        ),
    }.items()
}


def write_bridge_case(name: str, out: Path, fill: str = "counter", **changes: Any) -> Path:
    """``family_tables.write_case`` for these cases."""
    case = BRIDGE_CASES[name]
    return write_shapes(replace(case, changes=case.changes | changes), out, fill)


# ---- elements of the published sizes, MTP without its copies


def _ffn(c: Config) -> int:
    return int(3 * c["intermediate_size"] * c["hidden_size"])


def _gemma(c: Config, norms: bool = False) -> int:
    """Tied. Four norms a layer; ``norms`` of each head's query and key."""
    layer = _gqa(c, norms=norms) + 2 * c["hidden_size"] + _ffn(c)
    return c["vocab_size"] * c["hidden_size"] + c["hidden_size"] + c["num_hidden_layers"] * layer


def _gemma_text(c: Config) -> int:
    """The published config says little of its language model; the rest is Gemma3TextConfig's."""
    like = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    return _gemma(like | c["text_config"], norms=True)


def _glm4(c: Config) -> int:
    """Biases of q, k and v; four norms a layer."""
    layer = _gqa(c, bias=True) + 2 * c["hidden_size"] + _ffn(c)
    return _ends(c) + c["num_hidden_layers"] * layer


def _olmo(c: Config) -> int:
    """Two norms a layer, and those of all queries and all keys."""
    head = c["hidden_size"] // c["num_attention_heads"]
    wide = (c["num_attention_heads"] + c["num_key_value_heads"]) * head
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c) + wide + _ffn(c))


def _mellum(c: Config) -> int:
    """Every layer has experts, the MTP layer too."""
    hidden = c["hidden_size"]
    layer = _gqa(c, norms=True) + c["num_experts"] * (3 * c["moe_intermediate_size"] * hidden + hidden)
    mtp = layer + 2 * hidden * hidden + 3 * hidden
    return _ends(c) + c["num_hidden_layers"] * layer + c["num_nextn_predict_layers"] * mtp


def _minimax(c: Config) -> int:
    """Norms of all queries and all keys; a router with a bias."""
    hidden, head = c["hidden_size"], c["head_dim"]
    experts = c["num_local_experts"] * (3 * c["intermediate_size"] * hidden + hidden + 1)
    wide = (c["num_attention_heads"] + c["num_key_value_heads"]) * head
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c) + wide + experts)


def _mimo_v2(c: Config) -> int:
    """Full layers and sliding ones, which have sinks; the three MTP layers slide and are dense."""
    hidden, heads, key, value = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["v_head_dim"]

    def attention(groups: int, sinks: int) -> int:
        return hidden * (heads * (key + value) + groups * (key + value)) + sinks + 2 * hidden

    full, sliding = attention(c["num_key_value_heads"], 0), attention(c["swa_num_key_value_heads"], heads)
    dense = 3 * c["intermediate_size"] * hidden
    experts = c["n_routed_experts"] * (3 * c["moe_intermediate_size"] * hidden + hidden + 1)
    layers, slides, sparse = c["num_hidden_layers"], sum(c["hybrid_layer_pattern"]), sum(c["moe_layer_freq"])
    trunk = (layers - slides) * full + slides * sliding + (layers - sparse) * dense + sparse * experts
    return _ends(c) + trunk + 3 * (sliding + dense + 2 * hidden * hidden + 3 * hidden)


def _pangu(c: Config) -> int:
    """DeepSeek-V3's without a bias in the router, and two norms more in each layer."""
    return _deepseek(c, bias=False) + 2 * c["hidden_size"] * (c["num_hidden_layers"] + c["num_nextn_predict_layers"])


# architecture -> elements from the full config; in billions, as model cards give it, MTP included and its copies not
BRIDGE_ELEMENTS: dict[str, tuple[Callable[[Config], int], float]] = {
    "Gemma2ForCausalLM": (_gemma, 9.2),
    "Gemma3ForCausalLM": (lambda c: _gemma(c, norms=True), 1.0),
    "Gemma3ForConditionalGeneration": (_gemma_text, 3.9),
    "Glm4ForCausalLM": (_glm4, 9.4),
    "Olmo2ForCausalLM": (_olmo, 7.3),
    "Olmo3ForCausalLM": (_olmo, 7.3),
    "MellumForCausalLM": (_mellum, 12.6),
    "MiniMaxM2ForCausalLM": (_minimax, 228.7),  # the hub counts 228,703,644,928 with the 13,880,064 scales of its FP8
    "MiMoV2FlashForCausalLM": (_mimo_v2, 309.8),
    "PanguUltraMoEForCausalLM": (_pangu, 731.5),
}
