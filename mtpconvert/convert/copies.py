"""Tensors that repeat another one and have no place of their own in Megatron: equal bit for bit, or refused."""

from __future__ import annotations

from mtpconvert.convert.inspect_bytes import differing_elements
from mtpconvert.errors import NotRepresentableError
from mtpconvert.mapping.plan import Plan
from mtpconvert.stores.base import Reader
from mtpconvert.tensors import Copy


def compare_copies(plan: Plan, reader: Reader, *, use_trunk: bool = False) -> list[str]:
    """Compare every copy of an hf2mcore plan with its source; a sentence about each.

    ``use_trunk``: a copy that differs is left out all the same. Never so for tied embeddings, where the two are one
    parameter. Raises NotRepresentableError with the number of differing elements.
    """
    notes = []
    for copy in plan.copies:
        difference = _difference(copy, plan, reader)
        if difference is None:
            notes.append(f"{copy.tensor} is a bit-equal copy of {copy.source}: left out, restored on the way back")
        elif use_trunk and not copy.tie:
            notes.append(f"{copy.tensor} differs from {copy.source} ({difference}): the trunk's is used")
        else:
            raise NotRepresentableError(
                f"{copy.tensor} should be a copy of {copy.source} and differs: {difference};"
                " Megatron has nowhere to keep a second one",
                where=str(reader.root),
                next_step="set tie_word_embeddings to false in config.json if the two are meant to differ"
                if copy.tie
                else "if the trunk's values are wanted there: --mtp-copies use-trunk",
            )
    return notes


def _difference(copy: Copy, plan: Plan, reader: Reader) -> str | None:
    one, other = plan.hf[copy.tensor], plan.hf[copy.source]
    if one.dtype != other.dtype:
        return f"it is {one.dtype}, its source {other.dtype}"
    different = differing_elements(reader, copy.tensor, copy.source)
    return f"{different:,} of {one.numel:,} elements" if different else None
