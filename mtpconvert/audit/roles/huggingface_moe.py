"""Grouped-query families with experts, one entry per architecture, each with the source it was read from."""

from __future__ import annotations

from dataclasses import replace

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import AttentionNames, Heads, Module, grouped_query, shared_heads
from mtpconvert.audit.roles.huggingface_family import (
    DEEPSEEK_ALIASES,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_FLOAT32,
    DEEPSEEK_NAMES,
    LLAMA_MLP,
    PLAIN_MLP,
    QWEN2_EXPERTS,
    QWEN_ALIASES,
    Family,
    LayerNorms,
    after_dense,
    always,
    at_sparse_step,
    by_type,
    mtp_by_type,
)
from mtpconvert.audit.roles.huggingface_feedforward import ExpertNames, experts, transposed_experts
from mtpconvert.audit.roles.huggingface_mtp import APPENDED_FINAL_LAYERNORM, MIMO_V2, TOP_LEVEL
from mtpconvert.audit.roles.huggingface_site import Settings

# models/qwen3_moe/modeling_qwen3_moe.py: Qwen3MoeSparseMoeBlock
_QWEN3_EXPERTS = experts(ExpertNames())
# conversion_mapping.py, "mixtral": block_sparse_moe. on disk, mlp. in memory; w1 gate, w3 up, w2 down
_MIXTRAL_NAMES = ExpertNames(
    modules=("block_sparse_moe.", "mlp."),
    gate="experts.{}.w1.weight",
    up="experts.{}.w3.weight",
    down="experts.{}.w2.weight",
)
_MIXTRAL_EXPERTS = experts(_MIXTRAL_NAMES, count="num_local_experts", units="intermediate_size")

# conversion_mapping.py, "hy_v3": the names of published files and those in memory; HYV3MoE, HYV3TopKRouter
_HY_EXPERTS = experts(
    ExpertNames(
        router=("router.gate.weight", "gate.weight"),
        correction=("expert_bias", "e_score_correction_bias"),
        shared=("shared_mlp.", "shared_experts."),
    ),
    shared_count="num_shared_experts",
)
# conversion_mapping.py, "exaone_moe"; ExaoneMoeSparseMoEBlock, ExaoneMoeTopkRouter
_EXAONE_EXPERTS = experts(
    ExpertNames(correction=("e_score_correction_bias", "gate.e_score_correction_bias"), shared=("shared_experts.",)),
    shared_count="num_shared_experts",
)
# modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0: BailingMoeV2SparseMoeBlock, BailingMoeV2Gate
_BAILING_EXPERTS = experts(
    ExpertNames(correction=("gate.expert_bias",), shared=("shared_experts.",)), shared_count="num_shared_experts"
)

# conversion_mapping.py, "minimax_m2": as Mixtral
_MINIMAX_EXPERTS = experts(
    replace(_MIXTRAL_NAMES, correction=("e_score_correction_bias",)),
    count="num_local_experts",
    units="intermediate_size",
)
# models/mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashMoE
_MIMO_EXPERTS = experts(replace(DEEPSEEK_NAMES, shared=()), count="n_routed_experts")


def _mimo_heads(settings: Settings, prefix: str = "") -> Heads:
    """``MiMoV2FlashAttention.__init__``: value heads of their own width, twice as many of them in sliding layers.

    Published files say as much in ``swa_`` keys, which vLLM mimo_v2_flash.py reads.
    """
    heads, kv_heads, dims, _ = shared_heads(settings)
    value_dims = settings.count("v_head_dim")
    if not prefix:
        return Heads(heads, kv_heads, dims, value_dims)

    def own(key: str, other: int) -> int:
        value = settings.optional(prefix + key)
        return other if value is None else value

    return Heads(
        own("num_attention_heads", heads),
        own("num_key_value_heads", 2 * kv_heads),
        own("head_dim", dims),
        own("v_head_dim", value_dims),
    )


