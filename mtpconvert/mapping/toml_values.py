"""Values of a mapping file, taken out with their types checked; every refusal says file and place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mtpconvert.errors import MappingError
from mtpconvert.mapping.dims import check_expression

BRACES = re.compile(r"\{([^{}]*)\}")


def read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MappingError(f"the mapping file cannot be read: {error}", where=str(file)) from error


def fail(file: Path, where: str, what: str) -> NoReturn:
    raise MappingError(what, where=f"{file}: {where}", next_step="docs/mapping-format.md describes the grammar")


def known(table: Mapping[str, Any], keys: set[str], file: Path, where: str) -> None:
    """Refuse keys of ``table`` that are not among ``keys``."""
    if unknown := sorted(table.keys() - keys):
        fail(file, where, f"unknown keys {', '.join(unknown)}; known: {', '.join(sorted(keys))}")


def table_of(value: object, file: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        fail(file, where, f"{value!r} stands where a table is needed")
    return value


def tables_of(value: object, file: Path, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        fail(file, where, f"{value!r} stands where an array of tables is needed")
    return [table_of(entry, file, f"{where}, entry {number}") for number, entry in enumerate(value, 1)]


def texts_of(value: object, file: Path, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fail(file, where, f"{value!r} stands where an array of texts is needed")
    return tuple(value)


def text(file: Path, where: str, table: Mapping[str, Any], key: str) -> str:
    """The text under ``key``, which must be there."""
    value = optional_text(file, where, table, key)
    if value is None:
        fail(file, where, f"'{key}' is missing")
    return value


def optional_text(file: Path, where: str, table: Mapping[str, Any], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        fail(file, where, f"'{key}' is {value!r}, no text")
    return value


def expression(file: Path, where: str, value: object) -> str:
    """``value`` if it follows the grammar of ``dims``."""
    if not isinstance(value, str):
        fail(file, where, f"{value!r} stands where an expression in quotes is needed")
    try:
        check_expression(value)
    except MappingError as error:
        fail(file, where, error.what)
    return value
