"""The mapping files that come with the tool, by architecture."""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError, NotRepresentableError, UsageError
from mtpconvert.mapping.load import load_mapping
from mtpconvert.mapping.model import Mapping


@cache
def folder() -> Path:
    """``_mappings`` inside an installed package, ``mappings`` beside the package in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_mappings"
    return installed if installed.is_dir() else package.parent / "mappings"


def architectures() -> list[str]:
    return sorted(file.stem for file in folder().glob("*.toml"))


def file_of(architecture: str) -> Path:
    """The mapping file for a name of ``architectures`` in config.json. Raises NotRepresentableError for others."""
    file = folder() / f"{architecture}.toml"
    if architecture not in architectures():
        close = get_close_matches(architecture, architectures(), n=1, cutoff=0.0)
        raise NotRepresentableError(
            f"no mapping file for the architecture '{architecture}'; the closest known one is {close[0]}",
            where="config.json: architectures",
            next_step="write a mapping (CONTRIBUTING.md, 'Add an architecture') and pass it with --mapping FILE",
        )
    return file


def mapping_for(config: dict[str, Any], file: Path | None = None) -> Mapping:
    """The mapping for a model's config.json: ``file`` if given, else the shipped one of its architecture."""
    if file is not None:
        return load(file)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"'architectures' is {names!r}; exactly one name is needed to choose a mapping file",
            where="config.json: architectures",
            next_step="correct config.json, or pass --mapping FILE",
        )
    return load(file_of(names[0]))


def load(file: Path) -> Mapping:
    """A mapping file, shipped or not; shared row groups that do not stand beside it are the shipped ones."""
    return load_mapping(file, folder() / "_shared")


def sample_configs(architecture: str) -> dict[str, dict[str, Any]]:
    """Config.json of the tiny and of the published full-size model that ``mappings check`` expands.

    Raises UsageError for an architecture that is none of ``architectures``.
    """
    files = {size: folder() / "configs" / f"{architecture}.{size}.json" for size in ("tiny", "full")}
    if architecture not in architectures():
        raise UsageError(
            f"no sample config of {architecture} comes with this tool",
            next_step="pass the config.json of a model with --config, and of several by repeating it",
        )
    return {size: json.loads(file.read_text(encoding="utf-8")) for size, file in files.items()}