_MIMO_FULL = grouped_query(qkv_bias="attention_bias", heads=_mimo_heads)
_MIMO_SLIDING = grouped_query(
    qkv_bias="attention_bias",
    sinks=("attention_sink_bias", "sinks"),
    heads=lambda settings: _mimo_heads(settings, "swa_"),
)


def _slides(settings: Settings, layer: int) -> bool:
    """``layer_types``, or vLLM's ``hybrid_layer_pattern`` (1: sliding); neither: all but layer 0 and every sixth."""
    layers = settings.count("num_hidden_layers")
    if types := settings.listed("layer_types", layers):
        return bool(types[layer] == "sliding_attention")
    if pattern := settings.listed("hybrid_layer_pattern", layers):
        return bool(pattern[layer] == 1)
    return layer > 0 and (layer + 1) % 6 != 0


def _mimo_feed_forward(settings: Settings, layer: int) -> Module:
    """``mlp_layer_types``, or vLLM's ``moe_layer_freq`` (a list, 1: experts); neither: experts but in layer 0."""
    layers = settings.count("num_hidden_layers")
    if types := settings.listed("mlp_layer_types", layers):
        return _MIMO_EXPERTS if types[layer] == "sparse" else PLAIN_MLP
    if chosen := settings.listed("moe_layer_freq", layers):
        return _MIMO_EXPERTS if chosen[layer] else PLAIN_MLP
    return _MIMO_EXPERTS if layer else PLAIN_MLP


