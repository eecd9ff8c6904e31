"""How ``mcore2hf`` writes what the reference packs: packed again, or as bf16 with ``--dtype bfloat16``."""

from __future__ import annotations

from typing import Any

from mtpconvert.convert.configs import read_config
from mtpconvert.convert.packings import Packing, quantisation_paths
from mtpconvert.convert.reference import WANTED, Reference
from mtpconvert.errors import CheckpointError, NotRepresentableError, some
from mtpconvert.mapping.plan import Plan

_BFLOAT16 = "write bf16 with --dtype bfloat16"


def packing_to_write(
    plan: Plan, packing: Packing, config: dict[str, Any], reference: Reference, dtype: str
) -> tuple[Packing, dict[str, Any]]:
    """The packing to write in, and what changes in config.json. ``packing``: the reference's, of the plan's tensors.

    Raises CheckpointError where the reference no longer has its scales, NotRepresentableError for what cannot be
    packed again.
    """
    if other := [name for name in packing.tensors if plan.hf[name].dtype != "BF16"]:
        raise NotRepresentableError(
            f"the reference packs {some(other)}, which Megatron has as {plan.hf[other[0]].dtype}; only bf16 is packed,"
            " and no value is cast",
            where=str(reference.folder),
            next_step="save the Megatron checkpoint in bf16",
        )
    if dtype != "bfloat16":
        for name, packed in packing.tensors.items():
            if plan.hf[name].shape != packed.spec.shape:
                raise NotRepresentableError(
                    f"{name} is {list(plan.hf[name].shape)} in Megatron and {list(packed.spec.shape)} in the reference,"
                    " whose scales are for blocks of that",
                    where=str(reference.folder),
                    next_step=_BFLOAT16,
                )
    paths = quantisation_paths(config)
    if dtype == "bfloat16":
        if packing.tensors:
            text = f"{len(packing.tensors):,} tensors that the reference packs are written as bf16, without scales"
            plan.notes.append(text)
        return Packing(), dict.fromkeys(paths)
    if paths and reference.layout is None and not _packed_before(reference):
        raise CheckpointError(
            f"config.json has a {paths[0]}, and the reference has no weights that say which tensors it covers",
            where=str(reference.folder),
            next_step=f"pass --reference: {WANTED}; or {_BFLOAT16}",
        )
    if packing.tensors:
        _check_encodable(packing, reference)
    return packing, {}


def _packed_before(reference: Reference) -> bool:
    """Whether the checkpoint's own ``hf_assets``, whose names stand in, are packed too by their config."""
    return reference.own is not None and bool(quantisation_paths(read_config(reference.own.folder)))


def _check_encodable(packing: Packing, reference: Reference) -> None:
    if packing.kind != "fp8_block":
        raise NotRepresentableError(
            f"the reference packs {len(packing.tensors)} tensors as {packing.kind}, which nothing here writes",
            where=str(reference.folder),
            next_step=_BFLOAT16,
        )
    kept = {} if reference.scales is None else reference.scales.inventory()
    if lost := [one.scales.name for one in packing.tensors.values() if kept.get(one.scales.name) != one.scales]:
        raise CheckpointError(
            f"the reference lists {len(lost)} scales and no longer holds them: {some(lost)}",
            where=str(reference.folder),
            next_step=f"pass --reference with the original Hugging Face directory, or {_BFLOAT16}",
        )
