"""The real megatron-core GPTModel from Megatron arguments alone, local spec, and its real load.

Follows Megatron-LM: ``megatron/training/argument_utils.py:core_transformer_config_from_args``,
``megatron/training/models/gpt.py:GPTModelBuilder`` (0.19.2; ``gpt_builders.py`` of 0.16's repository) and
``megatron/training/checkpointing.py``. Works unchanged with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError, some
from mtpconvert.evidence.megatron_cpu import cpu_patches, model_parallel, patches, quietly
from mtpconvert.stores.torch_dist.dialects import canonical_names

CPU_SETTINGS = {
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "deallocate_pipeline_outputs": True,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


# None in these arguments says nothing; the config class has a default that is not None
UNSAID = (
    "rope_type", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
)  # fmt: skip


def as_mapping(args: Mapping[str, Any] | Namespace) -> dict[str, Any]:
    return dict(vars(args)) if isinstance(args, Namespace) else dict(args)


@quietly
def transformer_config(args: Mapping[str, Any] | Namespace, *, spec: str, dtype: Any, **sizes: int) -> Any:
    """``TransformerConfig`` (for MLA ``MLATransformerConfig``) of these arguments, with what a CPU needs switched.

    ``dtype``: the torch dtype of the parameters. KeyError names an argument without which there is no model.
    """
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    a = as_mapping(args)
    cls = MLATransformerConfig if a.get("multi_latent_attention") else TransformerConfig
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in a.items() if name in fields}
    # where the field has another name than the argument, or one that is derived
    values["layernorm_epsilon"] = a["norm_epsilon"] if "norm_epsilon" in a else a["layernorm_epsilon"]
    values["num_moe_experts"] = a.get("num_experts")
    values["layernorm_zero_centered_gamma"] = a.get("apply_layernorm_1p", False)
    values["num_query_groups"] = a.get("num_query_groups") if a.get("group_query_attention") else None
    values["params_dtype"] = values["pipeline_dtype"] = dtype
    values["bf16"] = dtype == torch.bfloat16
    if a.get("swiglu"):
        values |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    elif a.get("quick_geglu"):
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    for name in UNSAID:
        if a.get(name) is None:
            values.pop(name, None)
    if isinstance(a.get("window_size"), list):
        values["window_size"] = tuple(a["window_size"])
    if a.get("num_experts") is None:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    values |= {name: value for name, value in CPU_SETTINGS.items() if name in fields} | sizes
    values["transformer_impl"] = "transformer_engine" if spec == "te" else "local"
    values["moe_grouped_gemm"] = spec == "te" and a.get("num_experts") is not None  # needs Transformer Engine
    if sizes.get("expert_model_parallel_size", 1) > 1:
        values["moe_token_dispatcher_type"] = "alltoall"
    config = cls(**values)
    if a.get("position_embedding_type") == "yarn" and not a.get("multi_latent_attention"):
        # argument_utils.py:_apply_yarn_config_from_args, with its defaults
        fields_of = {
            "yarn_rotary_scaling_factor": ("rotary_scaling_factor", 1.0),
            "yarn_original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
            "yarn_beta_fast": ("yarn_beta_fast", 32.0),
            "yarn_beta_slow": ("yarn_beta_slow", 1.0),
            "yarn_mscale": ("mscale", 1.0),
            "yarn_mscale_all_dim": ("mscale_all_dim", 0.0),
            "yarn_correction_range_round_to_int": ("yarn_correction_range_round_to_int", True),
        }
        for field, (argument, default) in fields_of.items():
            setattr(config, field, default if a.get(argument) is None else a[argument])
    return config


def _layer_specs(config: Any, te: bool, mtp_like: int) -> tuple[Any, Any]:
    """The decoder's spec and the MTP block's, as ``GPTModelBuilder.build_model`` chooses them."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if getattr(config, "experimental_attention_variant", None) is not None:
        # GPTModelBuilder takes this block for the decoder, no MTP; an MTP layer is as its last layer
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        decoder = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
        mtp = (
            specs.get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=te) if config.mtp_num_layers else None
        )
        return decoder, mtp
    common = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if config.num_moe_experts is not None:
        decoder = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
        )
    elif te:
        decoder = specs.get_gpt_layer_with_transformer_engine_spec(**common, qk_l2_norm=config.qk_l2_norm)
    else:
        decoder = specs.get_gpt_layer_local_spec(**common, normalization=config.normalization)
    if not config.mtp_num_layers:
        return decoder, None
    layers = specs.get_gpt_decoder_layer_specs(
        config, use_transformer_engine=te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    return decoder, specs.get_gpt_mtp_block_spec(config, layers[mtp_like], use_transformer_engine=te)


@quietly
def model_from_args(
    args: Mapping[str, Any] | Namespace,
    *,
    spec: str = "local",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vocab_rows: int | None = None,
    dtype: Any = None,
    device: str = "cpu",
    mtp_like: int = -1,
) -> Any:
    """The real ``GPTModel`` of this rank, weights as megatron-core initialises them, in eval mode.

    ``spec``: ``"local"``, or ``"te"`` where there is a ``transformer_engine``. ``vocab_rows`` overrides
    ``padded_vocab_size``. ``dtype``: None is float32. ``mtp_like``: as ``convert.arguments.mtp_spec_layer`` says.
    """
    import torch

    (cpu_patches if device == "cpu" else patches)()
    if spec not in ("local", "te") or (spec == "te" and find_spec("transformer_engine") is None):
        raise ValueError(f"spec {spec!r}: 'te' needs transformer_engine before megatron.core is imported")
    dtype = torch.float32 if dtype is None else dtype
    model_parallel(tp, pp, ep)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    a = as_mapping(args)
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }
    config = transformer_config(a, spec=spec, dtype=dtype, **sizes)
    decoder, mtp = _layer_specs(config, spec == "te", mtp_like)
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder,
        mtp_block_spec=mtp,
        vocab_size=vocab_rows or a["padded_vocab_size"],
        max_sequence_length=a["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not a["untie_embeddings_and_output_weights"],
        position_embedding_type=a["position_embedding_type"],
        rotary_percent=a["rotary_percent"],
        rotary_base=a["rotary_base"],
        rope_scaling=a["use_rope_scaling"],
        rope_scaling_factor=a.get("rope_scaling_factor") or 8.0,
        seq_len_interpolation_factor=a.get("rotary_seq_len_interpolation_factor"),
    )
    if dtype == torch.bfloat16:  # what Megatron-LM's Float16Module does to it
        model.bfloat16()
    return model.to(device).eval()