EXPERTS: dict[str, Family] = {
    # models/glm4_moe/modeling_glm4_moe.py: Glm4MoeAttention (bias=False on o, whatever the config says), Glm4MoeMoE;
    # MTP layers and dtypes as for DeepSeek (Glm4MoeTopkRouter)
    "Glm4MoeForCausalLM": Family(
        defaults=defaults.GLM4_MOE,
        attention=always(grouped_query(qkv_bias="attention_bias", qk_norm="use_qk_norm")),
        feed_forward=after_dense(DEEPSEEK_EXPERTS),
        mtp_feed_forward=always(DEEPSEEK_EXPERTS),
        aliases=DEEPSEEK_ALIASES,
        float32=DEEPSEEK_FLOAT32,
    ),
    # models/qwen3_moe/modeling_qwen3_moe.py: Qwen3MoeAttention; MTP as SGLang qwen3_moe_mtp.py reads it
    "Qwen3MoeForCausalLM": Family(
        defaults=defaults.QWEN3_MOE,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=at_sparse_step(_QWEN3_EXPERTS),
        mtp_feed_forward=always(_QWEN3_EXPERTS),
        mtp=TOP_LEVEL,
        aliases=QWEN_ALIASES,
    ),
    # models/qwen2_moe/modeling_qwen2_moe.py: Qwen2MoeAttention (bias=False on o)
    "Qwen2MoeForCausalLM": Family(
        defaults=defaults.QWEN2_MOE,
        attention=always(grouped_query(qkv_bias="qkv_bias")),
        feed_forward=at_sparse_step(QWEN2_EXPERTS),
        mtp_feed_forward=always(QWEN2_EXPERTS),
        aliases=QWEN_ALIASES,
    ),
    # models/mixtral/modeling_mixtral.py: MixtralAttention, MixtralSparseMoeBlock
    "MixtralForCausalLM": Family(
        defaults=defaults.MIXTRAL,
        attention=always(grouped_query()),
        feed_forward=always(_MIXTRAL_EXPERTS),
        mtp_feed_forward=always(_MIXTRAL_EXPERTS),
        aliases={"num_local_experts": "num_experts"},
    ),
    # models/gpt_oss/modeling_gpt_oss.py: GptOssAttention, GptOssMLP, GptOssExperts; bf16 files, not the MXFP4 ones
    "GptOssForCausalLM": Family(
        defaults=defaults.GPT_OSS,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", sinks=("sinks",))),
        feed_forward=always(transposed_experts),
        mtp_feed_forward=always(transposed_experts),
        aliases={"num_local_experts": "num_experts"},
    ),
    # models/hy_v3/modeling_hy_v3.py: HYV3Attention, HYV3MoE; MTP as vLLM hy_v3_mtp.py reads it
    "HYV3ForCausalLM": Family(
        defaults=defaults.HY_V3,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=by_type(_HY_EXPERTS, LLAMA_MLP),
        mtp_feed_forward=always(_HY_EXPERTS),
        mtp=APPENDED_FINAL_LAYERNORM,
        aliases={**QWEN_ALIASES, "moe_intermediate_size": "expert_hidden_dim"},  # the latter in vLLM hy_v3.py
        float32=(".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    ),
    # models/mellum/modeling_mellum.py: MellumAttention, MellumSparseMoeBlock; configuration_mellum.py: __post_init__
    "MellumForCausalLM": Family(
        defaults=defaults.MELLUM,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=by_type(_QWEN3_EXPERTS, PLAIN_MLP),
        mtp_feed_forward=mtp_by_type(_QWEN3_EXPERTS, PLAIN_MLP),
        mtp=TOP_LEVEL,
        aliases={"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    ),
    # models/exaone_moe/modeling_exaone_moe.py: ExaoneMoeAttention; vLLM exaone_moe_mtp.py and exaone_moe.py: a dense
    # MTP layer (is_mtp)
    "ExaoneMoeForCausalLM": Family(
        defaults=defaults.EXAONE_MOE,
        attention=always(grouped_query(qk_norm=True)),
        feed_forward=by_type(_EXAONE_EXPERTS, PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
        mtp=TOP_LEVEL,
        float32=(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    ),
    # modeling_bailing_moe_v2.py of inclusionAI/Ling-mini-2.0 (Ling 2.0, Ring 2.0): BailingMoeV2Attention (rows of
    # query_key_value: queries, keys, values), BailingMoeV2MTPLayer ([enorm(embedding), hnorm(hidden)], experts)
    "BailingMoeV2ForCausalLM": Family(
        defaults=defaults.BAILING_V2,
        attention=always(
            grouped_query(
                qkv_bias="use_qkv_bias",
                out_bias="use_bias",
                qk_norm="use_qk_norm",
                names=AttentionNames("attention.", "query_key_value", "dense", "query_layernorm", "key_layernorm"),
            )
        ),
        feed_forward=after_dense(_BAILING_EXPERTS),
        mtp_feed_forward=always(_BAILING_EXPERTS),
        mtp=APPENDED_FINAL_LAYERNORM,
        float32=(".mlp.gate.expert_bias",),
        embedding="word_embeddings.weight",
    ),
    # models/minimax_m2/modeling_minimax_m2.py: MiniMaxM2Attention, MiniMaxM2SparseMoeBlock. No file with MTP layers is
    # published, whatever num_mtp_modules says
    "MiniMaxM2ForCausalLM": Family(
        defaults=defaults.MINIMAX_M2,
        attention=always(grouped_query(joint=True)),
        feed_forward=always(_MINIMAX_EXPERTS),
        mtp_feed_forward=always(_MINIMAX_EXPERTS),
        aliases={"num_local_experts": "num_experts"},
        float32=(".block_sparse_moe.e_score_correction_bias",),
    ),
    # models/mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashAttention, MiMoV2FlashMoE; MTP: a dense sliding layer
    "MiMoV2FlashForCausalLM": Family(
        defaults=defaults.MIMO_V2_FLASH,
        attention=lambda settings, layer: _MIMO_SLIDING if _slides(settings, layer) else _MIMO_FULL,
        feed_forward=_mimo_feed_forward,
        mtp_attention=always(_MIMO_SLIDING),
        mtp_feed_forward=always(PLAIN_MLP),
        mtp=MIMO_V2,
        mtp_norms=LayerNorms(before_mlp="pre_mlp_layernorm.weight"),
        aliases={"n_routed_experts": "num_local_experts"},
        float32=DEEPSEEK_FLOAT32,
    ),
}
