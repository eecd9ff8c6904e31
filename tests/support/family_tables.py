"""What each family's checkpoints hold, by cases: tensors from transformers' own classes on the meta device, where it
has one, MTP tensors from the publisher's layout, elements of the published size by arithmetic from its config.

A family is a few lines of ``CASES`` and one of ``ELEMENTS``; its configs are those of ``mappings/configs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtpconvert.mapping.catalogue import sample_configs
from mtpconvert.mapping.dialect import DialectName
from tests.support.tiny import _values, write_safetensors
from tests.support.tiny_families import Shape

Config = dict[str, Any]
Shapes = dict[str, Shape]
FLOAT32 = ("e_score_correction_bias", "expert_bias")  # of routers, whatever the other tensors are


def transformers_shapes(config: Config) -> Shapes:
    """Names and shapes that ``save_pretrained`` would write for a new model of this config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from mtpconvert.evidence.transformers_model import quiet_transformers

    with quiet_transformers(), torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(**config))
        tensors = revert_weight_conversion(model, dict(model.state_dict()))
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in tied}


def appended(extras: Callable[[Config], Shapes]) -> Callable[[Config, Shapes, int], Shapes]:
    """MTP layer ``depth`` as layer L + depth: what the last trunk layer has, and ``extras``."""

    def shapes(config: Config, trunk: Shapes, depth: int) -> Shapes:
        last, new = (f"model.layers.{config['num_hidden_layers'] - 1 + more}." for more in (0, 1 + depth))
        layer = {name.removeprefix(last): shape for name, shape in trunk.items() if name.startswith(last)}
        return {new + name: shape for name, shape in (layer | extras(config)).items()}

    return shapes


def deepseek_extras(config: Config) -> Shapes:
    """deepseek-ai/DeepSeek-V3 README_WEIGHTS.md; GLM took it over, zai-org/GLM-4.5's index."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "shared_head.head.weight": (vocab, hidden),
    }


def ling_extras(config: Config) -> Shapes:
    """inclusionAI/Ring-V2 tools/convert_dcp_to_safetensors.py; vLLM's hy_v3_mtp.py for HY-V3."""
    hidden = config["hidden_size"]
    norms: Shapes = dict.fromkeys(("enorm.weight", "hnorm.weight", "final_layernorm.weight"), (hidden,))
    return norms | {"eh_proj.weight": (hidden, 2 * hidden)}


def ling_trunk(config: Config) -> Shapes:
    """inclusionAI modeling_bailing_moe_v2.py; no class of transformers has these names. Its config is Qwen3-MoE's here,
    for q, k, v and o, the norms and the experts."""
    like = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rope_scaling": None}
    dense = list(range(config["first_k_dense_replace"]))
    renamed = {
        "model.embed_tokens.": "model.word_embeddings.", "self_attn.o_proj.": "attention.dense.",
        "self_attn.q_norm.": "attention.query_layernorm.", "self_attn.k_norm.": "attention.key_layernorm.",
    }  # fmt: skip
    shapes: Shapes = {}
    for name, shape in transformers_shapes(config | like | {"mlp_only_layers": dense}).items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if "self_attn.q_proj" in name:
            heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
            name, shape = (
                name.replace("self_attn.q_proj", "attention.query_key_value"),
                (heads * config["head_dim"], shape[1]),
            )
        if "self_attn." in name:  # k and v are part of it
            continue
        shapes[name] = shape
        if name.endswith("mlp.gate.weight"):
            shapes[name.replace("gate.weight", "gate.expert_bias")] = shape[:1]
            inner, hidden = config["num_shared_experts"] * config["moe_intermediate_size"], shape[1]
            for part, of in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                shapes[name.replace("gate.weight", f"shared_experts.{part}_proj.weight")] = of
    return shapes


def mimo_trunk(config: Config) -> Shapes:
    """XiaomiMiMo modeling_mimo.py: MiMoModel is a Qwen2Model."""
    return transformers_shapes(config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})


def mimo_mtp(config: Config, trunk: Shapes, depth: int) -> Shapes:
    """XiaomiMiMo modeling_mimo.py:MiMoMTPLayers: Qwen2's attention and MLP, and norms and a projection of its own."""
    layer = {name.removeprefix("model.layers.0."): shape for name, shape in trunk.items() if ".layers.0." in name}
    hidden = config["hidden_size"]
    norms = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    layer |= dict.fromkeys(norms, (hidden,)) | {"input_proj.weight": (hidden, 2 * hidden)}
    return {f"model.mtp_layers.{depth}.{name}": shape for name, shape in layer.items()}


