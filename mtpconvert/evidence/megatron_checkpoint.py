"""A Megatron checkpoint in the real megatron-core: the model of its own args, filled by the real load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.convert.arguments import mtp_spec_layer
from mtpconvert.errors import CheckpointError, ConfigError, some
from mtpconvert.evidence.megatron_model import load_into, model_from_args, te_keys
from mtpconvert.mapping.mtp import present_in_mcore
from mtpconvert.stores.torch_dist.reader import TorchDistReader

# Change no number, and ask for what a CPU has not: a token dispatcher, Transformer Engine's kernels.
_SPEED = ("moe_shared_expert_overlap", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")


@dataclass(frozen=True)
class MegatronModel:
    """``how``: which path the weights took, for people. ``present``: MTP layers by the names of the tensors, whatever
    the args say."""

    model: Any
    args: dict[str, Any]
    how: str
    present: int

    @property
    def layers(self) -> int:
        """MTP layers that the model has, which its args say."""
        return self.model.config.mtp_num_layers or 0


def open_megatron(iteration_dir: Path, *, dtype: str, device: str = "cpu") -> MegatronModel:
    """Build the local-spec model of the args in ``iteration_dir`` and load it. ``dtype``: "float32" or "bfloat16".

    The args are read without unpickling; megatron-core's own load then unpickles ``common.pt`` and ``.metadata``.
    Raises ConfigError for args from which no model can be built, CheckpointError where the model cannot be filled.
    """
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    reader = TorchDistReader(iteration_dir)
    where = str(iteration_dir)
    args, names = _plain(reader, where), list(reader.inventory())
    present, mtp_like = len(present_in_mcore(names)), mtp_spec_layer(names)
    reader.close()
    try:
        model = model_from_args(args, dtype=getattr(torch, dtype), device=device, mtp_like=mtp_like)
    except (KeyError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"megatron-core builds no model from the checkpoint's args: {type(error).__name__}: {error}",
            where=where,
            next_step="correct the args; converting anew writes complete ones",
        ) from error
    keys = te_keys(model, iteration_dir)
    try:
        nan = load_into(model, iteration_dir, keys)
    except (CheckpointException, RuntimeError, ValueError) as error:  # the first is a BaseException
        raise CheckpointError(
            f"megatron-core cannot load the checkpoint into the model of its own args: {_last_line(error)}",
            where=where,
            next_step="its args and its tensors disagree; run mtpconvert audit against what it was made from",
        ) from error
    if nan:
        raise CheckpointError(
            f"megatron-core's load left {len(nan)} tensors unfilled or with NaN in them: {some(nan)}",
            where=where,
            next_step="run mtpconvert audit against what it was made from",
        )
    return MegatronModel(model, args, _how(keys, mtp_like), present)


def _plain(reader: TorchDistReader, where: str) -> dict[str, Any]:
    """The args that are numbers, strings, lists: enums and dtypes belong to the run that saved them."""
    if not reader.args:
        raise ConfigError(
            "the checkpoint carries no training arguments, and parity builds the model from nothing else",
            where=where,
            next_step="give a checkpoint that hf2mcore, or training in Megatron-LM or Megatron-Bridge, wrote",
        )
    plain = (bool, int, float, str, list, tuple, dict, type(None))
    return {name: value for name, value in reader.args.items() if type(value) in plain and name not in _SPEED}


def _how(keys: dict[str, str], mtp_like: int) -> str:
    how = "local layer spec, loaded by megatron-core's dist_checkpointing.load"
    if keys:
        how += f"; {len(keys)} norms asked for under their Transformer Engine names"
    if mtp_like >= 0:
        how += f"; MTP layers by the spec of decoder layer {mtp_like}, which Megatron's stock MTP block does not take"
    return how


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
