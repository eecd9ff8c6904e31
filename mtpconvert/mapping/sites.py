"""The tensors of a checkpoint by where they stand: outside the layers, in trunk layers, in MTP layers, in towers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconvert.tensors import Inventory, Shape

_LAYER = re.compile(r"(?P<root>(?:\w+\.)*?(?:\w*layers|blocks|h|mtp)\.)(?P<n>\d+)\.(?P<tail>.+)")
_OTHER = re.compile(r"(?:^|[._])encoder\w*[._]")
# One part of a name: "visual", "vision_tower", "embed_vision", "multi_modal_projector"; not "vision_language_model".
_TOWER = re.compile(r"(?:^|_)(?:vis(?:ion|ual)\w*|vit|audio\w*|multi_?modal\w*|mm)(?:_|$)")
_LANGUAGE = re.compile(r"language|text|llm")
# Where configs nest that of the language model (transformers PreTrainedConfig.get_text_config; remote code).
_TEXT = ("text_config", "llm_config", "language_config", "language_model_config")
SHARED_MTP = "mtp."  # what all MTP layers share: Qwen's projection and norms, without a number
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

    ``other``: of something else than a decoder, for which no mapping has rows. ``tower``: one for pictures or sounds,
    all of it as one layer. ``names``: of all its tensors.
    """

    hf: str
    mtp: bool = False
    other: bool = False
    tower: bool = False
    layers: dict[int, Tensors] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def numbered(self) -> bool:
        return "{" in self.hf

    def classes(self) -> list[tuple[list[int], Tensors]]:
        """Layers that hold the same tensors in the same shapes, with their numbers; the first layers first."""
        groups: dict[frozenset[tuple[str, Found]], list[int]] = {}
        for number in sorted(self.layers):
            groups.setdefault(frozenset(self.layers[number].items()), []).append(number)
        return [(numbers, self.layers[numbers[0]]) for numbers in groups.values()]


def text_key(config: Mapping[str, Any]) -> str | None:
    """The key of the table that holds the language model's config, None where it stands at the top."""
    tables = [key for key, table in config.items() if isinstance(table, Mapping) and "num_hidden_layers" in table]
    named = [key for key in _TEXT if key in tables]
    if named or "num_hidden_layers" in config:
        return named[0] if named else None
    return next((key for key in tables if "vocab_size" in config[key] and not _TOWER.search(key)), None)


def sites_of(inventory: Inventory, trunk: int) -> list[Site]:
    """Every tensor in exactly one site; the site outside the layers first, whose one layer has the number 0."""
    sites: dict[str, Site] = {"": Site("")}
    experts: dict[tuple[str, int, str], set[str]] = {}
    for name, spec in inventory.items():
        if (prefix := _tower(name)) is not None:
            number, tail, mtp = 0, name.removeprefix(prefix), False
            site = sites.setdefault(prefix, Site(prefix, other=True, tower=True))
        else:
            prefix, number, tail, mtp = _place(name, trunk)
            site = sites.setdefault(prefix, Site(prefix, mtp, _OTHER.search(prefix) is not None))
        site.names.append(name)
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


def _tower(name: str) -> str | None:
    """The prefix of another part of the model than the language model, up to and with the word that says so."""
    parts = name.split(".")[:-1]
    for at, part in enumerate(parts):
        if part.isdigit():
            return None
        if _TOWER.search(part) and not _LANGUAGE.search(part):
            return ".".join(parts[: at + 1]) + "."
    return None


def _place(name: str, trunk: int) -> tuple[str, int, str, bool]:
    """(prefix with ``{i}``, number, rest of the name, whether it is MTP)."""
    match = _LAYER.fullmatch(name)
    if match is None and name.startswith(SHARED_MTP):
        return SHARED_MTP, 0, name.removeprefix(SHARED_MTP), True
    if match is None:
        return "", 0, name, False
    root, number = match["root"], int(match["n"])
    if _OTHER.search(root):
        return f"{root}{{i}}.", number, match["tail"], False
    if "mtp" in root:
        return f"{root}{{i}}.", number, match["tail"], True
    if number >= trunk:
        return f"{root}{{num_hidden_layers+i}}.", number - trunk, match["tail"], True
    return f"{root}{{i}}.", number, match["tail"], False