def sparse_mtp(config: Config, trunk: Shapes, depth: int) -> Shapes:
    """An MTP layer has experts and an indexer of its own, whatever the last trunk layer has; GLM-5 repeats nothing
    (791 tensors in layer 78 of GLM-5.2, antirez/ds4 issue 458)."""
    kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
    like = max(layer for layer, kind in enumerate(kinds) if kind == "full")
    assert like >= config["first_k_dense_replace"]
    extras = deepseek_extras(config)
    if config["model_type"] == "glm_moe_dsa":
        extras = {name: shape for name, shape in extras.items() if "embed" not in name and ".head." not in name}
    layer = {
        n.removeprefix(f"model.layers.{like}."): s for n, s in trunk.items() if n.startswith(f"model.layers.{like}.")
    }
    new = f"model.layers.{config['num_hidden_layers'] + depth}."
    return {new + name: shape for name, shape in (layer | extras).items()}


def qwen_mtp(config: Config, trunk: Shapes, depth: int) -> Shapes:
    """vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py: a layer that attends, under ``mtp.`` whatever stands before the
    trunk's, with one projection and three norms."""
    text = config.get("text_config", config)
    root = "model.language_model." if "text_config" in config else "model."
    hidden, last = text["hidden_size"], f"{root}layers.{text['num_hidden_layers'] - 1}."
    layer = {f"mtp.layers.{depth}." + n.removeprefix(last): s for n, s in trunk.items() if n.startswith(last)}
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    return layer | dict.fromkeys(norms, (hidden,)) | {"mtp.fc.weight": (hidden, 2 * hidden)}


def exaone_mtp(config: Config, trunk: Shapes, depth: int) -> Shapes:
    """vLLM's exaone_moe_mtp.py: as Qwen's, but its layer is a dense one, as the trunk's first."""
    hidden, first = config["hidden_size"], "model.layers.0."
    layer = {f"mtp.layers.{depth}." + n.removeprefix(first): s for n, s in trunk.items() if n.startswith(first)}
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    return layer | dict.fromkeys(norms, (hidden,)) | {"mtp.fc.weight": (hidden, 2 * hidden)}


def beside_vision(config: Config, saved: bool = True) -> Shapes:
    """What ``save_pretrained`` writes for a model of text and images; not ``saved``: the names of its modules."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    from mtpconvert.evidence.transformers_model import quiet_transformers

    with quiet_transformers(), torch.device("meta"):
        auto: Any = AutoModelForImageTextToText
        model = auto.from_config(AutoConfig.for_model(**config))
        tensors = dict(model.state_dict())
        tensors = revert_weight_conversion(model, tensors) if saved else tensors
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def fused_experts(shapes: Shapes) -> Shapes:
    """The published form of Qwen3.5-MoE's trunk and Qwen3.6-MoE's MTP: all experts in one tensor, gate above up
    (modeling_qwen3_5_moe.py:Qwen3_5MoeExperts)."""
    fused: Shapes = {}
    experts = sum(name.endswith(".down_proj.weight") and ".0.mlp.experts." in name for name in shapes)
    for name, shape in shapes.items():
        stem, _, rest = name.partition(".mlp.experts.")
        number, _, part = rest.partition(".")
        if not rest or part == "up_proj.weight":
            if not rest:
                fused[name] = shape
        elif number == "0" and part == "gate_proj.weight":
            fused[f"{stem}.mlp.experts.gate_up_proj"] = (experts, 2 * shape[0], shape[1])
        elif number == "0":
            fused[f"{stem}.mlp.experts.down_proj"] = (experts, *shape)
    return fused


@dataclass(frozen=True)
class Case:
    """``changes`` of the tiny config. ``trunk``: names and shapes; ``mtp``: of MTP layer ``depth``, given them.

    ``unsupported``: versions of megatron-core that cannot hold it, ``not_run``: whose forward of its MTP fails.
    ``specs``: layer specs that it has. ``dialect``: in whose Megatron names it is written.
    """

    architecture: str
    changes: Config = field(default_factory=dict)
    trunk: Callable[[Config], Shapes] = transformers_shapes
    mtp: Callable[[Config, Shapes, int], Shapes] | None = None
    depths: int = 0
    unsupported: tuple[str, ...] = ()
    specs: tuple[str, ...] = ("te", "local")
    not_run: tuple[str, ...] = ()
    dialect: DialectName = "stock"

    def config(self) -> Config:
        config = sample_configs(self.architecture)["tiny"] | self.changes
        return {key: value for key, value in config.items() if value is not ...}

    def shapes(self) -> Shapes:
        """Every tensor of the checkpoint, MTP's last."""
        config = self.config()
        trunk = self.trunk(config)
        shapes = dict(trunk)
        for depth in range(self.depths):
            assert self.mtp is not None
            shapes |= self.mtp(config, trunk, depth)
        return shapes


