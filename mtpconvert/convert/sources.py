"""What a path is, for commands that convert it: a draft in files that nothing converts is refused as what it is."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError, ConfigError
from mtpconvert.mapping.catalogue import architectures
from mtpconvert.mapping.refusals import refuse
from mtpconvert.stores.detect import Found, detect
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.stores.state_dicts import PICKLED, names_in


def detect_source(path: Path) -> Found:
    """``detect``, but for weights in pickles, or beside params.json alone, first whether Megatron could hold them.

    Raises NotRepresentableError where names or config show that it cannot, else what ``detect`` raises.
    """
    try:
        return detect(path)
    except (CheckpointError, ConfigError):
        if _is_unreadable(path):
            config = _config(path)
            named = config.get("architectures")
            mapped = isinstance(named, list) and bool(set(map(str, named)) & set(architectures()))
            refuse(config, _names(path), mapped=mapped, drop_mtp=True)
        raise


def _is_unreadable(path: Path) -> bool:
    """Pickles and no safetensors, or safetensors with params.json in place of config.json."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "params.json" in names and "config.json" not in names
    return any(map(PICKLED.fullmatch, names))


def _config(folder: Path) -> dict[str, Any]:
    """config.json, or Meta's params.json; nothing where neither is an object."""
    for name in ("config.json", "params.json"):
        with suppress(OSError, ValueError, RecursionError):
            config = json.loads((folder / name).read_bytes())
            if isinstance(config, dict):
                return config
    return {}


def _names(folder: Path) -> Collection[str]:
    """Tensor names, as far as they can be read: what is wrong with a file is said by ``detect``."""
    with suppress(CheckpointError, OSError):
        if any(folder.glob("*.safetensors")):
            return SafetensorsReader(folder).inventory()
        return names_in(folder)
    return []
