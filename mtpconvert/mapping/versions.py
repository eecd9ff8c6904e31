"""Which versions of megatron-core cannot hold a model that a mapping describes, and the refusal."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from pathlib import Path
from typing import Any

from mtpconvert.errors import NotRepresentableError
from mtpconvert.mapping.model import Mapping, Unsupported
from mtpconvert.mapping.toml_values import fail, known, optional_text, tables_of, text

VERSIONS = ("0.16", "0.19")


def load_unsupported(file: Path, value: object) -> tuple[Unsupported, ...]:
    """The ``[[unsupported]]`` tables of a mapping file. Raises MappingError naming file and entry."""
    return tuple(
        _one(file, f"[[unsupported]], entry {number}", entry)
        for number, entry in enumerate(tables_of(value, file, "[[unsupported]]"), 1)
    )


def _one(file: Path, where: str, entry: dict[str, Any]) -> Unsupported:
    known(entry, {"mcore", "when", "unless", "why"}, file, where)
    version = text(file, where, entry, "mcore")
    if version not in VERSIONS:
        fail(file, where, f"mcore is '{version}'; known: {', '.join(VERSIONS)}")
    when, unless = (optional_text(file, where, entry, key) for key in ("when", "unless"))
    return Unsupported(version, when, unless, text(file, where, entry, "why"))


def refuse_version(mapping: Mapping, config: MappingOf[str, Any], version: str) -> None:
    """Raise NotRepresentableError where megatron-core ``version`` has no module for the model of ``config``."""
    scope = mapping.scope(config)
    for entry in mapping.unsupported:
        applies = (entry.when is None or scope.truth(entry.when)) and not (entry.unless and scope.truth(entry.unless))
        if entry.version == version and applies:
            others = [f"--mcore-version {other}" for other in VERSIONS if other != version]
            raise NotRepresentableError(
                f"megatron-core {version} cannot hold this model: {entry.why}",
                where=f"config.json: {entry.when or entry.unless or 'architectures'}",
                next_step=f"convert with {' or '.join(others)}",
            )
