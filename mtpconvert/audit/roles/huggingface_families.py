"""The families that the Hugging Face half knows, one entry per architecture, each with the source it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mtpconvert.audit.roles import huggingface_defaults as defaults
from mtpconvert.audit.roles.huggingface_attention import Module, grouped_query, latent
from mtpconvert.audit.roles.huggingface_feedforward import ExpertNames, experts, gated_mlp
from mtpconvert.audit.roles.huggingface_mtp import APPENDED, TOP_LEVEL, MtpLayout
from mtpconvert.audit.roles.huggingface_site import Default, Settings

# The module of a layer: of trunk layer n, or of MTP layer n
Choice = Callable[[Settings, int], Module]


@dataclass(frozen=True)
class Family:
    """``attention`` and ``feed_forward`` give the modules of a trunk layer, ``mtp_*`` those of an MTP layer.

    ``aliases``: other spellings of config keys. ``float32``: ends of the names of tensors that are kept in F32 whatever
    the model's dtype is. ``roots``: prefixes of the trunk, the usual one first; ``embedding``: its name below them.
    ``zero_centred``: norms keep ``scale - 1``.
    """

    defaults: Mapping[str, Default]
    attention: Choice
    feed_forward: Choice
    mtp_feed_forward: Choice
    mtp_attention: Choice | None = None
    mtp: MtpLayout = APPENDED
    aliases: Mapping[str, str] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("model.",)
    embedding: str = "embed_tokens.weight"
    zero_centred: bool = False


def _always(module: Module) -> Choice:
    return lambda settings, layer: module


def _after_dense(moe: Module) -> Choice:
    """``Glm4MoeDecoderLayer.__init__``: experts from layer ``first_k_dense_replace`` on, whatever else a config has."""
    return lambda settings, layer: moe if layer >= settings.count("first_k_dense_replace") else _PLAIN_MLP


def _after_dense_at_frequency(moe: Module) -> Choice:
    """``DeepseekV3DecoderLayer.__init__``: experts from layer ``first_k_dense_replace`` on.

    ``moe_layer_freq`` narrows that where a config has it: every n-th layer (counted from layer 0), or a list with an
    entry per layer. The transformers class ignores the key; ``__post_init__`` of its kin reads it so
    (models/dots3_note/configuration_dots3_note.py).
    """

    def choose(settings: Settings, layer: int) -> Module:
        if isinstance(settings.raw("moe_layer_freq"), list):
            chosen = bool((settings.listed("moe_layer_freq", settings.count("num_hidden_layers")) or [])[layer])
        else:
            every = settings.count("moe_layer_freq")
            chosen = every > 0 and layer % every == 0
        return _after_dense(moe)(settings, layer) if chosen else _PLAIN_MLP

    return choose


def _by_type(moe: Module, dense: Module) -> Choice:
    """``mlp_layer_types``: "sparse" or "dense" per layer; null: experts from layer ``first_k_dense_replace`` on."""

    def choose(settings: Settings, layer: int) -> Module:
        types = settings.listed("mlp_layer_types", settings.count("num_hidden_layers"))
        sparse = types[layer] == "sparse" if types else layer >= settings.count("first_k_dense_replace")
        return moe if sparse else dense

    return choose


def _at_sparse_step(moe: Module) -> Choice:
    """``Qwen2MoeDecoderLayer.__init__``: every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""

    def choose(settings: Settings, layer: int) -> Module:
        step = settings.count("decoder_sparse_step")
        sparse = settings.count("num_experts") > 0 and step > 0 and (layer + 1) % step == 0
        return moe if sparse and layer not in (settings.listed("mlp_only_layers", 0) or []) else _PLAIN_MLP

    return choose


_PLAIN_MLP = gated_mlp()
_LLAMA_MLP = gated_mlp(bias="mlp_bias")

# models/deepseek_v3/modeling_deepseek_v3.py: DeepseekV3MoE, DeepseekV3TopkRouter
_DEEPSEEK_NAMES = ExpertNames(correction=("gate.e_score_correction_bias",), shared=("shared_experts.",))
_DEEPSEEK_EXPERTS = experts(_DEEPSEEK_NAMES, count="n_routed_experts", shared_count="n_shared_experts")
_DEEPSEEK_FLOAT32 = (".mlp.gate.e_score_correction_bias",)
# models/deepseek_v2/modeling_deepseek_v2.py: DeepseekV2Moe, DeepseekV2TopkRouter
_DEEPSEEK_V2_EXPERTS = experts(
    replace(_DEEPSEEK_NAMES, correction=()), count="n_routed_experts", shared_count="n_shared_experts"
)
# models/qwen3_moe/modeling_qwen3_moe.py: Qwen3MoeSparseMoeBlock
_QWEN3_EXPERTS = experts(ExpertNames())
# models/qwen2_moe/modeling_qwen2_moe.py: Qwen2MoeSparseMoeBlock
_QWEN2_EXPERTS = experts(
    ExpertNames(shared=("shared_expert.",), mix="shared_expert_gate.weight"),
    shared_units="shared_expert_intermediate_size",
)
# conversion_mapping.py, "mixtral": block_sparse_moe. on disk, mlp. in memory; w1 gate, w3 up, w2 down
_MIXTRAL_EXPERTS = experts(
    ExpertNames(
        modules=("block_sparse_moe.", "mlp."),
        gate="experts.{}.w1.weight",
        up="experts.{}.w3.weight",
        down="experts.{}.w2.weight",
    ),
    count="num_local_experts",
    units="intermediate_size",
)

