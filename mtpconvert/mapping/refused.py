"""What Megatron-Core cannot hold, as data: families by architecture and model type, draft parts by tensor names.

A family is refused as long as no mapping file of its architecture is there. Architectures and model types:
transformers 5.24 ``models/*/configuration_*.py``, vLLM's and SGLang's registries. That a module is missing from
megatron-core was looked up in 0.16.1 and 0.19.2 (``transformer/``, ``models/gpt``, ``ssm``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """``tensors``: regular expressions for the names that show it. ``by_tensors``: recognised by them alone, where
    each matches some tensor, and none of ``without`` does. ``draft``: a draft model of its own, without a trunk.
    ``mtp``: only the MTP part is at fault. ``keys``: config keys that no other kind of model has."""

    what: str
    reason: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    by_tensors: bool = False
    draft: bool = False
    mtp: bool = False
    without: tuple[str, ...] = ()


_EAGLE = (
    "it is a separate model with its own projection and no norms of embedding and hidden state; Megatron's MTP layer is"
    " part of its trunk and needs both norms"
)
_PARALLEL = "its heads all read one trunk state; Megatron's MTP layers run one after another"
_HYPER = "stock megatron-core has no module for hyper-connections, several residual streams between the layers"
_SANDWICH = "stock megatron-core has no module for sandwich norms, a norm after attention or MLP before the residual"
_POST = "stock megatron-core has no layer that is normed after attention and MLP instead of before"
_WIDE = "stock megatron-core has no q and k norms over all heads at once, only per head"
_HC = r"(?:^|\.)(?:attn_hc|ffn_hc|hc_attn\w*|hc_ffn\w*|hc_head\w*|\w*hyper_connection\w*)\b"
_NO_KDA = "stock megatron-core has no KDA linear-attention layer"
_INKLING = "stock megatron-core has no layer with short convolutions, and its MTP layer norms no embedding twice"
_LINEAR = "stock megatron-core's GPTModel has no such linear-attention layers"

# Recognised by names, in this order, where no family is recognised first.
DRAFTS = (
    Refused(
        "an EAGLE-3 draft model",
        "it reads three trunk states through a projection of its own and has a smaller vocabulary of its own;"
        " Megatron's MTP layer reads the last state and shares the head",
        architectures=("*Eagle3", "Eagle3*ForCausalLM", "*Eagle3Model", "Eagle3Speculator", "Peagle*"),
        model_types=("eagle3",),
        tensors=(r"^(?:model\.)?midlayer\.|^d2t$|^t2d$",), by_tensors=True, draft=True,
    ),
    Refused(
        "an EAGLE-1 or EAGLE-2 draft model", _EAGLE,
        architectures=("*Eagle", "Eagle*ForCausalLM", "*EagleModel", "EAGLEModel", "EagleDeepSeekMTP*", "EagleSpec*"),
        model_types=("eagle",), tensors=(r"^fc\.weight$", r"^layers\.\d+\."), by_tensors=True, draft=True,
    ),
    Refused(  # its projection lost: neither a norm before the first layer nor one after the last has ever been there
        "an EAGLE-1 or EAGLE-2 draft model, its projection fc.weight missing", _EAGLE,
        tensors=(r"^layers\.\d+\.self_attn\.",), by_tensors=True, draft=True,
        without=(r"^(?:norm|lm_head|fc\.weight)\b", r"\.input_layernorm\.", r"_feedforward_layernorm\."),
    ),
    Refused(
        "Medusa heads", _PARALLEL,
        architectures=("Medusa*",), model_types=("medusa",), keys=("medusa_num_heads", "num_medusa_heads"),
        tensors=(r"^(?:\w*medusa\w*\.)?\d+\.\d+\.(?:linear\.)?(?:weight|bias)$",), by_tensors=True, draft=True,
    ),
    Refused(
        "parallel prediction heads (Meta's multi-token prediction, Nemotron-Parse)", _PARALLEL,
        keys=("n_future_tokens",), tensors=(r"(?:^|\.)extra_heads\.\d+\.",), by_tensors=True, draft=True,
    ),
    Refused(
        "a Gemma 4 assistant",
        "it is a draft model that attends to the keys and values of its target; Megatron's MTP layer has its own",
        architectures=("Gemma4*Assistant*",), model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        tensors=(r"(?:^|\.)pre_projection\.weight$", r"(?:^|\.)post_projection\.weight$"), by_tensors=True, draft=True,
    ),
    Refused(
        "a speculators draft model",
        "it is a separate model that its own runtime joins to a target; Megatron's MTP layers are part of their trunk",
        keys=("speculators_model_type",), draft=True,
    ),
    Refused(
        "DSpark draft stages",
        "they are stages with a Markov head of their own; Megatron's MTP layers share the trunk's head",
        tensors=(r"(?:^|\.)mtp_dspark\.|\.markov_head\.",), by_tensors=True, mtp=True,
    ),
    Refused(
        "MTP layers with an output head of their own (Step-3.5, Step-3.7, Step5)",
        "Megatron's MTP layers share the trunk's output layer and have nowhere to keep a trained head for each",
        architectures=("Step3p5*", "Step3p7*", "Step5*"), model_types=("step3p5", "step3p7", "step5*"),
        tensors=(r"\.shared_head\.output\.weight$",), by_tensors=True, mtp=True,
    ),
    Refused(
        "MTP layers with an embedding of their own (dots3_note, LongCat-Flash)",
        "Megatron's MTP layers share the trunk's embedding and have nowhere to keep another",
        architectures=("Dots3Note*", "Longcat*"), model_types=("dots3_note*", "longcat_flash*"),
        tensors=(r"(?:^|\.)mtp\.embed_tokens\.weight$",), by_tensors=True, mtp=True,
    ),
    Refused(
        "ERNIE-4.5's MTP layer",
        "it reads the trunk's state before the final norm and has no final norm of its own; Megatron's reads the state"
        " after it and has its own",
        architectures=("Ernie4_5_Moe*", "Ernie4_5_MoE*", "Ernie4_5_VLMoe*"),
        model_types=("ernie4_5_moe", "ernie4_5_vl_moe"),
        tensors=(r"(?:^|\.)mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.\d+\.",), by_tensors=True, mtp=True,
    ),
    Refused(
        "an MTP layer with two projections (DeepSeek-V4, Qwen4-exp)",
        "it adds two projections of several residual streams; Megatron's MTP layer joins its inputs in one projection",
        tensors=(r"(?:^|\.)mtp\.(?:\d+\.(?:e_proj|h_proj)|fc_embedding|fc_hidden)\.",), by_tensors=True, mtp=True,
    ),
)  # fmt: skip

# Modules that no known model beside these has, recognised by names where no mapping file of the architecture is there.
# Names: transformers 5.24 ``conversion_mapping.py`` and ``models/{deepseek_v4,hy_v4,glm5_next,kimi_linear,mamba*}``.
MODULES = (
    Refused(
        "a model with hyper-connections (DeepSeek-V4, Qwen4-exp, GLM-5-next and HY-V4 have them)", _HYPER,
        tensors=(_HC,), by_tensors=True,
    ),
    Refused(
        "a model with KDA linear attention (Kimi-K3, Kimi-Linear and GLM-5-next have it)", _NO_KDA,
        tensors=(r"\.(?:[qkv]_conv1d|f_[ab]_proj)\.",), by_tensors=True,
    ),
    Refused("a model with Inkling's modules", _INKLING, tensors=(r"\.(?:w13_dn|wq_du)\b",), by_tensors=True),
    Refused(
        "a Mamba model, or a hybrid one (Nemotron-H and Nemotron-3 are)",
        "this tool does not support Megatron-Core's Mamba layers yet",
        tensors=(r"(?:^|\.)backbone\.layers\.\d+\.mixer\.",), by_tensors=True,
    ),
)  # fmt: skip

# Recognised by architecture or model type, as long as no mapping file of the architecture is there.
FAMILIES = (
    *(entry for entry in DRAFTS if entry.architectures or entry.model_types or entry.keys),
    Refused("DeepSeek-V4", _HYPER, ("DeepseekV4*",), ("deepseek_v4",), (_HC,)),
    Refused("Qwen4-exp", _HYPER, ("Qwen4Exp*",), ("qwen4_exp*",), (_HC,)),
    Refused(
        "GLM-5-next", f"{_HYPER}, and none for KDA linear attention",
        ("Glm5Next*",), ("glm5_next*",), (_HC,),
    ),
    Refused("HY-V4", _HYPER, ("HYV4*",), ("hy_v4*",), (_HC,)),
    Refused(
        "Kimi-K3 and Kimi-Linear", _NO_KDA,
        ("KimiK3*", "KimiLinear*"), ("kimi_k3*", "kimi_linear"),
        (r"\.(?:kda\w*|linear_attn|\w_conv1d|A_log|dt_bias)\b",),
    ),
    Refused(
        "Inkling", _INKLING,
        ("Inkling*",), ("inkling*",), (r"\.(?:w13_dn|wq_du|chain_norm|embed_norm|\w*conv\w*)\b",),
    ),
    Refused(
        "Nemotron-H and Nemotron-3", "they are hybrid Mamba models, which this tool does not support yet",
        ("NemotronH*",), ("nemotron_h*",),
        (r"^(?:\w+\.)*backbone\.layers\.\d+\.mixer\.|(?:^|\.)mtp\.layers\.\d+\.mixer\.",),
    ),
    Refused(
        "GigaChat-3.5", "stock megatron-core has no gated norms on both sides of attention and MLP, and no delta nets"
        " beside multi-latent attention", ("GigaChat35*",), ("gigachat35",),
        (r"\.post_(?:self_attn|mlp)_layernorm\.",),
    ),
    Refused("Ling 2.5 to 3.0", _LINEAR, ("BailingHybrid*", "BailingMoeV2_5*", "BailingMoeV3*"), ("bailing_hybrid",)),
    Refused(
        "MiniMax-M3", "stock megatron-core has no attention with MiniMax's sparse index",
        ("MiniMaxM3*",), ("minimax_m3*",), (r"\.index_[qk]_proj\.",),
    ),
    Refused("Gemma 4 and 3n", f"{_SANDWICH}, nor for per-layer embeddings", ("Gemma4*", "Gemma3n*"),
            ("gemma4*", "gemma3n*"), (r"per_layer|\.(?:pre|post)_feedforward_layernorm\.",)),
    Refused("GLM-OCR", _SANDWICH, ("GlmOcr*",), ("glm_ocr*",),
            (r"\.post_(?:self_attn|mlp)_layernorm\.",)),
    Refused("OLMoE", _WIDE, ("Olmoe*",), ("olmoe",), (r"\.self_attn\.[qk]_norm\.",)),
    Refused("EXAONE 4 and 4.5", _POST, ("Exaone4*",), ("exaone4*",), (r"\.post_feedforward_layernorm\.",)),
    Refused(
        "MiMo-V2 with q, k and v in one tensor (Pro, 2.5)",
        "stock megatron-core has no value heads of another size than query heads, and no mapping takes apart the shards"
        " in which that tensor's rows run", ("MiMoV2*",), ("mimo_v2*",), (r"\.self_attn\.qkv_proj\.",),
    ),
)  # fmt: skip
