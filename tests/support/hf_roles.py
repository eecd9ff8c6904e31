"""Tiny checkpoints whose names, shapes and meaning come from the real transformers, for the tests of the HF roles.

Tensors are random normal F32, norms and biases included, so that nothing is zero or one by accident. MTP layers bear
the names that DeepSeek publishes; the real ``MtpModel`` loads them (``mtp_model``), which proves the names.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.tensors import Box, Inventory, TensorSpec, inventory_of

Tensors = dict[str, torch.Tensor]

GQA = {
    "vocab_size": 23, "hidden_size": 24, "intermediate_size": 11, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 32,
}  # fmt: skip
MLA = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 11, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 3, "n_shared_experts": 2, "n_routed_experts": 4,
    "kv_lora_rank": 7, "q_lora_rank": 9, "qk_rope_head_dim": 4, "v_head_dim": 5, "qk_nope_head_dim": 6,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 32,
}  # fmt: skip
GLM = GQA | {
    "head_dim": 8, "moe_intermediate_size": 12, "n_shared_experts": 2, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip

HYBRID = {
    "vocab_size": 23, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 32,
}  # fmt: skip
HYBRID_MOE = HYBRID | {
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 9, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
DSA = {k: v for k, v in MLA.items() if k != "first_k_dense_replace"} | {
    "index_n_heads": 2, "index_head_dim": 7, "index_topk": 2, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
MIMO_V2 = GQA | {
    "head_dim": 8, "v_head_dim": 5, "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}  # fmt: skip
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
MOE = GQA | {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = GQA | {
    "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
GLM_LITE = MLA | {"mlp_layer_types": ["dense", "sparse"]}
DEEPSEEK_V2 = MLA | {"hidden_size": 18, "kv_lora_rank": 8, "topk_method": "greedy"}  # V2 wants even ones

# name -> (family's class prefix, arguments of its config class)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GQA),
    "llama, head_dim and every bias": ("Llama", GQA | {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", GQA | {"tie_word_embeddings": True}),
    "mistral": ("Mistral", GQA | {"head_dim": 10}),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", GQA | {"head_dim": 10}),
    "qwen3, tied, biased": ("Qwen3", GQA | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "deepseek": ("DeepseekV3", MLA | {"num_mtp_layers": 2}),
    "deepseek, plain queries, no MTP": ("DeepseekV3", MLA | {"q_lora_rank": None, "num_mtp_layers": 0}),
    "deepseek, one MTP layer": ("DeepseekV3", MLA | {"num_mtp_layers": 1}),
    "deepseek, rotary halves": ("DeepseekV3", MLA | {"rope_interleave": False, "num_mtp_layers": 1}),
    "deepseek, hidden state first": ("DeepseekV3", MLA | {"num_mtp_layers": 1, "mtp_hidden_states_first": True}),
    "deepseek, all dense": ("DeepseekV3", MLA | {"first_k_dense_replace": 2, "num_mtp_layers": 0}),
    "glm": ("Glm4Moe", GLM | {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 2}),
    "glm, biased, no norms": ("Glm4Moe", GLM | {"attention_bias": True, "num_mtp_layers": 1}),
    "glm, norms, no biases, no MTP": ("Glm4Moe", GLM | {"use_qk_norm": True, "num_mtp_layers": 0}),
    "glm, all dense": ("Glm4Moe", GLM | {"first_k_dense_replace": 2, "num_mtp_layers": 0}),
    "qwen3 moe": ("Qwen3Moe", MOE | {"head_dim": 10}),
    "qwen3 moe, first dense, biased": ("Qwen3Moe", MOE | {"mlp_only_layers": [0], "attention_bias": True}),
    "qwen3 moe, MTP": ("Qwen3Moe", MOE | {"num_nextn_predict_layers": 1}),
    "qwen3 moe, every other": ("Qwen3Moe", MOE | {"decoder_sparse_step": 2}),
    "qwen2 moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 9}),
    "qwen2 moe, no biases": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 9, "qkv_bias": False}),
    "mixtral": ("Mixtral", GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek v2 lite": ("DeepseekV2", DEEPSEEK_V2 | {"q_lora_rank": None}),
    "glm lite": ("Glm4MoeLite", GLM_LITE | {"num_nextn_predict_layers": 1}),
    "glm lite, rotary halves, sparse": (
        "Glm4MoeLite",
        GLM_LITE | {"rope_interleave": False, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "phi3": ("Phi3", GQA | {"pad_token_id": 0}),
    "gpt oss": ("GptOss", GPT_OSS),
    "gpt oss, no attention biases": ("GptOss", GPT_OSS | {"attention_bias": False}),
    "hy": ("HYV3", MOE | {"head_dim": 10, "num_shared_experts": 2, "num_nextn_predict_layers": 2}),
    "hy, biased": ("HYV3", MOE | {"head_dim": 8, "attention_bias": True}),
    "mellum": ("Mellum", MOE | {"head_dim": 8, "num_mtp_layers": 1, "mlp_layer_types": ["dense", "sparse"]} | MIXED),
    "exaone": (
        "ExaoneMoe",
        MOE | {"head_dim": 8, "num_shared_experts": 2, "num_nextn_predict_layers": 1, "sliding_window_pattern": 2},
    ),
    "qwen3 next": ("Qwen3Next", HYBRID_MOE | {"num_nextn_predict_layers": 1}),
    "qwen3 next, biased, a dense layer": (
        "Qwen3Next",
        HYBRID_MOE | {"mlp_only_layers": [0], "intermediate_size": 11, "attention_bias": True},
    ),
    "qwen3.5": ("Qwen3_5", HYBRID | {"intermediate_size": 11, "mtp_num_hidden_layers": 1}),
    "qwen3.5 moe": ("Qwen3_5Moe", HYBRID_MOE | {"mtp_num_hidden_layers": 1, "tie_word_embeddings": True}),
    "deepseek v3.2": ("DeepseekV32", DSA | {"num_nextn_predict_layers": 1}),
    "glm 5": ("GlmMoeDsa", DSA | {"num_nextn_predict_layers": 1}),
    "glm 5, shared indexers": ("GlmMoeDsa", DSA | {"indexer_types": ["full", "shared"], "num_nextn_predict_layers": 0}),
    "gemma 2": ("Gemma2", GQA | {"head_dim": 8}),
    "gemma 3": ("Gemma3", GQA | {"head_dim": 8}),
    "glm 4": ("Glm4", GQA | {"head_dim": 8, "pad_token_id": 0}),
    "olmo 2": ("Olmo2", GQA),
    "olmo 3": ("Olmo3", GQA | {"attention_bias": True}),
    "minimax": ("MiniMaxM2", GQA | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mimo v2": ("MiMoV2Flash", MIMO_V2),
    "mimo v2, biased": ("MiMoV2Flash", MIMO_V2 | {"attention_bias": True}),
    "glm, no head_dim": ("Glm4Moe", {k: v for k, v in GLM.items() if k != "head_dim"} | {"num_mtp_layers": 1}),
}

# class prefix -> prefixes of the MTP block and of its decoder layer; norms of embedding, hidden, output; projection
MTP_NAMES = {
    "DeepseekV3": ("model.layers.{n}.", "model.layers.{n}.", "enorm", "hnorm", "shared_head.norm", "eh_proj"),
    "HYV3": ("model.layers.{n}.", "model.layers.{n}.", "enorm", "hnorm", "final_layernorm", "eh_proj"),
    **dict.fromkeys(
        ("Qwen3Moe", "Mellum", "ExaoneMoe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
        ("mtp.", "mtp.layers.{i}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
    ),
}


def config_of(case: str) -> Any:
    family, arguments = CASES[case]
    text = "Text" if family.startswith(("Qwen3_5", "Gemma3")) else ""
    return getattr(transformers, f"{family}{text}Config")(**arguments)


@functools.cache
def saved(case: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors as the real ``save_pretrained`` names them, with the MTP layers that it declares."""
    config = config_of(case)
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, f"{CASES[case][0]}ForCausalLM")(config).save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        tensors = {k: torch.randn(v.shape) for k, v in load_file(Path(folder) / "model.safetensors").items()}
    layers = written.get("num_nextn_predict_layers", written.get("mtp_num_hidden_layers", 0))
    family = CASES[case][0]
    dense = 0 if family == "ExaoneMoe" else None  # vLLM builds its MTP layer so
    return written, tensors | mtp_tensors(tensors, written, layers, family=family, like=dense)


