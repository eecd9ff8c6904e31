"""Which Megatron arguments a conversion writes and compares, and what the shipped mappings stand for.

Sources: ``megatron/training/checkpointing.py`` and ``arguments.py`` of 0.19.2, ``megatron/core/transformer`` of 0.16.1
and 0.19.2.
"""

from __future__ import annotations

from typing import Any

Plain = str | int | float | bool | None | list[int] | tuple[int, ...]

# Change the meaning of stored numbers, not their names or shapes. Value: what the shipped mappings stand for.
MEANING: dict[str, Plain] = {
    # order of the rows of a gated fc1: megatron/core/transformer/mlp.py, moe/experts.py (0.19.2)
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    # order of the rotated rows of q and k: models/common/embeddings/rope_utils.py
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "mrope_section": None,
    # a norm's weight stands for 1 + w
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    # one MTP layer used at every depth, or another kind of MTP layer
    "mtp_use_repeated_layer": False,
    "mtp_hybrid_override_pattern": None,
    # another model class, or layers of other kinds
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "spec": None,
    # what is computed with the weights: transformer_config.py
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "apply_residual_connection_post_layernorm": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_shared_expert_gate": False,
    "moe_single_grouped_weight": False,
    "use_mup": False,
}

# Read by load_args_from_checkpoint (megatron/training/checkpointing.py, 0.19.2) and decided by no config: the values of
# a GPTModel as the shipped mappings stand for. A rule of the mapping overrides.
GPT_MODEL: dict[str, Plain] = {
    **MEANING,
    "add_position_embedding": True,
    "add_qkv_bias": False,
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "ckpt_format": "torch_dist",
    "group_query_attention": False,
    "hidden_dropout": 0.0,
    "mamba_head_dim": None,
    "mamba_num_groups": None,
    "mamba_num_heads": None,
    "mamba_state_dim": None,
    "moe_ffn_hidden_size": None,
    "moe_grouped_gemm": False,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk": 2,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_single_grouped_bias": False,
    "moe_token_dispatcher_type": None,
    "multi_latent_attention": False,
    "num_experts": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_query_groups": None,
    "qk_layernorm": False,
    "tiktoken_pattern": None,
    "tokenizer_model": None,
    "tokenizer_type": None,
    "window_attn_skip_freq": None,
    "window_size": None,
}

# One argument under two names: where the second is there, the first need not be.
SAME: dict[str, str] = {"layernorm_zero_centered_gamma": "apply_layernorm_1p"}

# Compared with what the config gives. Groups: names of one argument in different versions of Megatron.
DECIDED: tuple[tuple[str, ...], ...] = (
    ("num_layers",),
    ("hidden_size",),
    ("ffn_hidden_size",),
    ("num_attention_heads",),
    ("num_query_groups",),
    ("kv_channels",),
    ("normalization",),
    ("norm_epsilon", "layernorm_epsilon"),
    ("swiglu",),
    ("qk_layernorm",),
    ("add_bias_linear",),
    ("add_qkv_bias",),
    ("untie_embeddings_and_output_weights",),
    ("position_embedding_type",),
    ("rotary_base",),
    ("rotary_percent",),
    ("rotary_seq_len_interpolation_factor",),
    ("use_rope_scaling",),
    ("rope_scaling_factor",),
    ("rope_type",),
    ("rotary_scaling_factor",),
    ("mscale",),
    ("mscale_all_dim",),
    ("original_max_position_embeddings",),
    ("beta_fast",),
    ("beta_slow",),
    ("yarn_original_max_position_embeddings",),
    ("yarn_beta_fast",),
    ("yarn_beta_slow",),
    ("window_size",),
    ("window_attn_skip_freq",),
    ("multi_latent_attention",),
    ("q_lora_rank",),
    ("kv_lora_rank",),
    ("qk_head_dim",),
    ("qk_pos_emb_head_dim",),
    ("v_head_dim",),
    ("num_experts",),
    ("moe_layer_freq",),
    ("moe_ffn_hidden_size",),
    ("moe_shared_expert_intermediate_size",),
    ("moe_router_topk",),
    ("moe_router_num_groups",),
    ("moe_router_group_topk",),
    ("moe_router_score_function",),
    ("moe_router_pre_softmax",),
    ("moe_router_enable_expert_bias",),
    ("moe_router_topk_scaling_factor",),
    ("mtp_num_layers",),
    ("linear_conv_kernel_dim",),
    ("linear_key_head_dim",),
    ("linear_value_head_dim",),
    ("linear_num_key_heads",),
    ("linear_num_value_heads",),
    ("dsa_indexer_n_heads",),
    ("dsa_indexer_head_dim",),
    ("dsa_indexer_topk",),
    ("dsa_indexer_topk_freq",),
    ("dsa_indexer_skip_topk_offset",),
    ("dsa_indexer_rope_interleaved",),
    ("dsa_indexer_k_norm_epsilon",),
)

# Only meaningful where another argument has a value: (argument) -> (other, its value)
ONLY_WITH: dict[str, tuple[str, Any]] = {
    "num_query_groups": ("group_query_attention", True),
    "kv_channels": ("multi_latent_attention", False),
    "rotary_seq_len_interpolation_factor": ("multi_latent_attention", False),
    "rope_scaling_factor": ("use_rope_scaling", True),
    "moe_router_pre_softmax": ("moe_router_score_function", "softmax"),  # moe_utils.py: no other function looks at it
    "rope_type": ("multi_latent_attention", True),
    "original_max_position_embeddings": ("rope_type", "yarn"),
    "beta_fast": ("rope_type", "yarn"),
    "beta_slow": ("rope_type", "yarn"),
    **dict.fromkeys(
        (
            "dsa_indexer_n_heads",
            "dsa_indexer_head_dim",
            "dsa_indexer_topk",
            "dsa_indexer_topk_freq",
            "dsa_indexer_skip_topk_offset",
            "dsa_indexer_rope_interleaved",
            "dsa_indexer_k_norm_epsilon",
        ),
        ("experimental_attention_variant", "dsa"),
    ),
    **dict.fromkeys(
        (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ),
        ("experimental_attention_variant", "gated_delta_net"),
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), ("multi_latent_attention", True)),
    **dict.fromkeys(("qk_pos_emb_head_dim", "v_head_dim"), ("multi_latent_attention", True)),
    **dict.fromkeys(
        ("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        ("position_embedding_type", "yarn"),
    ),
}
