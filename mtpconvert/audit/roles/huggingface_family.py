"""What a family is to the Hugging Face half, and how the layers of a model get their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mtpconvert.audit.roles.huggingface_attention import Module
from mtpconvert.audit.roles.huggingface_feedforward import ExpertNames, experts, gated_mlp
from mtpconvert.audit.roles.huggingface_mtp import APPENDED, MtpLayout
from mtpconvert.audit.roles.huggingface_site import Default, Settings

# The module of a layer: of trunk layer n, or of MTP layer n
Choice = Callable[[Settings, int], Module]


@dataclass(frozen=True)
class LayerNorms:
    """Names of the norms of a decoder layer's input and output, by what stands between them; None: there is none.

    An output is normed before it joins the residual.
    """

    before_attention: str | None = "input_layernorm.weight"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm.weight"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Family:
    """``attention`` and ``feed_forward`` give the modules of a trunk layer, ``mtp_*`` those of an MTP layer (None: as
    in the trunk).

    ``aliases``: other spellings of config keys. ``float32``: ends of the names of tensors that are kept in F32 whatever
    the model's dtype is. ``roots``: prefixes of the trunk, the usual one first; ``embedding``: its name below them.
    ``zero_centred``: norms keep ``scale - 1``. ``text``: the key of the language model's own config, of several;
    ``beside``: how names of the other models' tensors begin.
    """

    defaults: Mapping[str, Default]
    attention: Choice
    feed_forward: Choice
    mtp_feed_forward: Choice
    mtp_attention: Choice | None = None
    mtp: MtpLayout = APPENDED
    norms: LayerNorms = LayerNorms()
    mtp_norms: LayerNorms | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("model.",)
    embedding: str = "embed_tokens.weight"
    zero_centred: bool = False
    text: str | None = None
    beside: tuple[str, ...] = ()


def always(module: Module) -> Choice:
    return lambda settings, layer: module


def after_dense(moe: Module) -> Choice:
    """``Glm4MoeDecoderLayer.__init__``: experts from layer ``first_k_dense_replace`` on, whatever else a config has."""
    return lambda settings, layer: moe if layer >= settings.count("first_k_dense_replace") else PLAIN_MLP


def after_dense_at_frequency(moe: Module) -> Choice:
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
        return after_dense(moe)(settings, layer) if chosen else PLAIN_MLP

    return choose


def by_type(moe: Module, dense: Module) -> Choice:
    """``mlp_layer_types``: "sparse" or "dense" per layer; null: experts from layer ``first_k_dense_replace`` on."""

    def choose(settings: Settings, layer: int) -> Module:
        types = settings.listed("mlp_layer_types", settings.count("num_hidden_layers"))
        sparse = types[layer] == "sparse" if types else layer >= settings.count("first_k_dense_replace")
        return moe if sparse else dense

    return choose


def mtp_by_type(moe: Module, dense: Module) -> Choice:
    """``mtp_mlp_layer_types``: "sparse" or "dense" per MTP layer; null: experts."""

    def choose(settings: Settings, layer: int) -> Module:
        types = settings.listed("mtp_mlp_layer_types", layer + 1)
        return moe if types is None or types[layer] == "sparse" else dense

    return choose


def at_sparse_step(moe: Module) -> Choice:
    """``Qwen2MoeDecoderLayer.__init__``: every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""

    def choose(settings: Settings, layer: int) -> Module:
        step = settings.count("decoder_sparse_step")
        sparse = settings.count("num_experts") > 0 and step > 0 and (layer + 1) % step == 0
        return moe if sparse and layer not in (settings.listed("mlp_only_layers", 0) or []) else PLAIN_MLP

    return choose


PLAIN_MLP = gated_mlp()
LLAMA_MLP = gated_mlp(bias="mlp_bias")

# models/deepseek_v3/modeling_deepseek_v3.py: DeepseekV3MoE, DeepseekV3TopkRouter
DEEPSEEK_NAMES = ExpertNames(correction=("gate.e_score_correction_bias",), shared=("shared_experts.",))
DEEPSEEK_EXPERTS = experts(DEEPSEEK_NAMES, count="n_routed_experts", shared_count="n_shared_experts")
DEEPSEEK_FLOAT32 = (".mlp.gate.e_score_correction_bias",)
# attribute_map of DeepseekV3Config and Glm4MoeConfig
DEEPSEEK_ALIASES = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
# models/qwen2_moe/modeling_qwen2_moe.py: Qwen2MoeSparseMoeBlock
QWEN2_EXPERTS = experts(
    ExpertNames(shared=("shared_expert.",), mix="shared_expert_gate.weight"),
    shared_units="shared_expert_intermediate_size",
)
# attribute_map of the other config classes
QWEN_ALIASES = {"num_experts": "num_local_experts"}
