"""config.json -> Megatron arguments. Expected values: Megatron's and transformers' sources, hand arithmetic.

That Megatron's own parser and model take these arguments for what they say is tested in tests/evidence and
tests/mcore_next.
"""

from typing import Any

import pytest

from mtpconvert.convert.arguments import Facts, check_rules, megatron_arguments, moe_layers
from mtpconvert.errors import ConfigError, MappingError, NotRepresentableError
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.dims import Scope
from tests.support.argument_configs import LLAMA3, V3_ROPE, arguments
from tests.support.tiny_families import CONFIGS

# megatron/training/checkpointing.py of 0.19.2, load_args_from_checkpoint: every _set_arg, in its order
READ_BY_MEGATRON = [
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "num_query_groups",
    "group_query_attention", "kv_channels", "max_position_embeddings", "position_embedding_type",
    "add_position_embedding", "use_rotary_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved",
    "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu", "untie_embeddings_and_output_weights",
    "apply_layernorm_1p", "normalization", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout",
    "mtp_hybrid_override_pattern", "mtp_num_layers", "mtp_use_repeated_layer", "spec", "num_experts",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_token_dispatcher_type", "moe_router_pre_softmax",
    "moe_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias", "moe_shared_expert_intermediate_size",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "mamba_state_dim",
    "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "hybrid_layer_pattern",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "moe_latent_size",
    "tokenizer_model", "tokenizer_type", "tiktoken_pattern", "padded_vocab_size", "ckpt_format",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size",
]  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_everything_that_megatron_reads_is_there_in_plain_types(family: str) -> None:
    experts = [0, 1, 1] if family == "deepseek_v3" else None
    found = arguments(family, Facts(vocab_size=98, padded_vocab_size=128, moe_layer_freq=experts))
    assert sorted(set(READ_BY_MEGATRON) - set(found)) == []
    assert {type(value) for value in found.values()} <= {str, int, float, bool, type(None), list, tuple}