def content_metadata(content: dict[str, Any]) -> dict[str, Any]:
    """``megatron/training/checkpointing.py``: the saved content metadata plus the group that cannot be saved."""
    from megatron.core import parallel_state

    return content | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def stored_tensors(model: Any) -> dict[str, Any]:
    """Every parameter and persistent buffer, by its in-memory name; extra state is neither."""
    state = model.state_dict()
    return {name: state[name] for name in state if not name.endswith("_extra_state")}


def fill_nan(model: Any) -> None:
    """Set every parameter and persistent floating-point buffer to NaN (extra state is neither)."""
    import torch

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name in stored_tensors(model):
            if name in tensors:
                tensors[name].fill_(float("nan"))


def still_nan(model: Any) -> list[str]:
    return [name for name, value in stored_tensors(model).items() if bool(value.isnan().any())]


@quietly
def load_into(model: Any, iteration_dir: Path, keys: Mapping[str, str] | None = None) -> list[str]:
    """The real ``dist_checkpointing.load`` at its default strictness, then a strict ``load_state_dict``.

    All weights are NaN before. ``keys``: ask for these keys under other names (``te_keys``). Returns the in-memory
    names of tensors that still hold a NaN afterwards. What megatron-core raises is not caught.
    """
    from megatron.core import dist_checkpointing

    fill_nan(model)
    state = {"model": _sharded_state(model, iteration_dir)}
    for entry in _entries(state):
        entry.key = (keys or {}).get(entry.key, entry.key)
    loaded = dist_checkpointing.load(state, str(iteration_dir))
    model.load_state_dict(loaded["model"], strict=True)
    return still_nan(model)


def _sharded_state(model: Any, iteration_dir: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(str(iteration_dir))
    if content is None:
        raise CheckpointError(
            f"{iteration_dir.name} carries no content_metadata, which says how its tensors are laid out",
            where=str(iteration_dir),
            next_step="save it with megatron-core 0.15 or newer",
        )
    return dict(model.sharded_state_dict(metadata=content_metadata(content)))


@quietly
def te_keys(model: Any, iteration_dir: Path) -> dict[str, str]:
    """Keys that this local-spec model asks for, the checkpoint lacks, and has as a Transformer Engine model names them.

    Raises CheckpointError, naming them, for keys that it has under neither name.
    """
    from megatron.core import dist_checkpointing

    stored = set(dist_checkpointing.load_tensors_metadata(str(iteration_dir)))
    asked = {entry.key for entry in _entries(_sharded_state(model, iteration_dir)) if not _is_object(entry)}
    # a key without a layer number stands for all layers; the rules want one
    numbered = {
        key: key if not _stacked(key) else key.replace("decoder.layers.", "decoder.layers.0.", 1) for key in asked
    }
    names = canonical_names(numbered.values())
    other = {}
    for key in asked - stored:
        name = names[numbered[key]]
        other[key] = name.replace("decoder.layers.0.", "decoder.layers.", 1) if _stacked(key) else name
    if absent := sorted(key for key, name in other.items() if name not in stored):
        raise CheckpointError(
            f"the model of the checkpoint's own args has {len(absent)} tensors that are not in it: {some(absent)}",
            where=str(iteration_dir),
            next_step="its args do not describe its tensors; run mtpconvert audit against what it was made from",
        )
    return other


def _stacked(key: str) -> bool:
    return key.startswith("decoder.layers.") and not key.removeprefix("decoder.layers.")[0].isdigit()


def _entries(node: Any) -> Iterator[Any]:
    """Every ShardedTensor, ShardedTensorFactory and ShardedObject of a sharded state dict."""
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _entries(child)
    elif hasattr(node, "key"):
        yield node


def _is_object(entry: Any) -> bool:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return isinstance(entry, ShardedObject)