def mtp_tensors(
    trunk: Tensors, config: dict[str, Any], layers: int, copies: bool = True, family: str = "", like: int | None = None
) -> Tensors:  # fmt: skip
    """``layers`` MTP layers in the published names of ``family``, their decoder layer shaped as trunk layer ``like``.

    Without a layout of its own in ``MTP_NAMES`` a family gets DeepSeek's; ``like`` None: the last trunk layer.
    """
    made: Tensors = {}
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    block, layer, *norms, proj = MTP_NAMES.get(family, MTP_NAMES["DeepseekV3"])
    last = f"model.layers.{n - 1 if like is None else like}."
    for i in range(layers):
        prefix, inner = block.format(n=n + i, i=i), layer.format(n=n + i, i=i)
        made |= {inner + k.removeprefix(last): torch.randn(v.shape) for k, v in trunk.items() if k.startswith(last)}
        made |= {f"{prefix}{name}.weight": torch.randn(hidden) for name in norms}
        made[f"{prefix}{proj}.weight"] = torch.randn(hidden, 2 * hidden)
        if copies and family not in set(MTP_NAMES) - {"DeepseekV3"}:
            made[f"{prefix}embed_tokens.weight"] = trunk["model.embed_tokens.weight"].clone()
            made[f"{prefix}shared_head.head.weight"] = trunk["lm_head.weight"].clone()
    return made


