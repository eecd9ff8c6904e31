"""In whose names a family's Megatron side is written: stock megatron-core's, or another project's that has the modules
which stock megatron-core lacks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from mtpconvert.errors import NotRepresentableError, UsageError, some
from mtpconvert.mapping.model import Dialect, Mapping
from mtpconvert.mapping.toml_values import fail, known, table_of, text, texts_of

DialectName = Literal["stock", "bridge"]
DIALECTS: tuple[DialectName, ...] = ("stock", "bridge")
_PROJECTS = {"bridge": "Megatron-Bridge"}


def load_dialect(file: Path, value: object) -> Dialect:
    """The ``[dialect]`` table of a mapping file. Raises MappingError naming the file."""
    table = table_of(value, file, "[dialect]")
    known(table, {"name", "why", "hf"}, file, "[dialect]")
    name = text(file, "[dialect]", table, "name")
    if name not in _PROJECTS:
        fail(file, "[dialect]", f"name is '{name}'; known: {', '.join(_PROJECTS)}")
    return Dialect(name, text(file, "[dialect]", table, "why"), texts_of(table.get("hf", []), file, "[dialect] hf"))


def check_dialect(mapping: Mapping, asked: str, spec: str, names: Collection[str] = ()) -> None:
    """Whether the model may be written in the names of ``asked``, for layers of ``spec``.

    ``names``: the model's HF tensors, where they are known. Raises NotRepresentableError for a family that needs a
    dialect which was not asked for, UsageError for a dialect that the family has no use for.
    """
    own = mapping.dialect
    if own is None:
        if asked != "stock":
            raise UsageError(
                f"--dialect {asked} is for models that stock megatron-core has no modules for; it has those of"
                f" {mapping.architecture}",
                next_step="leave --dialect out",
            )
        return
    project = _PROJECTS[own.name]
    if asked != own.name:
        found = [name for name in names if name.endswith(own.hf)] if own.hf else []
        shown = f" ({len(found)} tensors: {some(found)})" if found else ""
        raise NotRepresentableError(
            f"stock megatron-core cannot hold {mapping.architecture}{shown}: {own.why}",
            where="config.json: architectures",
            next_step=f"--dialect {own.name} writes it in the names of {project}'s modules, which stock Megatron does"
            " not load; mtpconvert inspect shows it, and mtpconvert audit compares two Hugging Face copies of it",
        )
    if spec != "te":
        raise NotRepresentableError(
            f"{project} builds its own layers with Transformer Engine only",
            where=f"--spec {spec}",
            next_step="convert with --spec te",
        )


def dialect_notes(mapping: Mapping) -> list[str]:
    """What whoever loads the checkpoint must know; nothing for stock names."""
    if mapping.dialect is None:
        return []
    project = _PROJECTS[mapping.dialect.name]
    return [
        f"NOT FOR STOCK MEGATRON: written in the names of {project}'s modules, since {mapping.dialect.why}; stock"
        " megatron-core may load it without a word and compute another model"
    ]
