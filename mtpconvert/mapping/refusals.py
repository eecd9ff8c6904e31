"""The refusal of what Megatron-Core cannot hold: named, with its tensors and the reason, before anything is planned."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mtpconvert.errors import NotRepresentableError, some
from mtpconvert.mapping.refused import DRAFTS, FAMILIES, MODULES, Refused


def refuse(config: Mapping[str, Any], names: Collection[str], *, mapped: bool, drop_mtp: bool = False) -> None:
    """Raise NotRepresentableError for a model that the tables of ``refused`` name; else do nothing.

    ``names``: HF tensor names, none where only a config is known. ``mapped``: whether a mapping file of the config's
    architecture is there; then only draft tensors can be a reason. ``drop_mtp``: MTP tensors are left out anyway.
    """
    names = [name for name in names if ".experts." not in name]  # many, and they show none of these
    for entry in () if mapped else FAMILIES:
        if (where := _config_place(entry, config)) is not None:
            raise _error(entry, _found(entry, names), where, mapped)
    for entry in (*(() if mapped else MODULES), *DRAFTS):
        if entry.by_tensors and (found := _all_found(entry, names)) and not (entry.mtp and mapped and drop_mtp):
            raise _error(entry, found, "tensor names", mapped)


def _found(entry: Refused, names: Collection[str]) -> list[str]:
    pattern = re.compile("|".join(entry.tensors))
    return [name for name in names if pattern.search(name)] if entry.tensors else []


def _all_found(entry: Refused, names: Collection[str]) -> list[str]:
    """The tensors that show ``entry``, if each of its patterns has one and nothing speaks against it."""
    found = _found(entry, names)
    if any(re.search(one, name) for one in entry.without for name in names):
        return []
    return found if all(any(re.search(one, name) for name in found) for one in entry.tensors) else []


def _config_place(entry: Refused, config: Mapping[str, Any]) -> str | None:
    """Which key of config.json names ``entry``, or None."""
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and any(fnmatchcase(name, one) for one in entry.architectures):
            return "config.json: architectures"
    levels = {"": config} | {f"{key}.": value for key, value in config.items() if isinstance(value, Mapping)}
    for path, level in levels.items():
        kind = level.get("model_type")
        if isinstance(kind, str) and any(fnmatchcase(kind, one) for one in entry.model_types):
            return f"config.json: {path}model_type"
    return next((f"config.json: {key}" for key in entry.keys if config.get(key) is not None), None)


def _error(entry: Refused, found: list[str], where: str, mapped: bool) -> NotRepresentableError:
    tensors = f" ({len(found)} tensors: {some(found)})" if found else ""
    look = "mtpconvert inspect shows it, and mtpconvert audit compares two Hugging Face copies of it"
    if entry.draft:
        next_step = f"convert its target alone and serve this draft beside it, as it is; {look}"
    elif entry.mtp and mapped:
        next_step = f"leave MTP out on purpose with --mtp drop, and keep these tensors elsewhere; {look}"
    elif entry.mtp:
        next_step = f"--mtp drop does not help: there is no mapping for its trunk either; {look}"
    else:
        next_step = f"{look}; a mapping of your own is passed with --mapping FILE"
    return NotRepresentableError(
        f"{entry.what}{tensors} cannot be held by Megatron: {entry.reason}", where=where, next_step=next_step
    )
