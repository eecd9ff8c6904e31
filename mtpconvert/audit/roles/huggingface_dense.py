"""Grouped-query families without experts, one entry per architecture, each with the source it was read from."""

from __future__ import annotations

from dataclasses import replace

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import AttentionNames, grouped_query
from mtpconvert.audit.roles.huggingface_family import LLAMA_MLP, PLAIN_MLP, Family, LayerNorms, always
from mtpconvert.audit.roles.huggingface_feedforward import joined_mlp
from mtpconvert.audit.roles.huggingface_mtp import MIMO

_GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm.weight",
    before_mlp="pre_feedforward_layernorm.weight",
    after_mlp="post_feedforward_layernorm.weight",
)
_GEMMA3 = Family(
    defaults=defaults.GEMMA3,
    attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
    feed_forward=always(PLAIN_MLP),
    mtp_feed_forward=always(PLAIN_MLP),
    norms=_GEMMA_NORMS,
    zero_centred=True,
)
_OLMO2 = Family(
    defaults=defaults.OLMO2,
    attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", joint=True)),
    feed_forward=always(PLAIN_MLP),
    mtp_feed_forward=always(PLAIN_MLP),
    norms=LayerNorms(None, "post_attention_layernorm.weight", None, "post_feedforward_layernorm.weight"),
)

DENSE: dict[str, Family] = {
    # models/qwen3/modeling_qwen3.py: Qwen3Attention, Qwen3MLP
    "Qwen3ForCausalLM": Family(
        defaults=defaults.QWEN3,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=always(PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
    ),
    # models/qwen2/modeling_qwen2.py: Qwen2Attention (bias=True on q, k, v and False on o, whatever the config says)
    "Qwen2ForCausalLM": Family(
        defaults=defaults.QWEN2,
        attention=always(grouped_query(qkv_bias=True)),
        feed_forward=always(PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
    ),
    # models/llama/modeling_llama.py: LlamaAttention, LlamaMLP
    "LlamaForCausalLM": Family(
        defaults=defaults.LLAMA,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias")),
        feed_forward=always(LLAMA_MLP),
        mtp_feed_forward=always(LLAMA_MLP),
    ),
    # models/mistral/modeling_mistral.py: MistralAttention, MistralMLP (bias=False throughout)
    "MistralForCausalLM": Family(
        defaults=defaults.MISTRAL,
        attention=always(grouped_query()),
        feed_forward=always(PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
    ),
    # models/phi3/modeling_phi3.py: Phi3Attention (rows of qkv_proj: queries, keys, values), Phi3MLP. Phi-4 too
    "Phi3ForCausalLM": Family(
        defaults=defaults.PHI3,
        attention=always(grouped_query(names=AttentionNames(joined="qkv_proj"))),
        feed_forward=always(joined_mlp),
        mtp_feed_forward=always(joined_mlp),
    ),
    # modeling_mimo.py of XiaomiMiMo/MiMo-7B: MiMoModel is a Qwen2Model, MiMoMTPLayers
    "MiMoForCausalLM": Family(
        defaults=defaults.MIMO,
        attention=always(grouped_query(qkv_bias=True)),
        feed_forward=always(PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
        mtp=MIMO,
    ),
    # models/gemma2/modeling_gemma2.py: Gemma2Attention, Gemma2DecoderLayer, Gemma2RMSNorm (1 + w), Gemma2MLP
    "Gemma2ForCausalLM": Family(
        defaults=defaults.GEMMA2,
        attention=always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias")),
        feed_forward=always(PLAIN_MLP),
        mtp_feed_forward=always(PLAIN_MLP),
        norms=_GEMMA_NORMS,
        zero_centred=True,
    ),
    # models/gemma3/modeling_gemma3.py: Gemma3Attention, Gemma3DecoderLayer, Gemma3RMSNorm (1 + w)
    "Gemma3ForCausalLM": _GEMMA3,
    # Gemma3ForConditionalGeneration: the text model below model.language_model, in older files language_model.model
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text="text_config",
        roots=("model.language_model.", "language_model.model."),
        beside=(
            "model.vision_tower.",
            "vision_tower.",
            "model.multi_modal_projector.",
            "multi_modal_projector.",
        ),
    ),
    # models/glm4/modeling_glm4.py: Glm4Attention (bias=False on o), Glm4DecoderLayer, Glm4MLP
    "Glm4ForCausalLM": Family(
        defaults=defaults.GLM4,
        attention=always(grouped_query(qkv_bias="attention_bias")),
        feed_forward=always(joined_mlp),
        mtp_feed_forward=always(joined_mlp),
        norms=LayerNorms(after_attention="post_self_attn_layernorm.weight", after_mlp="post_mlp_layernorm.weight"),
    ),
    # models/olmo2/modeling_olmo2.py: Olmo2Attention, Olmo2DecoderLayer (only outputs are normed), Olmo2MLP
    "Olmo2ForCausalLM": _OLMO2,
    # models/olmo3/modeling_olmo3.py: the same but for sliding windows
    "Olmo3ForCausalLM": _OLMO2,
}
