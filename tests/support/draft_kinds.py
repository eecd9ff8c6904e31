"""One checkpoint of headers for each kind of draft part that is published: config, tensors, and which belong to it.

Names and config keys: vLLM 0.33.0 ``model_executor/models/*``, SGLang 0.5.23, transformers 5.24, the drafts' own
repositories (SafeAILab/EAGLE, FasterDecoding/Medusa, facebook/multi-token-prediction). Sizes are scraps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
H, V = 8, 16


@dataclass(frozen=True)
class Checkpoint:
    """``parts``: tensors of the draft by part. ``declared``: what the config says of their number, under ``key``."""

    config: dict[str, Any]
    trunk: dict[str, Shape]
    parts: dict[int, dict[str, Shape]]
    kind: str
    one: str
    declared: int | None
    key: str | None
    reason: str  # a piece of the converter's refusal
    dtypes: dict[str, str] = field(default_factory=dict)
    draft_only: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.trunk | {name: shape for part in self.parts.values() for name, shape in part.items()}

    @property
    def draft_names(self) -> set[str]:
        return {name for part in self.parts.values() for name in part}


def vectors(prefix: str, *names: str) -> dict[str, Shape]:
    return {f"{prefix}{name}.weight": (H,) for name in names}


def matrices(prefix: str, *names: str, shape: Shape = (H, H)) -> dict[str, Shape]:
    return {f"{prefix}{name}.weight": shape for name in names}


def layer(prefix: str, *more: str) -> dict[str, Shape]:
    """A decoder layer under the names that Llama gave them, and further norms or matrices."""
    shapes = vectors(prefix, "input_layernorm", "post_attention_layernorm")
    shapes |= matrices(prefix, *(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up")))
    shapes |= matrices(prefix, "mlp.down_proj")
    for name in more:
        shapes |= vectors(prefix, name) if "norm" in name else matrices(prefix, name)
    return shapes


def trunk(root: str = "model.", layers: int = 2, *more: str, head: str = "lm_head.weight") -> dict[str, Shape]:
    shapes = {f"{root}embed_tokens.weight": (V, H), f"{root}norm.weight": (H,)}
    for number in range(layers):
        shapes |= layer(f"{root}layers.{number}.", *more)
    return shapes | {head: (V, H)}


def join(prefix: str, *norms: str) -> dict[str, Shape]:
    """enorm, hnorm, eh_proj and further norms."""
    return vectors(prefix, "enorm", "hnorm", *norms) | matrices(prefix, "eh_proj", shape=(H, 2 * H))


def base(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": H, "vocab_size": V,
        "num_hidden_layers": 2, "dtype": "bfloat16", "tie_word_embeddings": False,
    } | more  # fmt: skip


def nested(architecture: str, model_type: str, **text: Any) -> dict[str, Any]:
    inner = base(architecture, f"{model_type}_text", **text)
    del inner["architectures"]
    return {"architectures": [architecture], "model_type": model_type, "text_config": inner}


COUNT = "num_nextn_predict_layers"
_OWN_HEAD = {"transformer.shared_head.norm.weight": (H,), "transformer.shared_head.output.weight": (V, H)}


def _own_heads(root: str, count: int) -> dict[int, dict[str, Shape]]:
    parts: dict[int, dict[str, Shape]] = {}
    for k in range(count):
        prefix = f"{root}layers.{2 + k}."
        parts[k] = layer(prefix, "self_attn.g_proj") | join(prefix)
        parts[k] |= {prefix + name: shape for name, shape in _OWN_HEAD.items()}
    return parts


def _appended(root: str, *more: str) -> dict[int, dict[str, Shape]]:
    prefix = f"{root}layers.2."
    return {0: layer(prefix, *more) | join(prefix, "shared_head.norm")}


_HEADS = ("num_attention_heads", "num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads")
_DIMS = ("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "intermediate_size")
_MIMO_V2: dict[str, Any] = {
    "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "rms_norm_eps": 1e-6,
    **dict.fromkeys(_HEADS, 1), **dict.fromkeys(_DIMS, H),
}  # fmt: skip


def _mimo_v2(prefix: str) -> dict[str, Shape]:
    """XiaomiMiMo MiMo-V2-Flash: another name of the norm before the MLP, and a sink for each head."""
    shapes = layer(prefix) | join(prefix, "final_layernorm")
    renamed = {name.replace("post_attention_layernorm", "pre_mlp_layernorm"): shape for name, shape in shapes.items()}
    return renamed | {f"{prefix}self_attn.attention_sink_bias": (1,)}


def _eagle3() -> dict[str, Shape]:
    shapes = layer("midlayer.", "hidden_norm") | {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (6, H),
    }
    return shapes | {"d2t": (6,), "t2d": (V,)}


def _eagle() -> dict[str, Shape]:
    shapes = layer("layers.0.") | {"fc.weight": (H, 2 * H), "fc.bias": (H,), "embed_tokens.weight": (V, H)}
    del shapes["layers.0.input_layernorm.weight"]
    return shapes


def _medusa(head: int) -> dict[str, Shape]:
    return {f"{head}.0.linear.weight": (H, H), f"{head}.0.linear.bias": (H,), f"{head}.1.weight": (V, H)}


def _assistant() -> dict[int, dict[str, Shape]]:
    parts: dict[int, dict[str, Shape]] = {k: layer(f"model.layers.{k}.") for k in range(2)}
    for k, part in parts.items():
        for x in "kv":
            del part[f"model.layers.{k}.self_attn.{x}_proj.weight"]
    parts[0] |= {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "pre_projection.weight": (H, 4 * H)}
    parts[0] |= {"post_projection.weight": (2 * H, H), "masked_embedding.centroids.weight": (4, H)}
    parts[0] |= {"masked_embedding.token_ordering": (V,)}
    return parts


KINDS: dict[str, Checkpoint] = {
    "step 3.5": Checkpoint(
        base("Step3p5ForCausalLM", "step3p5", num_nextn_predict_layers=3), trunk(), _own_heads("model.", 3),
        "mtp-own-heads", "MTP layer", 3, COUNT, "nowhere to keep a trained head for each",
    ),
    "step 3.7": Checkpoint(
        nested("Step3p7ForConditionalGeneration", "step3p7", num_nextn_predict_layers=2),
        trunk("model.language_model."),
        _own_heads("model.language_model.", 2), "mtp-own-heads", "MTP layer", 2, f"text_config.{COUNT}",
        "nowhere to keep a trained head for each",
    ),
    "step 5": Checkpoint(
        base("Step5ForCausalLM", "step5", num_nextn_predict_layers=1), trunk(), _own_heads("model.", 1),
        "mtp-own-heads", "MTP layer", 1, COUNT, "nowhere to keep a trained head for each",
    ),
    "dots3 note": Checkpoint(
        base("Dots3NoteForCausalLM", "dots3_note_text", num_nextn_predict_layers=1), trunk(),
        {0: _appended("model.")[0] | {"model.mtp.embed_tokens.weight": (V, H)}},
        "mtp-own-embedding", "MTP layer", 1, COUNT, "nowhere to keep another",
    ),
    "longcat": Checkpoint(
        base("LongcatFlashForCausalLM", "longcat_flash", num_nextn_predict_layers=1), trunk(),
        {0: layer("model.mtp.layers.0.") | join("model.mtp.layers.0.") | {"model.mtp.embed_tokens.weight": (V, H),
            "model.mtp.norm.weight": (H,)}},
        "mtp-own-embedding", "MTP layer", 1, COUNT, "nowhere to keep another",
    ),
    "ernie 4.5": Checkpoint(
        base("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", num_nextn_predict_layers=1), trunk(),
        {0: layer("model.mtp_block.0.") | {"model.mtp_emb_norm.0.weight": (H,), "model.mtp_hidden_norm.0.weight": (H,),
            "model.mtp_linear_proj.0.weight": (H, 2 * H)}},
        "mtp-trunk-norm", "MTP layer", 1, COUNT, "no final norm of its own",
    ),
    "deepseek v4": Checkpoint(
        base("DeepseekV4ForCausalLM", "deepseek_v4", num_nextn_predict_layers=1),
        {"embed.weight": (V, H), "head.weight": (V, H), "norm.weight": (H,)}
        | {f"layers.{n}.{x}": (4, H) for n in range(2) for x in ("attn.wq_a.weight", "hc_attn_fn", "hc_ffn_base")},
        {0: vectors("mtp.0.", "enorm", "hnorm", "norm") | matrices("mtp.0.", "e_proj", "h_proj", "attn.wkv")
            | {"mtp.0.hc_head_fn": (4, H)}},
        "mtp-two-projections", "MTP layer", 1, COUNT, "no module for hyper-connections",
    ),
    "qwen4 exp": Checkpoint(
        nested("Qwen4ExpForConditionalGeneration", "qwen4_exp", mtp_num_hidden_layers=1),
        trunk("model.language_model.", 2, "attn_hyper_connection.input_mix_weight_down"),
        {0: layer("mtp.layers.0.") | matrices("mtp.", "fc_embedding", "fc_hidden")
            | vectors("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        "mtp-two-projections", "MTP layer", 1, "text_config.mtp_num_hidden_layers", "no module for hyper-connections",
    ),
    "inkling": Checkpoint(
        {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model",
            "text_config": {"model_type": "inkling_text", "num_hidden_layers": 2, "vocab_size": V},
            "mtp_config": {COUNT: 2}},
        trunk("model.llm."),
        {k: vectors(f"model.mtp.layers.{k}.", "hidden_norm", "embed_norm")
            | matrices(f"model.mtp.layers.{k}.", "input_proj", "transformer_block.attn.wq_du")
            | ({"model.mtp.chain_norm.weight": (H,)} if k == 0 else {}) for k in (0, 1)},
        "mtp", "MTP layer", 2, f"mtp_config.{COUNT}", "short convolutions",
    ),
    "glm 5 next": Checkpoint(
        nested("Glm5NextForConditionalGeneration", "glm5_next", num_nextn_predict_layers=1),
        trunk("model.language_model.", 2, "attn_hc.fn"), _appended("model.language_model."),
        "mtp", "MTP layer", 1, f"text_config.{COUNT}", "no module for hyper-connections",
    ),
    "hy v4": Checkpoint(
        base("HYV4ForCausalLM", "hy_v4", num_nextn_predict_layers=2), trunk("model.", 2, "attn_hc.fn"),
        {0: layer("model.mtp_layers.0.") | join("model.mtp_layers.0.", "final_layernorm")},
        "mtp", "MTP layer", 2, COUNT, "no module for hyper-connections",
    ),
    "kimi k3": Checkpoint(
        nested("KimiK3ForConditionalGeneration", "kimi_k3", num_nextn_predict_layers=1),
        trunk("language_model.model.", 2, "self_attn.q_conv1d", head="language_model.lm_head.weight"),
        _appended("language_model.model."),
        "mtp", "MTP layer", 1, f"text_config.{COUNT}", "KDA linear-attention",
    ),
    "nemotron 3": Checkpoint(
        base("NemotronHForCausalLM", "nemotron_h", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E"),
        {"backbone.embeddings.weight": (V, H), "lm_head.weight": (V, H)}
        | {f"backbone.layers.{n}.mixer.in_proj.weight": (H, H) for n in range(2)},
        {0: join("mtp.layers.0.", "norm") | matrices("mtp.layers.0.", "mixer.q_proj")
            | vectors("mtp.layers.1.", "norm", "final_layernorm") | matrices("mtp.layers.1.", "mixer.gate")},
        "mtp", "MTP layer", 1, COUNT, "hybrid Mamba models",
    ),
    "mimo v2": Checkpoint(
        base("MiMoV2ForCausalLM", "mimo_v2", **_MIMO_V2), trunk("model.", 2, "self_attn.qkv_proj"),
        {k: _mimo_v2(f"model.mtp.layers.{k}.") for k in range(3)},
        "mtp", "MTP layer", None, None, "value heads of another size",
    ),
    "minimax m3": Checkpoint(
        nested("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", num_mtp_modules=1),
        trunk("language_model.model.", 2, "self_attn.index_q_proj", head="language_model.lm_head.weight"),
        {0: layer("language_model.model.mtp.layers.0.transformer_layer.")
            | join("language_model.model.mtp.layers.0.", "final_layernorm")},
        "mtp", "MTP layer", 1, "text_config.num_mtp_modules", "sparse index",
    ),
    "dspark": Checkpoint(
        base("MistralLarge4ForCausalLM", "mistral_large4"), trunk(),
        {0: layer("mtp_dspark.layers.0.") | {"mtp_dspark.markov_head.weight": (V, H)}},
        "dspark", "DSpark stage", None, None, "Markov head",
    ),
    "eagle 1": Checkpoint(
        base("LlamaForCausalLM", "llama", num_hidden_layers=1), {}, {0: _eagle()},
        "eagle", "EAGLE layer", 1, "num_hidden_layers", "a separate model with its own projection", draft_only=True,
    ),
    "eagle 3": Checkpoint(
        base("LlamaForCausalLMEagle3", "llama", num_hidden_layers=1, draft_vocab_size=6), {}, {0: _eagle3()},
        "eagle3", "EAGLE-3 layer", 1, "num_hidden_layers", "three trunk states", {"d2t": "I64", "t2d": "BOOL"}, True,
    ),
    "medusa": Checkpoint(
        {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}, {},
        {k: _medusa(k) for k in range(3)},
        "medusa", "Medusa head", 3, "medusa_num_heads", "all read one trunk state", draft_only=True,
    ),
    "meta": Checkpoint(
        {"n_future_tokens": 4, "dim": H, "n_layers": 2, "vocab_size": V},
        {"tok_embeddings.weight": (V, H), "norm.weight": (H,), "output.weight": (V, H)}
        | {f"layers.{n}.attention.wq.weight": (H, H) for n in range(2)},
        {k: matrices(f"extra_heads.{k}.", "attention.wq", "feed_forward.w1") for k in range(3)},
        "parallel-heads", "parallel head", 3, "n_future_tokens", "all read one trunk state",
    ),
    "gemma 4 assistant": Checkpoint(
        {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "tie_word_embeddings": True,
            "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 2, "vocab_size": V, "hidden_size": H,
                "tie_word_embeddings": True}},
        {}, _assistant(), "assistant", "assistant layer", 2, "text_config.num_hidden_layers",
        "keys and values of its target", {"masked_embedding.token_ordering": "I64"}, True,
    ),
}  # fmt: skip