def test_deepseek_v3() -> None:
    facts = Facts(vocab_size=98, padded_vocab_size=256, make_vocab_size_divisible_by=64, moe_layer_freq=[0, 1, 1], tp=2)
    found = arguments("deepseek_v3", facts, mtp_layers=2, rope_parameters=..., rope_theta=10000, rope_scaling=V3_ROPE)
    wanted = {
        "num_layers": 3, "hidden_size": 36, "ffn_hidden_size": 44, "num_attention_heads": 4, "norm_epsilon": 1e-6,
        "layernorm_epsilon": 1e-6, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "add_qkv_bias": False, "untie_embeddings_and_output_weights": True, "group_query_attention": False,
        "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 28, "kv_lora_rank": 18, "qk_head_dim": 10,
        "qk_pos_emb_head_dim": 6, "v_head_dim": 14, "rope_type": "yarn", "rotary_base": 10000, "rotary_percent": 1.0,
        "rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "position_embedding_type": "rope", "num_experts": 4,
        "moe_layer_freq": [0, 1, 1], "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 12,
        "moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5, "mtp_num_layers": 2, "padded_vocab_size": 256, "vocab_size": 98,
        "make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 2, "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": True, "max_position_embeddings": 4096, "seq_length": 4096,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_no_mtp_layer_is_none() -> None:
    """0.16.1 asks ``mtp_num_layers is not None``: a zero would build an MTP block without layers."""
    assert arguments("deepseek_v3")["mtp_num_layers"] is None


def test_qwen2_is_tied_and_has_biases_on_qkv_alone() -> None:
    found = arguments("qwen2")
    wanted = {
        "untie_embeddings_and_output_weights": False, "add_qkv_bias": True, "add_bias_linear": False,
        "group_query_attention": True, "num_query_groups": 2, "kv_channels": 6, "qk_layernorm": False,
        "num_experts": None, "moe_grouped_gemm": False, "moe_layer_freq": 1, "mtp_num_layers": None,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_default_is_taken_and_noted() -> None:
    config = {key: value for key, value in CONFIGS["llama"].items() if key not in ("rms_norm_eps", "rope_parameters")}
    mapping = mapping_for(config)
    scope = Scope(config, mapping.defaults)
    found = megatron_arguments(mapping.arguments, scope)
    assert (found["norm_epsilon"], found["rotary_base"]) == (1e-6, 10000)
    assert {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}.items() <= scope.used_defaults.items()


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "transformers 5": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rotary_base": 1000000}),
    "older": ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, {"rotary_base": 500000}),
    "llama3": (
        {"rope_parameters": LLAMA3},
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "position_embedding_type": "rope"},
    ),
    "linear": (
        {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rotary_seq_len_interpolation_factor": 4, "use_rope_scaling": False},
    ),
    "yarn": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "max_position_embeddings": 40960},
        {
            "position_embedding_type": "yarn", "use_rotary_position_embeddings": False, "rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 40960, "mscale": 1.0, "mscale_all_dim": 0.0,
            "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embedding(name: str) -> None:
    changes, wanted = ROPES[name]
    found = arguments("llama", **changes)
    assert {key: found[key] for key in wanted} == wanted


def yarn(**values: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | values


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    "longrope": ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
    "linear in MLA": ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    "llama3 factors": ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
    "attention factor": ("llama", {"rope_parameters": yarn(attention_factor=1.5)}, "attention factor = 1.5"),
    "mscale_all_dim alone": ("deepseek_v3", {"rope_parameters": yarn(mscale_all_dim=1.0)}, "attention factor = 1.13"),
    "truncate in MLA": ("deepseek_v3", {"rope_parameters": yarn(truncate=False)}, "truncate = False"),
    "theta": ("llama", {"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta = 10000.5"),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "by layer type": ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "attention bias": ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    "half-split rotary": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
    "softmax router": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    "weights not normalised": ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    "one expert": ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    "groups ranked by 4": ("deepseek_v3", {"num_experts_per_tok": 4, "topk_group": 1}, "topk_group = 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_cannot_compute_is_refused_by_key_and_value(name: str) -> None:
    family, changes, words = REFUSED[name]
    with pytest.raises(NotRepresentableError) as caught:
        arguments(family, **changes)
    assert words in caught.value.what


def test_an_mtp_layer_behind_a_dense_layer_is_refused() -> None:
    """Megatron's MTP layer is what its last decoder layer is, DeepSeek-V3's always has experts."""
    with pytest.raises(NotRepresentableError, match="first_k_dense_replace = 3"):
        arguments("deepseek_v3", mtp_layers=1, first_k_dense_replace=3)
    arguments("deepseek_v3", mtp_layers=0, first_k_dense_replace=3)


def test_sliding_windows() -> None:
    """W keys with the query's own are W - 1 to the left of it; Qwen slides from layer max_window_layers on."""
    assert arguments("mistral", sliding_window=4096)["window_size"] == (4095, 0)
    assert arguments("mistral")["window_size"] is None
    qwen = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": ...}
    found = arguments("qwen3", **qwen)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ((7, 0), [0, 0, 1])
    assert arguments("qwen3", **qwen | {"use_sliding_window": False})["window_size"] is None
    assert arguments("qwen3", **qwen | {"max_window_layers": 3})["window_size"] is None
    with pytest.raises(ConfigError, match="layer_types lists 2 layers"):
        arguments("qwen3", **qwen | {"layer_types": ["full_attention"] * 2})


def test_router_groups_that_change_nothing_are_left_out() -> None:
    for groups in ({"n_group": 2, "topk_group": 2}, {"n_group": None, "topk_group": None}):
        assert arguments("deepseek_v3", **groups)["moe_router_num_groups"] is None


def test_layers_with_experts_must_agree_with_the_tensors() -> None:
    names = ["decoder.layers.1.mlp.router.weight", "mtp.layers.0.transformer_layer.mlp.router.weight"]
    assert moe_layers(names, 3) == [0, 1, 0]
    assert moe_layers(["decoder.layers.0.mlp.linear_fc1.weight"], 3) is None
    with pytest.raises(ConfigError, match=r"\[0, 1, 1\].*\[0, 1, 0\]"):
        arguments("deepseek_v3", Facts(vocab_size=98, padded_vocab_size=128, moe_layer_freq=[0, 1, 0]))
    stacked = Facts(vocab_size=98, padded_vocab_size=128, moe_layer_freq=1)
    assert arguments("deepseek_v3", stacked, first_k_dense_replace=0)["moe_layer_freq"] == 1


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="'num_hidden_layers', from which Megatron's num_layers"):
        arguments("llama", num_hidden_layers=...)


@pytest.mark.parametrize(
    "rule", [{"values": 1}, {"value": 1, "default": 2}, 7, "num_layers num_heads", {"functions": ["rope"]}]
)
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(MappingError):
        check_rules({"num_layers": rule})
    with pytest.raises(MappingError, match="no such function: roap"):
        check_rules({"functions": ["roap"]})
