"""The Hugging Face half of the roles: which block of which tensor of an HF checkpoint holds which meaning.

Written from transformers 5.24.0 alone, with no mapping file and no Megatron code open. A family is a table of module
kinds; the modules name the functions they were read from. A default is the one of the family's config class
(models/<model_type>/configuration_<model_type>.py), since transformers reads a missing key so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.huggingface_attention import Module, grouped_query, latent
from mtpconvert.audit.roles.huggingface_feedforward import experts, gated_mlp
from mtpconvert.audit.roles.huggingface_mtp import around_the_trunk, mtp_block, mtp_depths
from mtpconvert.audit.roles.huggingface_site import Default, Settings, Site
from mtpconvert.errors import ConfigError, NotRepresentableError
from mtpconvert.tensors import Inventory


@dataclass(frozen=True)
class Family:
    """``feed_forward`` gives the module of a trunk layer, ``mtp_feed_forward`` that of every MTP layer.

    ``float32``: ends of the names of tensors that are kept in F32 whatever the model's dtype is.
    """

    defaults: Mapping[str, Default]
    attention: Module
    feed_forward: Callable[[Settings, int], Module]
    mtp_feed_forward: Module
    aliases: Mapping[str, str] = field(default_factory=dict)
    float32: tuple[str, ...] = ()


def _always(module: Module) -> Callable[[Settings, int], Module]:
    return lambda settings, layer: module


def _experts_after_dense(settings: Settings, layer: int) -> Module:
    """``Glm4MoeDecoderLayer.__init__``: experts from layer ``first_k_dense_replace`` on, whatever else a config has."""
    return experts if layer >= settings.count("first_k_dense_replace") else _PLAIN_MLP


def _dense_then_experts(settings: Settings, layer: int) -> Module:
    """``DeepseekV3DecoderLayer.__init__``: experts from layer ``first_k_dense_replace`` on.

    ``moe_layer_freq`` narrows that where a config has it: every n-th layer (counted from layer 0), or a list with an
    entry per layer. The transformers class ignores the key; ``__post_init__`` of its kin reads it so
    (models/dots3_note/configuration_dots3_note.py).
    """
    frequency = settings.raw("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) < settings.count("num_hidden_layers"):
            raise ConfigError("moe_layer_freq has fewer entries than layers", where="config.json: moe_layer_freq")
        chosen = bool(frequency[layer])
    else:
        every = settings.count("moe_layer_freq")
        chosen = every > 0 and layer % every == 0
    return _experts_after_dense(settings, layer) if chosen else _PLAIN_MLP


_PLAIN_MLP = gated_mlp(bias=False)
_LLAMA_MLP = gated_mlp(bias="mlp_bias")

# A family without an MTP count in its config class gets the layers of modeling_layers.py:MtpModel if a file has one.
_SHARED = {"tie_word_embeddings": False, "mtp_hidden_states_first": False, "num_nextn_predict_layers": 0}

# models/llama/configuration_llama.py: LlamaConfig
_LLAMA = {
    **_SHARED, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

# models/mistral/configuration_mistral.py: MistralConfig
_MISTRAL = {
    **_SHARED, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None,
}  # fmt: skip

# models/qwen2/configuration_qwen2.py: Qwen2Config; head_dim is not a field of it, the modelling code derives it
_QWEN2 = {
    **_SHARED, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None,
}  # fmt: skip

# models/qwen3/configuration_qwen3.py: Qwen3Config
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}

# models/deepseek_v3/configuration_deepseek_v3.py: DeepseekV3Config; moe_layer_freq is not a field of it
_DEEPSEEK_V3 = {
    **_SHARED, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "rope_interleave": True, "attention_bias": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip

# models/glm4_moe/configuration_glm4_moe.py: Glm4MoeConfig; head_dim is not a field of it, published files carry it
_GLM4_MOE = {
    **_SHARED, "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": None,
    "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1, "attention_bias": False,
    "use_qk_norm": False, "num_nextn_predict_layers": 1,
}  # fmt: skip

# attribute_map of both config classes that declare MTP layers
_EXPERT_ALIASES = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}

_MOST_PLACES = 500_000  # ten times DeepSeek-V3's; a config with a slip in a count would fill the memory

FAMILIES: dict[str, Family] = {
    # models/deepseek_v3/modeling_deepseek_v3.py; PreTrainedConfig.get_mtp_config: "MTP layers always use MoE".
    # DeepseekV3TopkRouter makes the correction bias in float32; the router's weight is bf16 in published files.
    "DeepseekV3ForCausalLM": Family(
        defaults=_DEEPSEEK_V3,
        attention=latent,
        feed_forward=_dense_then_experts,
        mtp_feed_forward=experts,
        aliases=_EXPERT_ALIASES,
        float32=(".mlp.gate.e_score_correction_bias",),
    ),
    # models/glm4_moe/modeling_glm4_moe.py: Glm4MoeAttention (bias=False on o, whatever the config says), Glm4MoeMoE;
    # MTP layers and dtypes as for DeepSeek (Glm4MoeTopkRouter)
    "Glm4MoeForCausalLM": Family(
        defaults=_GLM4_MOE,
        attention=grouped_query(qkv_bias="attention_bias", out_bias=False, qk_norm="use_qk_norm"),
        feed_forward=_experts_after_dense,
        mtp_feed_forward=experts,
        aliases=_EXPERT_ALIASES,
        float32=(".mlp.gate.e_score_correction_bias",),
    ),
    # models/qwen3/modeling_qwen3.py: Qwen3Attention, Qwen3MLP
    "Qwen3ForCausalLM": Family(
        defaults=_QWEN3,
        attention=grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_PLAIN_MLP,
    ),
    # models/qwen2/modeling_qwen2.py: Qwen2Attention (bias=True on q, k, v and False on o, whatever the config says)
    "Qwen2ForCausalLM": Family(
        defaults=_QWEN2,
        attention=grouped_query(qkv_bias=True, out_bias=False, qk_norm=False),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_PLAIN_MLP,
    ),
    # models/llama/modeling_llama.py: LlamaAttention, LlamaMLP
    "LlamaForCausalLM": Family(
        defaults=_LLAMA,
        attention=grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=False),
        feed_forward=_always(_LLAMA_MLP),
        mtp_feed_forward=_LLAMA_MLP,
    ),
    # models/mistral/modeling_mistral.py: MistralAttention, MistralMLP (bias=False throughout)
    "MistralForCausalLM": Family(
        defaults=_MISTRAL,
        attention=grouped_query(qkv_bias=False, out_bias=False, qk_norm=False),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_PLAIN_MLP,
    ),
}


def placements(config: Mapping[str, Any], inventory: Inventory) -> list[Placement]:
    """Where each role of the model stands in the HF checkpoint that ``config`` (a parsed config.json) describes.

    Names and shapes come from the config alone; ``inventory`` (what is there) decides only about tensors that may be
    absent (copies of the embedding and the head), stacked or single experts, and MTP layers that the config does not
    declare. A declared layer is placed whether or not it is there. Raises NotRepresentableError for an architecture, or
    a variant of one, that has no table here, and ConfigError for a config that contradicts itself.
    """
    family = _family(config)
    settings = Settings(config, family.defaults, family.aliases)
    found = list(islice(_model(family, settings, inventory), _MOST_PLACES + 1))
    if len(found) > _MOST_PLACES:
        raise ConfigError(f"config.json describes a model of more than {_MOST_PLACES:,} tensors")
    return found


def expected_dtype(name: str, config: Mapping[str, Any]) -> str | None:
    """The dtype (as safetensors spells it) that the tensor must have whatever the model's is; None: no such demand."""
    return "F32" if name.endswith(_family(config).float32) else None


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or [None]
    if named[0] not in FAMILIES:
        raise NotRepresentableError(
            f"the auditor knows no roles for architecture {named[0] or '(none named)'}",
            where="config.json: architectures",
            next_step=f"known are {', '.join(FAMILIES)}",
        )
    return FAMILIES[named[0]]


def _model(family: Family, settings: Settings, inventory: Inventory) -> Iterator[Placement]:
    trunk = settings.count("num_hidden_layers")
    yield from around_the_trunk(Site("", "", settings, inventory))
    for n in range(trunk):
        site = Site(f"trunk.{n}", f"model.layers.{n}.", settings, inventory)
        yield from _decoder_layer(site, family.attention, family.feed_forward(settings, n))
    for depth in mtp_depths(settings, inventory):
        site = Site(f"mtp.{depth}", f"model.layers.{trunk + depth}.", settings, inventory)
        yield from mtp_block(site)
        yield from _decoder_layer(site, family.attention, family.mtp_feed_forward)


def _decoder_layer(site: Site, attention: Module, feed_forward: Module) -> Iterator[Placement]:
    """``*DecoderLayer.forward``: ``post_attention_layernorm`` is applied before the feed-forward part."""
    hidden = site.settings.count("hidden_size")
    yield site.whole("input_layernorm.weight", "attn.input_norm", ((hidden,),))
    yield from attention(site)
    yield site.whole("post_attention_layernorm.weight", "mlp.norm", ((hidden,),))
    yield from feed_forward(site)