CASES: dict[str, Case] = {
    "Qwen3-MoE": Case("Qwen3MoeForCausalLM"),
    "Qwen3-MoE, every layer": Case("Qwen3MoeForCausalLM", {"mlp_only_layers": [], "norm_topk_prob": False}),
    "Qwen3-MoE, every second layer": Case("Qwen3MoeForCausalLM", {"mlp_only_layers": None, "decoder_sparse_step": 2}),
    "Qwen2-MoE": Case("Qwen2MoeForCausalLM"),
    "Qwen2-MoE, every layer": Case("Qwen2MoeForCausalLM", {"mlp_only_layers": [], "tie_word_embeddings": True}),
    "Qwen2-MoE, every third layer": Case(
        "Qwen2MoeForCausalLM", {"mlp_only_layers": [], "decoder_sparse_step": 3, "norm_topk_prob": True}
    ),
    "Mixtral": Case("MixtralForCausalLM"),
    "DeepSeek-V2": Case("DeepseekV2ForCausalLM"),
    "DeepSeek-V2, groups": Case(
        "DeepseekV2ForCausalLM",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "DeepSeek-V2-Lite": Case("DeepseekV2ForCausalLM", {"q_lora_rank": None}, unsupported=("0.19",)),
    "Kimi-K2": Case("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 0, "n_group": 1}),
    "Moonlight": Case(
        "DeepseekV3ForCausalLM",
        {"num_nextn_predict_layers": 0, "n_group": 1, "q_lora_rank": None},
        unsupported=("0.19",),
    ),
    "GLM-4.7-Flash": Case("Glm4MoeLiteForCausalLM", mtp=appended(deepseek_extras), depths=1),
    "GLM-4.7-Flash, layers by type": Case(
        "Glm4MoeLiteForCausalLM",
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        mtp=appended(deepseek_extras),
        depths=1,
    ),
    "DeepSeek-V3.2": Case("DeepseekV32ForCausalLM", mtp=sparse_mtp, depths=1, unsupported=("0.16",), specs=("te",)),
    "GLM-5": Case(
        "GlmMoeDsaForCausalLM",
        {"indexer_types": ..., "index_topk_freq": ..., "index_skip_topk_offset": ...},
        mtp=sparse_mtp,
        depths=1,
        unsupported=("0.16",),
        specs=("te",),
    ),
    "GLM-5.2": Case("GlmMoeDsaForCausalLM", mtp=sparse_mtp, depths=1, unsupported=("0.16",), specs=("te",)),
    "Qwen3-Next": Case("Qwen3NextForCausalLM", mtp=qwen_mtp, depths=1, specs=("te",)),
    "Qwen3-Next, no count": Case(
        "Qwen3NextForCausalLM",
        {"num_nextn_predict_layers": ..., "layer_types": ..., "mlp_only_layers": [1]},
        mtp=qwen_mtp,
        depths=1,
        specs=("te",),
    ),
    "Qwen3.5": Case("Qwen3_5ForCausalLM", mtp=qwen_mtp, depths=1, specs=("te",)),
    "Qwen3.5 with vision": Case(
        "Qwen3_5ForConditionalGeneration", trunk=beside_vision, mtp=qwen_mtp, depths=1, specs=("te",)
    ),
    "Qwen3.5-MoE": Case("Qwen3_5MoeForCausalLM", mtp=qwen_mtp, depths=1, specs=("te",)),
    "Qwen3.5-MoE as published": Case(
        "Qwen3_5MoeForConditionalGeneration",
        trunk=lambda config: fused_experts(beside_vision(config)),
        mtp=lambda config, trunk, depth: qwen_mtp(config, beside_vision(config), depth),
        depths=1,
        specs=("te",),
    ),
    "Qwen3.6-MoE as published": Case(
        "Qwen3_5MoeForConditionalGeneration",
        trunk=lambda config: fused_experts(beside_vision(config)),
        mtp=qwen_mtp,
        depths=1,
        specs=("te",),
    ),
    "MiMo": Case("MiMoForCausalLM", trunk=mimo_trunk, mtp=mimo_mtp, depths=2),
    "Ling 2.0": Case("BailingMoeV2ForCausalLM", trunk=ling_trunk, mtp=appended(ling_extras), depths=1),
    "Ling 2.0 without MTP": Case(
        "BailingMoeV2ForCausalLM", {"num_nextn_predict_layers": 0, "tie_word_embeddings": True}, trunk=ling_trunk
    ),
    "HY-V3": Case("HYV3ForCausalLM", mtp=appended(ling_extras), depths=1),
    # 0.16.1 counts MTP layers on after the trunk and looks for their entry in the list made of no_rope_freq
    "K-EXAONE": Case("ExaoneMoeForCausalLM", mtp=exaone_mtp, depths=1, not_run=("0.16",)),
    "K-EXAONE without MTP": Case("ExaoneMoeForCausalLM", {"num_nextn_predict_layers": 0}),
    "Phi-3": Case("Phi3ForCausalLM"),
    "Phi-4-mini": Case(
        "Phi3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "gpt-oss": Case("GptOssForCausalLM"),
}


def write_case(name: str, out: Path, fill: str = "counter", **changes: Any) -> Path:
    """The case of ``CASES``, with ``changes`` of its config, in the new folder ``out``; see ``write_shapes``."""
    return write_shapes(replace(CASES[name], changes=CASES[name].changes | changes), out, fill)


def write_shapes(case: Case, out: Path, fill: str = "counter") -> Path:
    """One F32 file and config.json in the new folder ``out``. ``fill``: see ``tiny.write_tiny``."""
    shapes = case.shapes()
    dtypes = dict.fromkeys(shapes, "F32")
    values = _values(shapes, dtypes, fill, seed=0)
    out.mkdir(parents=True)
    write_safetensors(out / "model.safetensors", {n: (dtypes[n], shapes[n], values[n]) for n in shapes})
    (out / "config.json").write_text(json.dumps(case.config(), indent=2) + "\n", encoding="utf-8")
    return out


# ---- elements of the published sizes, MTP without its copies


def _gqa(c: Config, bias: bool = False, norms: bool = False) -> int:
    """q, k, v, o, and the layer's two norms."""
    heads, groups, hidden = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    head = c.get("head_dim") or hidden // heads
    rows = (heads + 2 * groups) * head
    return rows * hidden + hidden * heads * head + bias * rows + norms * 2 * head + 2 * hidden


def _mla(c: Config) -> int:
    """q (with or without its latent), kv, o, their norms, and the layer's two norms."""
    heads, hidden, q, kv = c["num_attention_heads"], c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    query = heads * (nope + rope) * hidden if q is None else q * hidden + q + heads * (nope + rope) * q
    return query + (kv + rope) * hidden + kv + heads * (nope + v) * kv + heads * v * hidden + 2 * hidden


def _ends(c: Config) -> int:
    """Embedding, head, final norm."""
    return (1 if c["tie_word_embeddings"] else 2) * c["vocab_size"] * c["hidden_size"] + c["hidden_size"]


def _qwen3_moe(c: Config) -> int:
    expert = 3 * c["moe_intermediate_size"] * c["hidden_size"]
    layer = _gqa(c, norms=True) + c["num_experts"] * (expert + c["hidden_size"])
    return _ends(c) + c["num_hidden_layers"] * layer


def _qwen2_moe(c: Config) -> int:
    hidden = c["hidden_size"]
    experts = c["num_experts"] * (3 * c["moe_intermediate_size"] * hidden + hidden)
    shared = 3 * c["shared_expert_intermediate_size"] * hidden + hidden
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c, bias=True) + experts + shared)


def _mixtral(c: Config) -> int:
    hidden = c["hidden_size"]
    experts = c["num_local_experts"] * (3 * c["intermediate_size"] * hidden + hidden)
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c) + experts)


