"""The real megatron-core GPTModel from Megatron arguments alone, its real load and its real save, on a CPU.

Follows Megatron-LM: ``megatron/training/argument_utils.py:core_transformer_config_from_args``,
``megatron/training/models/gpt.py:GPTModelBuilder`` (0.19.2; ``gpt_builders.py`` of 0.16's repository) and
``megatron/training/checkpointing.py``. Works unchanged with megatron-core 0.16.1 and 0.19.2.
"""

import dataclasses
import inspect
import multiprocessing
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support import te_standin
from tests.support.mcore_cpu import cpu_patches, model_parallel, quietly

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
def transformer_config(args: Mapping[str, Any] | Namespace, *, spec: str, dtype: torch.dtype, **sizes: int) -> Any:
    """``TransformerConfig`` (for MLA ``MLATransformerConfig``) of these arguments, with what a CPU needs switched."""
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


def _layer_specs(config: Any, te: bool) -> tuple[Any, Any]:
    """The decoder's spec and the MTP block's, as ``GPTModelBuilder.build_model`` chooses them."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

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
    return decoder, specs.get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=te)


@quietly
def model_from_args(
    args: Mapping[str, Any] | Namespace,
    *,
    spec: str = "local",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vocab_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The real ``GPTModel`` of this rank, weights as megatron-core initialises them, in eval mode.

    ``spec``: ``"local"``, or ``"te"`` where the stand-in is installed. ``vocab_rows`` overrides ``padded_vocab_size``.
    """
    cpu_patches()
    if spec not in ("local", "te") or (spec == "te" and not te_standin.installed()):
        raise ValueError(f"spec {spec!r}: 'te' needs te_standin.install() before megatron.core is imported")
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
    decoder, mtp = _layer_specs(config, spec == "te")
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
    return model.eval()


def _metadata(content: dict[str, Any]) -> dict[str, Any]:
    """``megatron/training/checkpointing.py``: the saved content metadata plus the group that cannot be saved."""
    from megatron.core import parallel_state

    return content | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, by its in-memory name; extra state is neither."""
    state = model.state_dict()
    return {name: state[name] for name in state if not name.endswith("_extra_state")}


@torch.no_grad()
def fill_nan(model: Any) -> None:
    """Set every parameter and persistent floating-point buffer to NaN (extra state is neither)."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in stored_tensors(model):
        if name in tensors:
            tensors[name].fill_(float("nan"))


@quietly
def load_into(model: Any, iteration_dir: Path) -> list[str]:
    """The real ``dist_checkpointing.load`` at its default strictness, then a strict ``load_state_dict``.

    All weights are NaN before. Returns the in-memory names of tensors that still hold a NaN afterwards.
    """
    from megatron.core import dist_checkpointing

    fill_nan(model)
    assert still_nan(model), "the NaN fill did not take"
    content = dist_checkpointing.load_content_metadata(str(iteration_dir))
    assert content is not None, f"{iteration_dir} carries no content_metadata"
    state = {"model": model.sharded_state_dict(metadata=_metadata(content))}
    loaded = dist_checkpointing.load(state, str(iteration_dir))
    model.load_state_dict(loaded["model"], strict=True)
    return still_nan(model)


def still_nan(model: Any) -> list[str]:
    return [name for name, value in stored_tensors(model).items() if bool(value.isnan().any())]


@quietly
def common_state(iteration_dir: Path) -> dict[str, Any]:
    """What ``common.pt`` (0.16) or ``common_state`` (0.19) holds: ``args``, ``iteration``, ..."""
    cpu_patches()
    model_parallel()
    from megatron.core import dist_checkpointing

    return dict(dist_checkpointing.load_common_state_dict(str(iteration_dir)))


def training_args(args: Mapping[str, Any] | Namespace, **extra: Any) -> Namespace:
    """``args`` as training carries them: with the enums, dtypes and run settings that a converter must read past."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    run = {
        "attention_backend": AttnBackend.auto,
        "ckpt_format": "torch_dist",
        "model_type": ModelType.encoder_or_decoder,
        "no_load_optim": None,
        "rank": 0,
        "seed": 1234,
        "world_size": torch.distributed.get_world_size(),
    }
    return Namespace(**(run | as_mapping(args) | extra))


@quietly
def save_from(
    model: Any,
    root: Path,
    *,
    args: Mapping[str, Any] | Namespace | None,
    iteration: int = 7,
    rng_state: bool = True,
    optimizer: bool = False,
) -> Path:
    """Save as Megatron-LM's ``save_checkpoint`` does: ``root/iter_{iteration:07d}`` and the tracker file.

    ``args=None`` leaves ``args`` out. ``optimizer`` adds Adam moments as the optimizer's sharded state has them.
    Returns the iteration's directory. Called by every rank of the run.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:  # megatron-core spawns this helper process, which imports torch again
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    target = root / f"iter_{iteration:07d}"
    rank = torch.distributed.get_rank()
    if rank == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    sizes = model.config
    state: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "model": model.sharded_state_dict(metadata=_metadata(content)),
    }
    if args is not None:
        state["args"] = training_args(
            args,
            params_dtype=sizes.params_dtype,
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
        )
    if rng_state:  # checkpointing.py:get_rng_state
        at = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
        shape = (sizes.pipeline_model_parallel_size, sizes.tensor_model_parallel_size)
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        payload = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}]
        state["rng_state"] = ShardedObject("rng_state", payload, shape, at, replica_id=replica)
    if optimizer:
        state["optimizer"] = _adam_moments(model, content)
    options: dict[str, Any] = {"content_metadata": content}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    dist_checkpointing.save(state, str(target), **options)
    if rank == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()
    return target


def _adam_moments(model: Any, content: dict[str, Any]) -> dict[str, Any]:
    """``optimizer.state.{exp_avg,exp_avg_sq,fp32_param}.<key>``: sharded like the parameters, fp32."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    moments: dict[str, Any] = {"param_groups": [{"lr": 1e-4, "step": 5}], "state": {}}
    sharded = model.sharded_state_dict(metadata=_metadata(content))
    for name, entry in sharded.items():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and name in dict(model.named_parameters()):
            moments["state"][name] = {
                kind: make_sharded_optimizer_tensor(entry, entry.data.detach().float(), f"optimizer.state.{kind}")
                for kind in ("exp_avg", "exp_avg_sq", "fp32_param")
            }
    return moments
