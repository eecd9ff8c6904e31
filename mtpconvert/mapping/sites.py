"""The tensors of a checkpoint by where they stand: outside the layers, in trunk layers, in MTP layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconvert.tensors import Inventory, Shape

_LAYER = re.compile(r"(?P<root>(?:\w+\.)*?(?:\w*layers|blocks|h)\.)(?P<n>\d+)\.(?P<tail>.+)")
_OTHER = re.compile(r"(?:^|[._])(?:vis\w*|vit|audio\w*|encoder\w*)[._]")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of a layer, or the like tensors of all its experts. ``experts``: their number, 0 for no expert."""

    shape: Shape
    dtype: str
    experts: int = 0


Tensors = dict[str, Found]  # name without the layer's prefix, {e} for the expert


@dataclass
class Site:
    """Layers under one prefix. ``hf``: the prefix with the number as ``{i}`` or ``{key+i}``; "" outside all layers.

    ``other``: layers of a tower for something else than text, for which no mapping has rows.
    """

    hf: str
    mtp: bool = False
    other: bool = False
    layers: dict[int, Tensors] = field(default_factory=dict)

    def classes(self) -> list[tuple[list[int], Tensors]]:
        """Layers that hold the same tensors in the same shapes, with their numbers; the first layers first."""
        groups: dict[frozenset[tuple[str, Found]], list[int]] = {}
        for number in sorted(self.layers):
            groups.setdefault(frozenset(self.layers[number].items()), []).append(number)
        return [(numbers, self.layers[numbers[0]]) for numbers in groups.values()]


def layer_count_key(config: Mapping[str, Any]) -> str:
    """The dotted key of the number of trunk layers, the language model's where it has a config of its own."""
    text = config.get("text_config")
    nested = "num_hidden_layers" not in config and isinstance(text, Mapping) and "num_hidden_layers" in text
    return "text_config.num_hidden_layers" if nested else "num_hidden_layers"


def sites_of(inventory: Inventory, count_key: str, trunk: int) -> list[Site]:
    """Every tensor in exactly one site; the site outside the layers first, whose one layer has the number 0."""
    sites: dict[str, Site] = {"": Site("")}
    experts: dict[tuple[str, int, str], set[str]] = {}
    for name, spec in inventory.items():
        prefix, number, tail, mtp = _place(name, count_key, trunk)
        site = sites.setdefault(prefix, Site(prefix, mtp, _OTHER.search(prefix) is not None))
        stacked, found = _EXPERT.subn("{e}", tail)
        if found:
            experts.setdefault((prefix, number, stacked), set()).add(tail)
        count = len(experts[prefix, number, stacked]) if found else 0
        tensors = site.layers.setdefault(number, {})
        known = tensors.get(stacked)
        if known is not None and (known.shape, known.dtype) != (spec.shape, spec.dtype):
            tensors[tail] = Found(spec.shape, spec.dtype)  # an expert unlike the others stands for itself
        else:
            tensors[stacked] = Found(spec.shape, spec.dtype, count)
    return list(sites.values())


def _place(name: str, count_key: str, trunk: int) -> tuple[str, int, str, bool]:
    """(prefix with ``{i}``, number, rest of the name, whether it is MTP)."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return "", 0, name, False
    root, number = match["root"], int(match["n"])
    if _OTHER.search(root):
        return f"{root}{{i}}.", number, match["tail"], False
    if "mtp" in root:
        return f"{root}{{i}}.", number, match["tail"], True
    if number >= trunk:
        return f"{root}{{{count_key}+i}}.", number - trunk, match["tail"], True
    return f"{root}{{i}}.", number, match["tail"], False
