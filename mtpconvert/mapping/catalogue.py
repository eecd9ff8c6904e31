"""The mapping files that come with the tool, by architecture."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError, NotRepresentableError, UsageError
from mtpconvert.mapping.closest import by_name, by_tensors, patterns
from mtpconvert.mapping.load import load_mapping
from mtpconvert.mapping.model import Mapping
from mtpconvert.mapping.refusals import refuse
from mtpconvert.mapping.spelling import spelled


@cache
def folder() -> Path:
    """``_mappings`` inside an installed package, ``mappings`` beside the package in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_mappings"
    return installed if installed.is_dir() else package.parent / "mappings"


def architectures() -> list[str]:
    return sorted(file.stem for file in folder().glob("*.toml"))


def file_of(architecture: str, names: Collection[str] = ()) -> Path:
    """The mapping file for a name of ``architectures`` in config.json. Raises NotRepresentableError for others.

    ``names``: the model's tensors, where they are known: the error then says whose rows have most of them.
    """
    if architecture not in architectures():
        raise NotRepresentableError(
            f"no mapping file for the architecture '{architecture}'; the closest known one is "
            f"{by_name(architecture, architectures())}{_closest_tensors(names)}",
            where="config.json: architectures",
            next_step="write a mapping: 'mtpconvert mappings new HF_DIR' drafts one from the headers"
            " (CONTRIBUTING.md, 'Add an architecture'); pass it with --mapping FILE",
        )
    return folder() / f"{architecture}.toml"


def _closest_tensors(names: Collection[str]) -> str:
    """ ", and by its tensors X, whose rows have 12 of 15 name patterns", or nothing where no row has any."""
    if not names:
        return ""
    mapping, shared = by_tensors(names, [load(folder() / f"{name}.toml") for name in architectures()])[0]
    if not shared:
        return ", and no mapping has a row for any of its tensors"
    many = f"{shared} of {len(patterns(names))} name patterns"
    return f", and by its tensors {mapping.architecture}, whose rows have {many}"


def mapping_for(
    config: dict[str, Any], file: Path | None = None, names: Collection[str] = (), *, drop_mtp: bool = False
) -> Mapping:
    """The mapping for a model's config.json: ``file`` if given, else the shipped one of its architecture.

    ``names``: the model's HF tensors, where they are known; the mapping speaks of them in their own spelling then.
    Raises NotRepresentableError for what Megatron cannot hold (``refused``) and for an unknown architecture,
    CheckpointError for names in two spellings, ConfigError where no architecture is named.
    """
    if file is not None:
        return spelled(load(file), names)
    found = config.get("architectures")
    architecture = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else None
    refuse(config, names, mapped=architecture in architectures(), drop_mtp=drop_mtp)
    if architecture is None:
        raise ConfigError(
            f"'architectures' is {found!r}; exactly one name is needed to choose a mapping file",
            where="config.json: architectures",
            next_step="correct config.json, or pass --mapping FILE",
        )
    return spelled(load(file_of(architecture, names)), names)


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
