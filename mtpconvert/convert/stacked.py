"""Whether Megatron keeps the trunk layers of a model under one key each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mtpconvert.tensors import Shape


class Shaped(Protocol):
    """A tensor's spec, whether of a plan or of an expansion."""

    @property
    def shape(self) -> Shape: ...


def is_stacked(mcore: Mapping[str, Shaped]) -> bool:
    """Whether all trunk layers hold the same parameters, so that Megatron keeps them under one key.

    ``mcore``: Megatron names. megatron/core/transformer/transformer_block.py:TransformerBlock.sharded_state_dict.
    """
    layers: dict[str, set[tuple[str, Shape]]] = {}
    for name, spec in mcore.items():
        if name.startswith("decoder.layers."):
            number, _, parameter = name.removeprefix("decoder.layers.").partition(".")
            layers.setdefault(number, set()).add((parameter, spec.shape))
    return len(set(map(frozenset, layers.values()))) <= 1
