"""Fields of a Megatron-Bridge model as Megatron-LM's arguments, in whose names everything else here speaks.

A field that has no counterpart, or says less than the argument of its name, is left out: it stays unchecked.
Sources: Megatron-Bridge 0.7 models/gpt_provider.py, mla_provider.py, gpt/model_config.py, training/checkpointing.py;
megatron-core 0.19.2 training/argument_utils.py:core_transformer_config_from_args, which goes the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
# YaRN outside multi-latent attention has fields of its own, inside it those that the arguments are named after
_YARN = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
_YARN_ALONE = ("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow")
_LATENT_YARN = (*_YARN.values(), "rope_type", "original_max_position_embeddings", "beta_fast", "beta_slow")
# Stored as if it were not set: training/checkpointing.py undoes the interleaving before each save.
_UNDONE = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
# Classes whose attention is megatron-core's own; others choose windows for each layer by fields of theirs.
_STOCK = ("GPTModelProvider", "MLAModelProvider", "GPTModelConfig", "BridgeGPTModelConfig")
# They build a GPTModel, so what asks for another model class is off; nor can they have layers of other sizes.
_OTHER_MODELS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
_STOCK_SPECS = ("default_layer_spec", "transformer_engine_layer_spec", "local_layer_spec", "get_gpt_decoder_block_spec")
_ACTIVATIONS = {  # function -> the argument that it is, with a gate and without; None: no argument
    "silu": ("swiglu", None),
    "quick_gelu": ("quick_geglu", None),
    "squared_relu": (None, "squared_relu"),
    "fast_gelu": ("openai_gelu", "openai_gelu"),  # the tanh approximation
    "gelu": (None, None),
}
_ACTIVATION_FLAGS = ("swiglu", "quick_geglu", "squared_relu", "openai_gelu")


@dataclass(frozen=True, slots=True)
class BridgeArguments:
    """``values`` by argument; ``spelled``: the field that an argument comes from, where that has another name."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)


def bridge_arguments(model: Mapping[str, Any]) -> BridgeArguments:
    """``model``: the fields by name, as ``run_config.yaml`` has them."""
    fields = {name: value for name, value in model.items() if _is_plain(value) and not str(name).startswith("_")}
    latent = fields.get("multi_latent_attention") is True
    spelled = {argument: name for name, argument in _RENAMED.items() if name in fields}
    for name in [*_LATENT_YARN] if not latent else [*_YARN, *_YARN_ALONE]:
        fields.pop(name, None)
    if not latent:
        spelled |= {argument: name for name, argument in _YARN.items() if fields.get(name) is not None}
    values = {name: value for name, value in fields.items() if name not in (*_RENAMED, *_YARN, *_UNDONE)}
    values |= {argument: fields[name] for argument, name in spelled.items()}
    values |= {name: None for name in _UNDONE if name in fields and fields[name] is None}
    for name in _YARN_ALONE:
        if values.get(name, 0) is None:
            del values[name]
    if values.get("position_embedding_type") == "yarn" and not {"mscale", "mscale_all_dim"} <= values.keys():
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}  # _yarn_get_concentration_factor without one of the two
    if latent and values.get("rope_type") == "yarn":
        spelled["rope_type"] = "rope_type, rotary_scaling_factor"
        if values.get("rotary_scaling_factor") == 1:  # turns and scales nothing: yarn_rotary_pos_embedding.py
            values["rope_type"] = "rope"
    shared = fields.get("share_embeddings_and_output_weights")
    if isinstance(shared, bool):
        values["untie_embeddings_and_output_weights"] = not shared
        spelled["untie_embeddings_and_output_weights"] = "share_embeddings_and_output_weights"
    for flag, value in _activation(model, fields.get("gated_linear_unit")).items():
        values[flag], spelled[flag] = value, "activation_func, gated_linear_unit"
    _attention(values, model)
    _model_class(values, model)
    values |= _rows(fields)
    if "seq_length" in fields:  # gpt_provider.py:provide gives GPTModel this, Megatron-LM the other
        values["max_position_embeddings"] = fields["seq_length"]
    return BridgeArguments(values, spelled)


def _attention(values: dict[str, Any], model: Mapping[str, Any]) -> None:
    """Heads, rotary bases and groups of experts: what is said otherwise is said as the arguments do, or dropped."""
    values["group_query_attention"] = True  # TransformerConfig.num_query_groups is never a stale default
    if values.get("num_query_groups") is None or any(str(name).endswith("_num_query_groups") for name in model):
        values.pop("num_query_groups", None)  # by kind of layer: MiMo-V2-Flash
        del values["group_query_attention"]
    if not isinstance(values.get("rotary_base"), int | float):  # two of them, as Gemma 3 has: scaling is its own, too
        for name in ("rotary_base", "use_rope_scaling", "rotary_seq_len_interpolation_factor"):
            values.pop(name, None)
    groups = values.get("moe_router_num_groups")
    if groups is not None and groups == values.get("moe_router_group_topk"):  # every group is chosen
        values["moe_router_num_groups"] = values["moe_router_group_topk"] = None


def _model_class(values: dict[str, Any], model: Mapping[str, Any]) -> None:
    """What the provider's class says, and what it decides without saying."""
    stock = _name(model.get("_target_")) in _STOCK
    if stock:
        values |= dict.fromkeys(_OTHER_MODELS)
    if not stock or isinstance(values.get("window_size"), int):
        values.pop("window_size", None)
        values.pop("window_attn_skip_freq", None)
    spec = model.get("transformer_layer_spec", "")  # a model config leaves functions out
    named = isinstance(spec, Mapping) and _name(spec.get("_target_")) in _STOCK_SPECS
    if stock and (named or spec is None):
        values["spec"] = None


def _rows(fields: Mapping[str, Any]) -> dict[str, int]:
    """``padded_vocab_size``, where it can be worked out: models/gpt_provider.py:provide, utils/vocab_utils.py."""
    tokens, pads = fields.get("vocab_size"), fields.get("should_pad_vocab")
    if type(tokens) is not int or type(pads) is not bool:
        return {}
    factors = (fields.get("make_vocab_size_divisible_by"), fields.get("tensor_model_parallel_size")) if pads else ()
    whole = [factor for factor in factors if isinstance(factor, int) and factor > 0]
    return {"padded_vocab_size": tokens + -tokens % prod(whole)} if len(whole) == len(factors) else {}


def _activation(model: Mapping[str, Any], gated: Any) -> dict[str, bool]:
    """The flags that say the activation function; none where it is not known."""
    said = model.get("activation_func")
    tanh = isinstance(said, Mapping) and said.get("approximate") == "tanh"  # yaml_utils.py:_partial_representer
    name = "fast_gelu" if tanh else _name(said.get("_target_") if isinstance(said, Mapping) else said)
    if name not in _ACTIVATIONS or not isinstance(gated, bool):
        return {}
    flag = _ACTIVATIONS[name][0 if gated else 1]
    return {one: one == flag for one in _ACTIVATION_FLAGS}


def _name(target: Any) -> str:
    return str(target).rpartition(".")[2]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(item) in (int, float, bool, str) for item in value)
    return value is None or type(value) in (int, float, bool, str)
