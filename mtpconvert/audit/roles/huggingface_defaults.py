"""What a config.json that lacks a key means: the defaults of each family's config class (transformers 5.24.0).

models/<model_type>/configuration_<model_type>.py, of the class that each table names. A key that is not a field of the
class is one that published files carry all the same; its default is what the modelling code does without it.
"""

from __future__ import annotations

from mtpconvert.audit.roles.huggingface_site import Default

Defaults = dict[str, Default]

# A family without an MTP count in its config class gets the layers of modeling_layers.py:MtpModel if a file has one.
_SHARED: Defaults = {"tie_word_embeddings": False, "mtp_hidden_states_first": False, "num_nextn_predict_layers": 0}

# LlamaConfig
LLAMA: Defaults = {
    **_SHARED, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

# MistralConfig
MISTRAL: Defaults = {
    **_SHARED, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None,
}  # fmt: skip

# MixtralConfig
MIXTRAL: Defaults = {**MISTRAL, "num_local_experts": 8}

# Qwen2Config; head_dim is not a field of it, the modelling code derives it
QWEN2: Defaults = {
    **_SHARED, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None,
}  # fmt: skip

# Qwen3Config
QWEN3: Defaults = {**QWEN2, "head_dim": 128, "attention_bias": False}

# Qwen2MoeConfig
QWEN2_MOE: Defaults = {
    **_SHARED, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None, "qkv_bias": True,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts": 60,
}  # fmt: skip

# Qwen3MoeConfig; head_dim is not a field of it, published files carry it
QWEN3_MOE: Defaults = {
    **_SHARED, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": None, "attention_bias": False,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 768, "num_experts": 128,
}  # fmt: skip

# DeepseekV2Config
DEEPSEEK_V2: Defaults = {
    **_SHARED, "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407,
    "num_hidden_layers": 32, "num_attention_heads": 32, "n_shared_experts": 2, "n_routed_experts": 64,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 0, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

# DeepseekV3Config; moe_layer_freq is not a field of it
DEEPSEEK_V3: Defaults = {
    **_SHARED, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "rope_interleave": True, "attention_bias": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip

# Glm4MoeConfig; head_dim is not a field of it, published files carry it
GLM4_MOE: Defaults = {
    **_SHARED, "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": None,
    "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1, "attention_bias": False,
    "use_qk_norm": False, "num_nextn_predict_layers": 1,
}  # fmt: skip

# Glm4MoeLiteConfig; first_k_dense_replace is not a field of it: mlp_layer_types null makes the first layer dense
GLM4_MOE_LITE: Defaults = {
    **_SHARED, "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192,
    "first_k_dense_replace": 1, "mlp_layer_types": None, "rope_interleave": True, "attention_bias": False,
}  # fmt: skip

# Phi3Config; head_dim is not a field of it
PHI3: Defaults = {
    **_SHARED, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None,
}  # fmt: skip

# Gemma2Config
GEMMA2: Defaults = {
    **_SHARED, "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip

# Gemma3TextConfig
GEMMA3: Defaults = {**GEMMA2, "vocab_size": 262208}

# Glm4Config
GLM4: Defaults = {
    **_SHARED, "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
}  # fmt: skip

# Olmo2Config, Olmo3Config; head_dim is not a field of them
OLMO2: Defaults = {
    **_SHARED, "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "attention_bias": False,
}  # fmt: skip

# GptOssConfig
GPT_OSS: Defaults = {
    **_SHARED, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
    "num_local_experts": 128,
}  # fmt: skip

# HYV3Config; first_k_dense_replace is not a field of it: mlp_layer_types null makes the first layer dense
HY_V3: Defaults = {
    **_SHARED, "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "mlp_bias": False,
    "num_experts": 192, "num_shared_experts": 1, "moe_intermediate_size": 1536, "mlp_layer_types": None,
    "first_k_dense_replace": 1,
}  # fmt: skip

# MellumConfig; first_k_dense_replace is not a field of it: mlp_layer_types null makes every layer sparse
MELLUM: Defaults = {
    **_SHARED, "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False,
    "num_experts": 64, "moe_intermediate_size": 896, "mlp_layer_types": None, "mtp_mlp_layer_types": None,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": None,
}  # fmt: skip

# ExaoneMoeConfig; head_dim is not a field of it, published files carry it
EXAONE_MOE: Defaults = {
    **_SHARED, "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "num_experts": 64, "num_shared_experts": 1,
    "moe_intermediate_size": 1024, "mlp_layer_types": None, "first_k_dense_replace": 1,
}  # fmt: skip

# MiMoConfig of XiaomiMiMo/MiMo-7B (configuration_mimo.py): a Qwen2Config with a count of MTP layers
MIMO: Defaults = QWEN2

# BailingMoeV2Config of inclusionAI/Ling-mini-2.0 (configuration_bailing_moe_v2.py)
BAILING_V2: Defaults = {
    **_SHARED, "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "use_qkv_bias": False, "use_bias": False,
    "use_qk_norm": True, "num_experts": 256, "num_shared_experts": 1, "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}  # fmt: skip

# Qwen3NextConfig; full_attention_interval is not a field of it: it makes layer_types where that is null
QWEN3_NEXT: Defaults = {
    **_SHARED, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "layer_types": None, "full_attention_interval": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": None, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
}  # fmt: skip

# Qwen3_5TextConfig; mtp_num_hidden_layers and full_attention_interval are not fields of it, published files carry them
QWEN3_5: Defaults = {
    **_SHARED, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "layer_types": None, "full_attention_interval": 4, "mtp_num_hidden_layers": 0,
}  # fmt: skip

# Qwen3_5MoeTextConfig; as Qwen3_5TextConfig
QWEN3_5_MOE: Defaults = {
    **{key: value for key, value in QWEN3_5.items() if key != "intermediate_size"},
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256,
}  # fmt: skip

# DeepseekV32Config; the class has no MTP count, published files carry it
DEEPSEEK_V32: Defaults = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("rope_interleave", "moe_layer_freq")},
    "mlp_layer_types": None, "index_n_heads": 64, "index_head_dim": 128, "num_nextn_predict_layers": 0,
}  # fmt: skip

# GlmMoeDsaConfig; as DeepseekV32Config. index_* keys that are not fields of it make indexer_types where that is null
GLM_MOE_DSA: Defaults = {
    **DEEPSEEK_V32, "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
    "num_attention_heads": 64, "q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192, "index_n_heads": 32,
    "indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2,
}  # fmt: skip

# MiniMaxM2Config
MINIMAX_M2: Defaults = {
    **_SHARED, "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
}  # fmt: skip

# MiMoV2FlashConfig; the swa_ keys, hybrid_layer_pattern and moe_layer_freq are not fields of it, published files carry
# them: sliding layers have twice the key/value heads without them
MIMO_V2_FLASH: Defaults = {
    **_SHARED, "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "attention_bias": False,
    "swa_num_attention_heads": None, "swa_num_key_value_heads": None, "swa_head_dim": None, "swa_v_head_dim": None,
    "layer_types": None, "hybrid_layer_pattern": None, "mlp_layer_types": None, "moe_layer_freq": None,
    "moe_intermediate_size": 2048, "n_routed_experts": 256,
}  # fmt: skip

# PanguUltraMoEConfig of openPangu-Ultra-MoE-718B (configuration_openpangu_moe.py) has no defaults: files say all
PANGU_ULTRA_MOE: Defaults = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
         "num_attention_heads", "n_shared_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank",
         "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "first_k_dense_replace")
    ),
    **_SHARED, "attention_bias": False, "router_enable_expert_bias": False,
}  # fmt: skip
