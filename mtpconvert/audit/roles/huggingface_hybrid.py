"""Families of gated delta nets with gated attention between, one entry per architecture, each with its source."""

from __future__ import annotations

from dataclasses import replace

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import Module, grouped_query
from mtpconvert.audit.roles.huggingface_delta import delta_net_apart, delta_net_by_key_head
from mtpconvert.audit.roles.huggingface_family import (
    PLAIN_MLP,
    QWEN2_EXPERTS,
    QWEN_ALIASES,
    Choice,
    Family,
    always,
    at_sparse_step,
)
from mtpconvert.audit.roles.huggingface_mtp import TOP_LEVEL
from mtpconvert.audit.roles.huggingface_site import Settings
from mtpconvert.errors import ConfigError

# Qwen3NextAttention, Qwen3_5Attention, Qwen3_5MoeAttention
_GATED_ATTENTION = grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, gated=True)


def _by_layer_type(delta_net: Module) -> Choice:
    """``layer_types`` of ``Qwen3NextConfig.__post_init__``; null: full attention every ``full_attention_interval``."""

    def choose(settings: Settings, layer: int) -> Module:
        types = settings.listed("layer_types", settings.count("num_hidden_layers"))
        if types is None:
            every = settings.count("full_attention_interval")
            return delta_net if every and (layer + 1) % every else _GATED_ATTENTION
        if types[layer] not in ("linear_attention", "full_attention"):
            raise ConfigError(
                f"layer {layer} is {types[layer]!r}, neither linear_attention nor full_attention",
                where="config.json: layer_types",
            )
        return delta_net if types[layer] == "linear_attention" else _GATED_ATTENTION

    return choose


# models/qwen3_5/modeling_qwen3_5.py: Qwen3_5Attention, Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm (1 + w), Qwen3_5MLP;
# conversion_mapping.py, "qwen3_5_text": files may keep the text model below language_model
_QWEN3_5 = Family(
    defaults=defaults.QWEN3_5,
    attention=_by_layer_type(delta_net_apart),
    feed_forward=always(PLAIN_MLP),
    mtp_attention=always(_GATED_ATTENTION),
    mtp_feed_forward=always(PLAIN_MLP),
    mtp=replace(TOP_LEVEL, count="mtp_num_hidden_layers"),
    roots=("model.", "model.language_model."),
    zero_centred=True,
)
# models/qwen3_5_moe/modeling_qwen3_5_moe.py: Qwen3_5MoeSparseMoeBlock. Trunk and MTP may differ in how experts stand
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults=defaults.QWEN3_5_MOE,
    feed_forward=always(QWEN2_EXPERTS),
    mtp_feed_forward=always(QWEN2_EXPERTS),
    aliases=QWEN_ALIASES,
)


def _as_text_part(family: Family) -> Family:
    """``Qwen3_5ForConditionalGeneration``, ``Qwen3_5MoeForConditionalGeneration``: below ``model.language_model``."""
    return replace(family, text="text_config", roots=("model.language_model.",), beside=("model.visual.",))


HYBRID: dict[str, Family] = {
    # models/qwen3_next/modeling_qwen3_next.py: Qwen3NextAttention, Qwen3NextGatedDeltaNet, Qwen3NextRMSNorm (1 + w),
    # Qwen3NextSparseMoeBlock; MTP as vLLM qwen3_next_mtp.py reads it: full attention, experts
    "Qwen3NextForCausalLM": Family(
        defaults=defaults.QWEN3_NEXT,
        attention=_by_layer_type(delta_net_by_key_head),
        feed_forward=at_sparse_step(QWEN2_EXPERTS),
        mtp_attention=always(_GATED_ATTENTION),
        mtp_feed_forward=always(QWEN2_EXPERTS),
        mtp=TOP_LEVEL,
        aliases=QWEN_ALIASES,
        zero_centred=True,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": _as_text_part(_QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": _as_text_part(_QWEN3_5_MOE),
}