def _deepseek(c: Config, bias: bool = True) -> int:
    hidden, expert = c["hidden_size"], 3 * c["moe_intermediate_size"] * c["hidden_size"]
    layers, dense, mtp = c["num_hidden_layers"], c["first_k_dense_replace"], c.get("num_nextn_predict_layers", 0)
    moe = c["n_routed_experts"] * (expert + hidden + bias) + c["n_shared_experts"] * expert
    trunk = layers * _mla(c) + dense * 3 * c["intermediate_size"] * hidden + (layers - dense) * moe
    return _ends(c) + trunk + mtp * (_mla(c) + moe + 2 * hidden * hidden + 3 * hidden)


def _sparse(c: Config) -> int:
    """DeepSeek's, and an indexer in each layer that has one: two projections, a norm with bias, one weight a head."""
    heads, dim, hidden = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    kinds = c.get("indexer_types") or ["full"] * c["num_hidden_layers"]
    indexer = heads * dim * c["q_lora_rank"] + dim * hidden + 2 * dim + heads * hidden
    return _deepseek(c) + (kinds.count("full") + c["num_nextn_predict_layers"]) * indexer


def _qwen_hybrid(c: Config) -> int:
    """Query and gate in one projection; a delta net has projections, a convolution, three vectors."""
    c = c.get("text_config", c)
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    heads, groups, head = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    attention = (3 * heads + 2 * groups) * head * hidden + 2 * head
    keys, values = (c[f"linear_num_{one}_heads"] * c[f"linear_{one}_head_dim"] for one in ("key", "value"))
    value_heads, taps = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    delta = (2 * keys + 3 * values + 2 * value_heads) * hidden + (2 * keys + values) * taps
    delta += 2 * value_heads + c["linear_value_head_dim"]
    if "num_experts" in c:
        experts = c["num_experts"] * (3 * c["moe_intermediate_size"] * hidden + hidden)
        rest = experts + 3 * c["shared_expert_intermediate_size"] * hidden + hidden + 2 * hidden
    else:
        rest = 3 * c["intermediate_size"] * hidden + 2 * hidden
    attending = layers // c["full_attention_interval"]
    trunk = layers * rest + attending * attention + (layers - attending) * delta
    return _ends(c) + trunk + attention + rest + 2 * hidden * hidden + 3 * hidden


