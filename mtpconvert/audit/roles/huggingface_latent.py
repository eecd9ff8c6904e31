"""Families with latent attention (MLA), one entry per architecture, each with the source it was read from."""

from __future__ import annotations

from dataclasses import replace

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import latent
from mtpconvert.audit.roles.huggingface_family import (
    DEEPSEEK_ALIASES,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_FLOAT32,
    DEEPSEEK_NAMES,
    PLAIN_MLP,
    Family,
    LayerNorms,
    after_dense,
    after_dense_at_frequency,
    always,
    by_type,
)
from mtpconvert.audit.roles.huggingface_feedforward import experts
from mtpconvert.audit.roles.huggingface_indexer import has_indexer, indexed

# models/deepseek_v2/modeling_deepseek_v2.py: DeepseekV2Moe, DeepseekV2TopkRouter
_DEEPSEEK_V2_EXPERTS = experts(
    replace(DEEPSEEK_NAMES, correction=()), count="n_routed_experts", shared_count="n_shared_experts"
)

_PANGU_EXPERTS = experts(
    DEEPSEEK_NAMES, count="n_routed_experts", shared_count="n_shared_experts", corrected="router_enable_expert_bias"
)
# what the first release's config calls what vLLM openpangu.py reads under DeepSeek's keys
_PANGU_ALIASES = {
    "kv_lora_rank": "attention_kv_lora_dim",
    "q_lora_rank": "attention_q_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "num_nextn_predict_layers": "num_mtp_layers",
}
_GLM_INDEXED = indexed(interleaved=True)
_LATENT_PAIRS = latent(interleaved=True)

LATENT: dict[str, Family] = {
    # models/deepseek_v3/modeling_deepseek_v3.py; PreTrainedConfig.get_mtp_config: "MTP layers always use MoE".
    # DeepseekV3TopkRouter makes the correction bias in float32; the router's weight is bf16 in published files.
    # Kimi-K2 and Moonlight bear this architecture too: no MTP layers, and Moonlight no query latent
    "DeepseekV3ForCausalLM": Family(
        defaults=defaults.DEEPSEEK_V3,
        attention=always(latent(interleaved="rope_interleave")),
        feed_forward=after_dense_at_frequency(DEEPSEEK_EXPERTS),
        mtp_feed_forward=always(DEEPSEEK_EXPERTS),
        aliases=DEEPSEEK_ALIASES,
        float32=DEEPSEEK_FLOAT32,
    ),
    # models/deepseek_v2/modeling_deepseek_v2.py: apply_rotary_emb (view_as_complex: interleaved)
    "DeepseekV2ForCausalLM": Family(
        defaults=defaults.DEEPSEEK_V2,
        attention=always(latent(interleaved=True)),
        feed_forward=after_dense(_DEEPSEEK_V2_EXPERTS),
        mtp_feed_forward=always(_DEEPSEEK_V2_EXPERTS),
        aliases={"n_routed_experts": "num_experts"},
    ),
    # models/glm4_moe_lite/modeling_glm4_moe_lite.py: Glm4MoeLiteAttention, Glm4MoeLiteMoE
    "Glm4MoeLiteForCausalLM": Family(
        defaults=defaults.GLM4_MOE_LITE,
        attention=always(latent(interleaved="rope_interleave")),
        feed_forward=by_type(DEEPSEEK_EXPERTS, PLAIN_MLP),
        mtp_feed_forward=always(DEEPSEEK_EXPERTS),
        aliases={"n_routed_experts": "num_local_experts"},
        float32=DEEPSEEK_FLOAT32,
    ),
    # models/deepseek_v32/modeling_deepseek_v32.py: DeepseekV32Attention, DeepseekV32MoE; MTP layers as for DeepSeek-V3
    "DeepseekV32ForCausalLM": Family(
        defaults=defaults.DEEPSEEK_V32,
        attention=always(indexed(interleaved=False)),
        feed_forward=by_type(DEEPSEEK_EXPERTS, PLAIN_MLP),
        mtp_feed_forward=always(DEEPSEEK_EXPERTS),
        aliases={"n_routed_experts": "num_local_experts"},
        float32=DEEPSEEK_FLOAT32,
    ),
    # models/glm_moe_dsa/modeling_glm_moe_dsa.py: GlmMoeDsaAttention, GlmMoeDsaMoE. GLM-5.2 files have an indexer in the
    # MTP layer (791 tensors in all, knowledge of published files; vLLM deepseek_mtp.py builds it)
    "GlmMoeDsaForCausalLM": Family(
        defaults=defaults.GLM_MOE_DSA,
        attention=lambda settings, layer: _GLM_INDEXED if has_indexer(settings, layer) else _LATENT_PAIRS,
        feed_forward=by_type(DEEPSEEK_EXPERTS, PLAIN_MLP),
        mtp_attention=always(_GLM_INDEXED),
        mtp_feed_forward=always(DEEPSEEK_EXPERTS),
        aliases={"n_routed_experts": "num_local_experts"},
        float32=DEEPSEEK_FLOAT32,
    ),
    # modeling_openpangu_moe.py of openPangu-Ultra-MoE-718B: attention (apply_rotary_pos_emb: pairs, as in vLLM's
    # openpangu.py, is_neox_style=False) and experts as DeepSeek-V3's, no correction (vLLM: router_enable_expert_bias of
    # later files); a norm around each part. MTP layers as vLLM openpangu_mtp.py reads them
    "PanguUltraMoEForCausalLM": Family(
        defaults=defaults.PANGU_ULTRA_MOE,
        attention=always(_LATENT_PAIRS),
        feed_forward=after_dense(_PANGU_EXPERTS),
        mtp_feed_forward=always(_PANGU_EXPERTS),
        norms=LayerNorms(
            after_attention="post_attention_layernorm.weight",
            before_mlp="pre_mlp_layernorm.weight",
            after_mlp="post_mlp_layernorm.weight",
        ),
        aliases=_PANGU_ALIASES,
        float32=DEEPSEEK_FLOAT32,
    ),
}
