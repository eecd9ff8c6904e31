"""``[kinds]``: what may stand in the config lists that have an entry for each layer.

Publishers write such lists with the trunk's entries first; some add entries for the MTP layers, which no trunk layer
is (transformers configuration_step3p7.py:__post_init__ cuts them off likewise).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError
from mtpconvert.mapping.layers import Selector, asked_of_lists
from mtpconvert.mapping.toml_values import fail, table_of

Kinds = Mapping[str, tuple[str | int, ...]]


def load_kinds(file: Path, value: object, selectors: Mapping[str, Selector]) -> Kinds:
    """The table: config key -> every value that an entry may have. Raises MappingError naming the file.

    Every list that ``[layers]`` asks with ``where`` has to be there, with what is asked for.
    """
    kinds: dict[str, tuple[str | int, ...]] = {}
    for key, entries in table_of(value, file, "[kinds]").items():
        if not isinstance(entries, list) or not entries or not all(type(entry) in (str, int) for entry in entries):
            fail(file, f"[kinds] {key}", f"{entries!r} stands where an array of texts or numbers is needed")
        kinds[key] = tuple(entries)
    for name, selector in selectors.items():
        for key, wanted in asked_of_lists(selector):
            if wanted not in kinds.get(key, ()):
                fail(file, f"[layers] {name}", f"asks {key} for {wanted!r}, which [kinds] does not list")
    return kinds


def of_trunk(table: Mapping[str, Any], kinds: Kinds, config_key: Callable[[str], str]) -> Mapping[str, Any]:
    """``table`` with the lists that ``kinds`` names cut to the trunk's layers; a text is a list of letters.

    ``config_key``: where config.json holds a key. Raises ConfigError naming key, index and value for a list that is
    too short and for an entry of no known kind.
    """
    layers = table.get("num_hidden_layers")
    if not isinstance(layers, int):
        return table
    cut: dict[str, Any] = {}
    for key, known in kinds.items():
        value = table.get(key)
        if isinstance(value, list | str):
            _check(config_key(key), value, known, layers)
            cut[key] = value[:layers]
    return {**table, **cut} if cut else table


def without_mtp(config: Mapping[str, Any], kinds: Kinds, text: str | None) -> dict[str, Any]:
    """What to change in a config of which MTP is dropped: the lists that have entries behind the trunk's, cut.

    ``text``: the table that holds them, None for the top. Keys are dotted.
    """
    table, path = (config, "") if text is None else (config[text], f"{text}.")
    layers = table.get("num_hidden_layers")
    return {
        path + key: value[:layers]
        for key in kinds
        if isinstance(layers, int) and isinstance(value := table.get(key), list | str) and len(value) > layers
    }


def _check(key: str, value: list[Any] | str, known: tuple[str | int, ...], layers: int) -> None:
    for layer, kind in enumerate(value[:layers]):
        if kind not in known:
            raise ConfigError(
                f"{key}[{layer}] is {kind!r}, no kind of layer that the mapping knows",
                where=f"config.json: {key}",
                next_step=f"write one of {', '.join(map(repr, known))}, as the tensors of layer {layer} are",
            )
    if len(value) < layers:
        raise ConfigError(
            f"{key}[{len(value)}] is missing: {key} has {len(value)} entries for {layers} layers",
            where=f"config.json: {key}",
            next_step=f"write {key} with an entry for each layer, as the publisher's config.json has it",
        )