def _mimo(c: Config) -> int:
    hidden = c["hidden_size"]
    layer = _gqa(c, bias=True) + 3 * c["intermediate_size"] * hidden
    mtp = layer + 2 * hidden * hidden + 3 * hidden
    return _ends(c) + c["num_hidden_layers"] * layer + c["num_nextn_predict_layers"] * mtp


def _ling(c: Config) -> int:
    """q and k norms, one shared expert of the routed ones' size."""
    hidden, expert = c["hidden_size"], 3 * c["moe_intermediate_size"] * c["hidden_size"]
    layers, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
    moe = c["num_experts"] * (expert + hidden + 1) + c["num_shared_experts"] * expert
    attention = _gqa(c, norms=True)
    trunk = layers * attention + dense * 3 * c["intermediate_size"] * hidden + (layers - dense) * moe
    return _ends(c) + trunk + c["num_nextn_predict_layers"] * (attention + moe + 2 * hidden * hidden + 3 * hidden)


def _exaone(c: Config) -> int:
    """The MTP layer is dense."""
    hidden = c["hidden_size"]
    dense = _gqa(c, norms=True) + 3 * c["intermediate_size"] * hidden
    mtp = dense + 2 * hidden * hidden + 3 * hidden
    return _ling(c | {"num_nextn_predict_layers": 0}) + c["num_nextn_predict_layers"] * mtp


def _phi(c: Config) -> int:
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c) + 3 * c["intermediate_size"] * c["hidden_size"])


def _gpt_oss(c: Config) -> int:
    """Biases of q, k, v, o, of the router and of every expert; a sink for each head."""
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    expert = 3 * ffn * hidden + 2 * ffn + hidden
    moe = c["num_local_experts"] * (expert + hidden + 1)
    return _ends(c) + c["num_hidden_layers"] * (_gqa(c, bias=True) + hidden + c["num_attention_heads"] + moe)


# architecture -> elements from the full config; in billions, as model cards give it, MTP included and its copies not
ELEMENTS: dict[str, tuple[Callable[[Config], int], float]] = {
    "Qwen3MoeForCausalLM": (_qwen3_moe, 30.5),
    "Qwen2MoeForCausalLM": (_qwen2_moe, 57.4),
    "MixtralForCausalLM": (_mixtral, 46.7),
    "DeepseekV2ForCausalLM": (lambda c: _deepseek(c, bias=False), 15.7),
    "Glm4MoeLiteForCausalLM": (_deepseek, 30.6),
    "DeepseekV32ForCausalLM": (_sparse, 683.5),
    "GlmMoeDsaForCausalLM": (_sparse, 753.3),
    "Qwen3NextForCausalLM": (_qwen_hybrid, 81.3),
    "Qwen3_5ForCausalLM": (_qwen_hybrid, 9.2),
    "Qwen3_5ForConditionalGeneration": (_qwen_hybrid, 9.2),
    "Qwen3_5MoeForCausalLM": (_qwen_hybrid, 35.5),
    "Qwen3_5MoeForConditionalGeneration": (_qwen_hybrid, 35.5),
    "MiMoForCausalLM": (_mimo, 7.8),
    "BailingMoeV2ForCausalLM": (_ling, 16.3),
    "HYV3ForCausalLM": (_ling, 298.8),
    "ExaoneMoeForCausalLM": (_exaone, 237.1),
    "Phi3ForCausalLM": (_phi, 14.7),
    "GptOssForCausalLM": (_gpt_oss, 20.9),
}
