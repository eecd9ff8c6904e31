"""Megatron arguments of the families of ``tests/support/family_tables.py``: routers, layers with experts, windows.

Expected values: transformers' and megatron-core's sources, hand arithmetic. That the model of these arguments computes
what transformers computes is shown in ``tests/evidence/test_families_parity.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtpconvert.convert.argument_check import compare_arguments
from mtpconvert.convert.arguments import Plain, megatron_arguments, mtp_spec_layer
from mtpconvert.errors import ConfigError, NotRepresentableError
from mtpconvert.mapping.catalogue import file_of, load, sample_configs

SLIDING, FULL = "sliding_attention", "full_attention"


def arguments(architecture: str, size: str = "tiny", mtp_layers: int = 0, **changes: Any) -> dict[str, Plain]:
    """Of a sample config with ``changes``; the value ``...`` removes a key."""
    config = sample_configs(architecture + "ForCausalLM")[size] | changes
    mapping = load(file_of(architecture + "ForCausalLM"))
    scope = mapping.scope({key: value for key, value in config.items() if value is not ...}, {"mtp_layers": mtp_layers})
    return megatron_arguments(mapping.arguments, scope)


GIVEN: dict[str, tuple[dict[str, Plain], dict[str, Plain]]] = {
    "weights of the chosen normalised: softmax over them alone": (
        arguments("Qwen3Moe"),
        {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_layer_freq": [1, 0, 1]},
    ),
    "not normalised: softmax over all": (arguments("Qwen3Moe", norm_topk_prob=False), {"moe_router_pre_softmax": True}),
    "experts under their old name": (arguments("Qwen3Moe", num_local_experts=..., num_experts=4), {"num_experts": 4}),
    "every second layer": (
        arguments("Qwen3Moe", mlp_only_layers=None, decoder_sparse_step=2),
        {"moe_layer_freq": [0, 1, 0]},
    ),
    "a gated shared expert": (
        arguments("Qwen2Moe"),
        {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 28, "moe_router_pre_softmax": True},
    ),
    "Mixtral": (
        arguments("Mixtral"),
        {"moe_router_pre_softmax": False, "moe_ffn_hidden_size": 52, "num_experts": 4, "rotary_base": 1000000},
    ),
    "Mixtral without rope_theta": (arguments("Mixtral", rope_parameters=...), {"rotary_base": 1000000}),
    "DeepSeek-V2-Lite": (
        arguments("DeepseekV2", "full"),
        {
            "q_lora_rank": None, "moe_router_pre_softmax": True, "moe_router_num_groups": None, "moe_router_topk": 6,
            "moe_router_topk_scaling_factor": 1.0, "moe_layer_freq": [0] + [1] * 26, "rotary_scaling_factor": 40.0,
        },
    ),
    "three experts from two of four groups": (
        arguments("DeepseekV2", topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=3),
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "layers by mlp_layer_types": (
        arguments("Glm4MoeLite", mlp_layer_types=["sparse", "dense", "sparse"]),
        {"moe_layer_freq": [1, 0, 1]},
    ),
    "layers without it": (arguments("Glm4MoeLite", mlp_layer_types=...), {"moe_layer_freq": [0, 1, 1]}),
    "gpt-oss": (
        arguments("GptOss", "full"),
        {
            "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
            "softmax_type": "learnable", "add_bias_linear": True, "window_size": (127, 0),
            "window_attn_skip_freq": [1, 0] * 12, "position_embedding_type": "yarn", "rotary_base": 150000,
            "yarn_correction_range_round_to_int": False, "rotary_scaling_factor": 32.0,
        },
    ),
    "K-EXAONE: every fourth layer is full and does not rotate": (
        arguments("ExaoneMoe", "full", mtp_layers=1),
        {"window_size": (127, 0), "window_attn_skip_freq": 4, "no_rope_freq": 4, "mtp_num_layers": 1},
    ),
    "K-EXAONE without windows rotates everywhere": (
        arguments("ExaoneMoe", sliding_window=None),
        {"window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None},
    ),
    "Ling": (
        arguments("BailingMoeV2", "full"),
        {"rotary_percent": 0.5, "moe_router_num_groups": 8, "moe_router_group_topk": 4, "qk_layernorm": True},
    ),
    "Gemma 2: every second layer is full, by its class": (
        arguments("Gemma2", "full"),
        {
            "window_size": (4095, 0), "window_attn_skip_freq": [1, 0] * 21, "apply_layernorm_1p": True, "swiglu": False,
            "openai_gelu": True, "rotary_base": 10000, "untie_embeddings_and_output_weights": False, "kv_channels": 256,
        },
    ),
    "Gemma 3: every sixth, by a key": (
        arguments("Gemma3", "full"),
        {"window_size": (511, 0), "window_attn_skip_freq": [1, 1, 1, 1, 1, 0] * 4 + [1, 1], "qk_layernorm": True},
    ),
    "Gemma 3: by a list": (arguments("Gemma3"), {"window_size": (4, 0), "window_attn_skip_freq": [1, 1, 0]}),
    "GLM-4": (
        arguments("Glm4", "full"),
        {"rotary_interleaved": True, "rotary_percent": 0.5, "add_qkv_bias": True, "add_bias_linear": False},
    ),
    "GLM-4-32B": (arguments("Glm4", attention_bias=False), {"add_qkv_bias": False, "rotary_percent": 0.4}),
    "OLMo 2": (arguments("Olmo2", "full"), {"rotary_base": 500000, "qk_layernorm": True, "num_query_groups": 32}),
    "OLMo 2 without groups": (arguments("Olmo2", num_key_value_heads=...), {"num_query_groups": 6}),
    "OLMo 3: every fourth, by its class": (
        arguments("Olmo3", "full", layer_types=...),
        {"window_size": (4095, 0), "window_attn_skip_freq": [1, 1, 1, 0] * 8},
    ),
    "OLMo 3 without YaRN": (
        arguments("Olmo3", "full", rope_scaling=...), {"rotary_base": 500000, "position_embedding_type": "rope"}
    ),
    "Mellum 2": (
        arguments("Mellum", "full", mtp_layers=1),
        {
            "window_size": (1023, 0), "window_attn_skip_freq": [1, 1, 1, 0] * 7, "moe_layer_freq": [1] * 28,
            "moe_router_pre_softmax": False, "num_experts": 64, "mtp_num_layers": 1,
        },
    ),
    "Mellum 2 with one base": (
        arguments("Mellum", rope_parameters={kind: {"rope_theta": 5e5} for kind in (FULL, SLIDING)}),
        {"rotary_base": 500000},
    ),
    "MiniMax-M2: a number of rotated dims; three MTP layers declared and none there": (
        arguments("MiniMaxM2", "full"),
        {
            "rotary_percent": 0.5, "rotary_base": 5000000, "moe_router_score_function": "sigmoid", "qk_layernorm": True,
            "moe_router_enable_expert_bias": True, "moe_layer_freq": 1, "mtp_num_layers": None,
        },
    ),
    "MiniMax-M2 in transformers' words": (
        arguments("MiniMaxM2", rotary_dim=..., rope_theta=..., rope_parameters={"rope_theta": 5e6,
            "rope_type": "default", "partial_rotary_factor": 0.4}),
        {"rotary_percent": 0.4, "rotary_base": 5000000},
    ),
    "MiMo-V2-Flash": (  # transformers' window has the query's own key, sliding_window_size has not
        arguments("MiMoV2Flash", "full", mtp_layers=3),
        {
            "window_size": (128, 0), "window_attn_skip_freq": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7],
            "moe_layer_freq": [0] + [1] * 47, "num_query_groups": 4, "kv_channels": 192, "v_head_dim": 128,
            "norm_epsilon": 1e-5, "rotary_percent": 0.334, "moe_router_topk_scaling_factor": 1.0, "mtp_num_layers": 3,
        },
    ),
    "MiMo-V2-Flash in transformers' words": (
        arguments("MiMoV2Flash", rms_norm_eps=2e-6),
        {
            "window_size": (8, 0), "window_attn_skip_freq": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
            "norm_epsilon": 2e-6,
        },
    ),
    "MiMo-V2-Flash, the published name of the epsilon": (
        arguments("MiMoV2Flash", rms_norm_eps=..., layernorm_epsilon=3e-6), {"norm_epsilon": 3e-6}
    ),
    "openPangu": (
        arguments("PanguUltraMoE", "full", mtp_layers=1),
        {
            "moe_layer_freq": [0] * 3 + [1] * 58, "moe_router_enable_expert_bias": False, "rotary_base": 25600000,
            "moe_router_topk_scaling_factor": 2.5, "q_lora_rank": 1536, "qk_head_dim": 128, "mtp_num_layers": 1,
        },
    ),
    "openPangu with a bias in its router": (
        arguments("PanguUltraMoE", router_enable_expert_bias=True), {"moe_router_enable_expert_bias": True}
    ),
    "MiMo": (arguments("MiMo", mtp_layers=2), {"add_qkv_bias": True, "mtp_num_layers": 2, "rotary_base": 640000}),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_config_says(name: str) -> None:
    found, wanted = GIVEN[name]
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Gemma3", {}),
        ("Gemma3", {"rope_parameters": ..., "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("Gemma3", {"rope_parameters": ...}),  # Gemma3TextConfig.default_theta has two
        ("Olmo3", {}),
        ("Olmo3", {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 8.0}}),
        ("Mellum", {}),
        ("Mellum", {"rope_parameters": ...}),
    ],
)
def test_two_ways_to_rotate_are_no_rotary_base(architecture: str, changes: dict[str, Any]) -> None:
    found = arguments(architecture, **changes)
    assert found["position_embedding_type"] == "rope"
    assert not found.keys() & {"rotary_base", "rotary_scaling_factor", "rotary_seq_len_interpolation_factor"}
    compared = compare_arguments(found, found)  # a checkpoint that carries what was written
    assert (compared.problems, compared.unchecked) == ([], [])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    # 6 experts from 3 of 8 groups: Megatron ranks a group by its 6 // 3 best, the model by its best
    "DeepSeek-V2, 236B": (
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
        "topk_group = 3",
    ),
    "another method": ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    "one normalised expert": ("Qwen3Moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    "windows of Qwen's own": ("Qwen2Moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    "longrope": ("Phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type = 'longrope'"),
    "another alpha": ("GptOss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
    "irregular full layers": ("ExaoneMoe", {"layer_types": [SLIDING, FULL, FULL, SLIDING]}, "layer_types"),
    "one MTP layer at several depths": ("ExaoneMoe", {"mtp_share_layers": True}, "mtp_share_layers = True"),
    "an MTP layer that attends to everything": ("ExaoneMoe", {"mtp_layer_types": [FULL]}, "mtp_layer_types"),
    "biases of Ling": ("BailingMoeV2", {"use_qkv_bias": True}, "use_qkv_bias = True"),
    "Gemma without a causal mask": (
        "Gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention = True",
    ),
    "Gemma by another GELU": ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    "biases of OLMo": ("Olmo2", {"attention_bias": True}, "attention_bias = True"),
    "norms of MiniMax-M2 per head": ("MiniMaxM2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    "heads of sliding layers of another size": ("MiMoV2Flash", {"swa_head_dim": 8}, "swa_head_dim = 8"),
    "value heads of sliding layers of another size": ("MiMoV2Flash", {"swa_v_head_dim": 8}, "swa_v_head_dim = 8"),
    "sinks in full layers": (
        "MiMoV2Flash",
        {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias = True",
    ),
    "other shares of a head rotated": (
        "MiMoV2Flash",
        {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}, SLIDING: {"partial_rotary_factor": 0.25}}},
        "partial_rotary_factor = 0.5",
    ),
    "openPangu without its norms": ("PanguUltraMoE", {"sandwich_norm": False}, "sandwich_norm = False"),
    "openPangu rotated in halves": ("PanguUltraMoE", {"rope_interleave": False}, "rope_interleave = False"),
    "MTP behind a dense layer": ("HYV3", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_cannot_compute_is_refused_by_key_and_value(name: str) -> None:
    architecture, changes, words = REFUSED[name]
    with pytest.raises(NotRepresentableError) as caught:
        arguments(architecture, mtp_layers=1, **changes)
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("GptOss", {"layer_types": ...}, "no layer_types"),
        ("GptOss", {"layer_types": [FULL]}, r"layer_types\[1\] is missing"),
        ("Gemma2", {"layer_types": [FULL]}, r"layer_types\[1\] is missing"),
        ("Gemma3", {"rope_parameters": {FULL: 7}}, "rope_parameters is"),
        ("Glm4MoeLite", {"mlp_layer_types": ["sparse"]}, r"mlp_layer_types\[1\] is missing"),
        ("MiMoV2Flash", {"layer_types": ..., "hybrid_layer_pattern": [0, 1, 2, 0]}, r"hybrid_layer_pattern\[2\] is 2"),
        ("MiMoV2Flash", {"layer_types": ...}, "no layer_types"),
        ("MiMoV2Flash", {"mlp_layer_types": ..., "moe_layer_freq": 1}, "moe_layer_freq is 1, no list"),
        ("MiMoV2Flash", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types\[1\] is missing"),
    ],
)
def test_lists_that_do_not_fit(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arguments(architecture, **changes)


def test_the_layer_that_mtp_layers_are_like() -> None:
    dense, moe = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight"
    router, norm = "mtp.layers.0.transformer_layer.mlp.router.weight", "mtp.layers.0.enorm.weight"
    assert mtp_spec_layer([dense, moe, norm]) == 0
    assert mtp_spec_layer([dense, moe, norm, router]) == -1
    assert mtp_spec_layer([dense, moe]) == -1  # no MTP
    assert mtp_spec_layer([dense, norm]) == -1
    assert (
        mtp_spec_layer(["decoder.layers.0.mlp.router.weight", "decoder.layers.1.mlp.linear_fc1.weight", norm, router])
        == 0
    )
    assert (
        mtp_spec_layer([moe.replace("1", "0"), norm]) == -1
    )  # nothing is like it: the stock spec, which megatron refuses