def inventory(tensors: Tensors) -> Inventory:
    return inventory_of(TensorSpec(name, tuple(tensor.shape), "F32") for name, tensor in tensors.items())


def trunk_model(case: str, tensors: Tensors) -> Any:
    """The real model, loaded by transformers from ``tensors`` (the MTP layers left out, as it does itself)."""
    config = config_of(case)
    last = tuple(f"model.layers.{n}." for n in range(config.num_hidden_layers))
    trunk = {k: v for k, v in tensors.items() if not k.startswith(("model.layers.", "mtp.")) or k.startswith(last)}
    model = getattr(transformers, f"{CASES[case][0]}ForCausalLM")
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others want rounder sizes
    return model.from_pretrained(None, config=config, state_dict=trunk, **plain).eval()


def mtp_model(case: str, tensors: Tensors) -> tuple[Any, set[str]]:
    """The real ``MtpModel`` loaded from the MTP layers of ``tensors``, and the keys that it has no use for."""
    trunk = trunk_model(case, tensors)
    n = trunk.config.num_hidden_layers
    if not hasattr(trunk.config, "num_mtp_layers"):  # no fields of Qwen's config classes, and MtpModel asks for them
        trunk.config.num_mtp_layers, trunk.config.mtp_layer_types = 1, ["full_attention"]
    model = MtpModel(trunk, trunk.config.num_mtp_layers)
    own = ("mtp.", *(f"model.layers.{n + i}." for i in range(trunk.config.num_mtp_layers)))
    info, _ = convert_and_load_state_dict_in_model(
        model=model,
        state_dict={k: v for k, v in tensors.items() if k.startswith(own)},
        load_config=LoadStateDictConfig(weight_mapping=model.get_weight_conversions(trunk), dtype=torch.float32),
    )
    assert info.missing_keys == {"shared_head.weight", "embed_tokens.weight"}  # the main model's own, tied below
    model.tie_with_main_model(trunk)
    return model.eval(), info.unexpected_keys


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def held(tensors: Tensors, p: Placement) -> torch.Tensor:
    """The numbers that ``p`` places, as a view of their tensor in the shape of ``p.part``."""
    block = tensors[p.block.tensor].view(p.block.grid)[slices(p.block.box)]
    kept = block[tuple(slice(None) if extent != 1 else 0 for extent in block.shape)]
    ordered = kept if p.perm is None else kept.permute(p.perm)
    return ordered[tuple(slice(None) if stop - start != 1 else None for start, stop in p.part)]


def role_tensor(tensors: Tensors, placed: Iterable[Placement], place: str, role: str) -> torch.Tensor:
    """All of ``role``, put together from what holds it."""
    holders = [p for p in placed if (p.role.place, p.role.name) == (place, role) and not p.copy]
    assert holders, f"nothing holds {role} of {place or 'the model'}"
    made = torch.full(holders[0].role.shape, torch.nan)
    for p in holders:
        made[slices(p.part)] = held(tensors, p)
    return made


def edited(
    tensors: Tensors,
    placed: Iterable[Placement],
    place: str,
    role: str,
    where: Any,
    change: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> Tensors:
    """``tensors`` with ``change`` done to the numbers that hold ``role[where]``, as ``placed`` says."""
    holders = [p for p in placed if (p.role.place, p.role.name) == (place, role) and not p.copy]
    assert holders, f"nothing holds {role} of {place or 'the model'}"
    chosen = torch.zeros(holders[0].role.shape, dtype=torch.bool)
    chosen[where] = True
    made = dict(tensors)
    for name in {p.block.tensor for p in holders}:
        made[name] = tensors[name].clone()
    for p in holders:
        block, mask = held(made, p), chosen[slices(p.part)]
        block[mask] = change(block[mask])
    return made
