"""Which bytes of a checkpoint one decoded token must read: dense parts, shared experts, k of E routed experts, head.

From names, shapes and the config alone; no torch, no weights. Hugging Face and canonical Megatron names alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.errors import ConfigError
from mtpconvert.mapping.mtp import looks_like_mtp
from mtpconvert.tensors import Inventory, TensorSpec

ACTIVE_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts", "moe_router_topk")
LAYER_KEYS = ("num_hidden_layers", "num_layers")
_EXPERT = re.compile(r"\.experts\.(?:experts\.)?(?:(\d+)\.)?")
_SHARED = re.compile(r"\.(shared_experts?|shared_mlp|share_expert)\.")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output_layer|shared_head\.head|shared_head\.output)\.weight$")


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one layer: how many there are, how many a token is sent to, bytes of each."""

    experts: int
    active: int
    nbytes: int

    def distinct(self, tokens: int) -> float:
        """Experts that at least one of ``tokens`` is sent to, when each token takes ``active`` of them evenly."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that a forward pass of one part of the model reads. ``dense``: attention, norms, routers, dense MLPs."""

    dense: int
    shared: int
    head: int
    embedding: int  # all rows
    embedding_row: int  # of one token
    layers: tuple[ExpertLayer, ...]

    @property
    def active_experts(self) -> int:
        """Of one token."""
        return sum(layer.active * layer.nbytes for layer in self.layers)

    def nbytes(self, tokens: int) -> float:
        """Bytes that a pass over ``tokens`` tokens reads, each weight once."""
        routed = sum(layer.distinct(tokens) * layer.nbytes for layer in self.layers)
        return self.dense + self.shared + self.head + routed + min(tokens * self.embedding_row, self.embedding)


def reads_of(config: Mapping[str, Any], inventory: Inventory) -> tuple[Reads, tuple[Reads, ...]]:
    """(trunk, each MTP layer). A draft reads the embedding's row and the whole head once more, whether or not the
    checkpoint repeats them in the MTP layer.

    Raises ConfigError where the config lacks the number of layers, or of active experts where there are experts.
    """
    layers = _integer(config, LAYER_KEYS, "the number of layers")
    mtp = {name: spec for name, spec in inventory.items() if looks_like_mtp(name, layers)}
    trunk = [spec for name, spec in inventory.items() if name not in mtp]
    embedding = next((spec for spec in trunk if _EMBEDDING.search(spec.name)), None)
    table = (0, 0) if embedding is None else (embedding.nbytes, embedding.nbytes // embedding.shape[0])
    head = sum(spec.nbytes for spec in trunk if _HEAD.search(spec.name)) or table[0]
    groups: dict[int, list[TensorSpec]] = {}
    every: list[TensorSpec] = []  # one set for all MTP layers, as Qwen's mtp.fc
    for name, spec in mtp.items():
        number = _LAYER.search(name)
        (groups.setdefault(int(number[1]), []) if number else every).append(spec)
    if every and not groups:
        groups[0] = []
    depths = tuple(_reads([*groups[number], *every], config, table, head) for number in sorted(groups))
    return _reads(trunk, config, table, head), depths


def _reads(specs: Iterable[TensorSpec], config: Mapping[str, Any], table: tuple[int, int], head: int) -> Reads:
    dense = shared = 0
    routed: dict[str, tuple[int, int]] = {}  # layer -> (experts, bytes of all)
    for spec in specs:
        expert = _EXPERT.search(spec.name)
        if _EMBEDDING.search(spec.name) or _HEAD.search(spec.name):
            continue
        if _SHARED.search(spec.name):
            shared += spec.nbytes
        elif expert is not None:
            prefix = spec.name[: expert.start()]
            count, nbytes = routed.get(prefix, (0, 0))
            number = int(expert[1]) + 1 if expert[1] else spec.shape[0]
            routed[prefix] = max(count, number), nbytes + spec.nbytes
        else:
            dense += spec.nbytes
    active = _integer(config, ACTIVE_KEYS, "the number of active experts") if routed else 0
    layers = tuple(ExpertLayer(count, active, nbytes // count) for count, nbytes in routed.values())
    return Reads(dense, shared, head, *table, layers)


def _integer(config: Mapping[str, Any], keys: tuple[str, ...], what: str) -> int:
    """The first of ``keys`` that the config, or the text part of it, has."""
    nested = config.get("text_config")
    for table in (config, nested if isinstance(nested, Mapping) else {}):
        for key in keys:
            value = table.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise ConfigError(
        f"the config does not say {what}",
        where=f"config.json: {', '.join(keys)}",
        next_step="add the key that this model's class reads",
    )