# attribute_map of the config classes
_DEEPSEEK_ALIASES = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
_QWEN_ALIASES = {"num_experts": "num_local_experts"}

FAMILIES: dict[str, Family] = {
    # models/deepseek_v3/modeling_deepseek_v3.py; PreTrainedConfig.get_mtp_config: "MTP layers always use MoE".
    # DeepseekV3TopkRouter makes the correction bias in float32; the router's weight is bf16 in published files.
    # Kimi-K2 and Moonlight bear this architecture too: no MTP layers, and Moonlight no query latent
    "DeepseekV3ForCausalLM": Family(
        defaults=defaults.DEEPSEEK_V3,
        attention=_always(latent(interleaved="rope_interleave")),
        feed_forward=_after_dense_at_frequency(_DEEPSEEK_EXPERTS),
        mtp_feed_forward=_always(_DEEPSEEK_EXPERTS),
        aliases=_DEEPSEEK_ALIASES,
        float32=_DEEPSEEK_FLOAT32,
    ),
    # models/deepseek_v2/modeling_deepseek_v2.py: apply_rotary_emb (view_as_complex: interleaved)
    "DeepseekV2ForCausalLM": Family(
        defaults=defaults.DEEPSEEK_V2,
        attention=_always(latent(interleaved=True)),
        feed_forward=_after_dense(_DEEPSEEK_V2_EXPERTS),
        mtp_feed_forward=_always(_DEEPSEEK_V2_EXPERTS),
        aliases={"n_routed_experts": "num_experts"},
    ),
    # models/glm4_moe_lite/modeling_glm4_moe_lite.py: Glm4MoeLiteAttention, Glm4MoeLiteMoE
    "Glm4MoeLiteForCausalLM": Family(
        defaults=defaults.GLM4_MOE_LITE,
        attention=_always(latent(interleaved="rope_interleave")),
        feed_forward=_by_type(_DEEPSEEK_EXPERTS, _PLAIN_MLP),
        mtp_feed_forward=_always(_DEEPSEEK_EXPERTS),
        aliases={"n_routed_experts": "num_local_experts"},
        float32=_DEEPSEEK_FLOAT32,
    ),
    # models/glm4_moe/modeling_glm4_moe.py: Glm4MoeAttention (bias=False on o, whatever the config says), Glm4MoeMoE;
    # MTP layers and dtypes as for DeepSeek (Glm4MoeTopkRouter)
    "Glm4MoeForCausalLM": Family(
        defaults=defaults.GLM4_MOE,
        attention=_always(grouped_query(qkv_bias="attention_bias", qk_norm="use_qk_norm")),
        feed_forward=_after_dense(_DEEPSEEK_EXPERTS),
        mtp_feed_forward=_always(_DEEPSEEK_EXPERTS),
        aliases=_DEEPSEEK_ALIASES,
        float32=_DEEPSEEK_FLOAT32,
    ),
    # models/qwen3/modeling_qwen3.py: Qwen3Attention, Qwen3MLP
    "Qwen3ForCausalLM": Family(
        defaults=defaults.QWEN3,
        attention=_always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_always(_PLAIN_MLP),
    ),
    # models/qwen3_moe/modeling_qwen3_moe.py: Qwen3MoeAttention; MTP as SGLang qwen3_moe_mtp.py reads it
    "Qwen3MoeForCausalLM": Family(
        defaults=defaults.QWEN3_MOE,
        attention=_always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True)),
        feed_forward=_at_sparse_step(_QWEN3_EXPERTS),
        mtp_feed_forward=_always(_QWEN3_EXPERTS),
        mtp=TOP_LEVEL,
        aliases=_QWEN_ALIASES,
    ),
    # models/qwen2_moe/modeling_qwen2_moe.py: Qwen2MoeAttention (bias=False on o)
    "Qwen2MoeForCausalLM": Family(
        defaults=defaults.QWEN2_MOE,
        attention=_always(grouped_query(qkv_bias="qkv_bias")),
        feed_forward=_at_sparse_step(_QWEN2_EXPERTS),
        mtp_feed_forward=_always(_QWEN2_EXPERTS),
        aliases=_QWEN_ALIASES,
    ),
    # models/qwen2/modeling_qwen2.py: Qwen2Attention (bias=True on q, k, v and False on o, whatever the config says)
    "Qwen2ForCausalLM": Family(
        defaults=defaults.QWEN2,
        attention=_always(grouped_query(qkv_bias=True)),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_always(_PLAIN_MLP),
    ),
    # models/llama/modeling_llama.py: LlamaAttention, LlamaMLP
    "LlamaForCausalLM": Family(
        defaults=defaults.LLAMA,
        attention=_always(grouped_query(qkv_bias="attention_bias", out_bias="attention_bias")),
        feed_forward=_always(_LLAMA_MLP),
        mtp_feed_forward=_always(_LLAMA_MLP),
    ),
    # models/mistral/modeling_mistral.py: MistralAttention, MistralMLP (bias=False throughout)
    "MistralForCausalLM": Family(
        defaults=defaults.MISTRAL,
        attention=_always(grouped_query()),
        feed_forward=_always(_PLAIN_MLP),
        mtp_feed_forward=_always(_PLAIN_MLP),
    ),
    # models/mixtral/modeling_mixtral.py: MixtralAttention, MixtralSparseMoeBlock
    "MixtralForCausalLM": Family(
        defaults=defaults.MIXTRAL,
        attention=_always(grouped_query()),
        feed_forward=_always(_MIXTRAL_EXPERTS),
        mtp_feed_forward=_always(_MIXTRAL_EXPERTS),
        aliases={"num_local_experts": "num_experts"},
    ),
}
