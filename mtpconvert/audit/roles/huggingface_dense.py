"""Grouped-query families without experts, one entry per architecture, each with the source it was read from."""

from __future__ import annotations

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import AttentionNames, grouped_query
from mtpconvert.audit.roles.huggingface_family import LLAMA_MLP, PLAIN_MLP, Family, always
from mtpconvert.audit.roles.huggingface_feedforward import joined_mlp
from mtpconvert.audit.roles.huggingface_mtp import MIMO

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
}
