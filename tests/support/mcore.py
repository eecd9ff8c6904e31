"""The real megatron-core's common state and save, on a CPU; its model and its load are ``evidence/megatron_model.py``.

Follows Megatron-LM's ``megatron/training/checkpointing.py``. Works unchanged with megatron-core 0.16.1 and 0.19.2.
"""

import inspect
import multiprocessing
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtpconvert.evidence.megatron_cpu import cpu_patches, model_parallel, quietly
from mtpconvert.evidence.megatron_model import (
    as_mapping,
    content_metadata,
    fill_nan,
    load_into,
    model_from_args,
    still_nan,
    stored_tensors,
    transformer_config,
)

__all__ = [
    "as_mapping",
    "common_state",
    "content_metadata",
    "fill_nan",
    "load_into",
    "model_from_args",
    "save_from",
    "still_nan",
    "stored_tensors",
    "training_args",
    "transformer_config",
]


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
        "model": model.sharded_state_dict(metadata=content_metadata(content)),
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
    sharded = model.sharded_state_dict(metadata=content_metadata(content))
    for name, entry in sharded.items():
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and name in dict(model.named_parameters()):
            moments["state"][name] = {
                kind: make_sharded_optimizer_tensor(entry, entry.data.detach().float(), f"optimizer.state.{kind}")
                for kind in ("exp_avg", "exp_avg_sq", "fp32_param")
            }
    return moments
