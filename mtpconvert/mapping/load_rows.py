"""Row groups of a mapping file and of the shared files that it includes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpconvert.mapping.model import Row
from mtpconvert.mapping.ops import ALIASES, ARITY, DIMS, OPS, OPS_OF_EXPERTS
from mtpconvert.mapping.toml_values import (
    BRACES,
    expression,
    fail,
    known,
    optional_text,
    read_toml,
    table_of,
    tables_of,
    text,
    texts_of,
)

_ROW_KEYS = {"op", "hf", "mcore", "source", "dims", "of", "experts", "when", "unless", "dtype", "reason", "codec"}
CODECS = ("minus_one",)  # mtpconvert/codecs: what Megatron keeps is computed, and its way back checked
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Keys that belong to rows of some ops only, and that these rows need.
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "source": ALIASES,
    "of": ("expert_stack",),
    "experts": ("expert_stack",),
    "reason": ("aside",),
}


def load_rows(file: Path, table: Mapping[str, Any], shared: Path) -> dict[str, tuple[Row, ...]]:
    """Row groups by name. An included file is looked for in ``_shared`` beside ``file``, then in ``shared``.

    Raises MappingError naming file, group and row.
    """
    groups: dict[str, tuple[Row, ...]] = {}
    for name in texts_of(table.get("include", []), file, "include"):
        beside = file.parent / "_shared" / f"{name}.toml"
        source = beside if beside.exists() else shared / f"{name}.toml"
        if not source.exists():
            fail(file, "include", f"there is no shared file '{name}': neither {beside} nor {source}")
        included = read_toml(source)
        known(included, {"rows"}, source, "top level")
        _add(groups, source, included)
    _add(groups, file, table)
    return groups


def _add(groups: dict[str, tuple[Row, ...]], source: Path, table: Mapping[str, Any]) -> None:
    for group, entries in table_of(table.get("rows", {}), source, "[rows]").items():
        if group in groups:
            fail(source, f"group {group}", "a row group of this name stands already in an included file")
        rows = tables_of(entries, source, f"group {group}")
        groups[group] = tuple(_row(source, group, number, entry) for number, entry in enumerate(rows, 1))


def _row(file: Path, group: str, number: int, entry: Mapping[str, Any]) -> Row:
    place = f"group {group}, row {number}"
    known(entry, _ROW_KEYS, file, place)
    op = text(file, place, entry, "op")
    if op not in (*OPS, "expert_stack", *ALIASES, "aside"):
        fail(file, place, f"unknown op '{op}'; known: {', '.join([*OPS, 'expert_stack', *ALIASES, 'aside'])}")
    for key, ops in _OWN_KEYS.items():
        if (op in ops) != (key in entry):
            fail(file, place, f"'{key}' belongs to {' and '.join(ops)} rows, and they need it; this is a '{op}' row")
    inner = op
    if op == "expert_stack":
        inner = text(file, place, entry, "of")
        if inner not in OPS_OF_EXPERTS:
            fail(file, place, f"expert_stack needs of = one of {', '.join(OPS_OF_EXPERTS)}, not '{inner}'")
        expression(file, place, entry["experts"])
    hf, mcore = _names(file, place, entry, "hf"), _names(file, place, entry, "mcore")
    sources, targets = ARITY[inner]
    if len(hf) != sources or (len(mcore) < 2 if targets is None else len(mcore) != targets):
        several = "several" if targets is None else targets
        fail(file, place, f"'{inner}' relates {sources} HF to {several} Megatron names, not {len(hf)} to {len(mcore)}")
    _check_braces(file, place, op, hf, mcore)
    if op == "aside" and not text(file, place, entry, "reason"):
        fail(file, place, "an aside row needs a reason")
    dtype = optional_text(file, place, entry, "dtype")
    if dtype is not None and dtype not in _DTYPES:
        fail(file, place, f"unknown dtype '{dtype}'; known: {', '.join(_DTYPES)}")
    codec = optional_text(file, place, entry, "codec")
    if codec is not None and (codec not in CODECS or op != "rename"):
        fail(file, place, f"codec is for rename rows and one of {', '.join(CODECS)}, not '{codec}' for '{op}'")
    dims = texts_of(entry.get("dims", []), file, f"{place}, dims")
    least, most = DIMS.get(inner, (0, None))
    least = 1 + len(mcore) if inner == "rows_split" else least
    if len(dims) < least or (most is not None and len(dims) > most):
        fail(file, place, f"'{inner}' needs {least if least == most else f'at least {least}'} dims, not {len(dims)}")
    for one in dims:
        expression(file, place, one)
    return Row(
        op=op, hf=hf, mcore=mcore, dims=dims, place=f"{file.name}: {place}",
        source=optional_text(file, place, entry, "source"), of=optional_text(file, place, entry, "of"),
        experts=entry.get("experts"), when=optional_text(file, place, entry, "when"),
        unless=optional_text(file, place, entry, "unless"), dtype=None if dtype is None else _DTYPES[dtype],
        reason=optional_text(file, place, entry, "reason"), codec=codec,
    )  # fmt: skip


def _names(file: Path, place: str, entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    return (value,) if isinstance(value, str) else texts_of(value, file, f"{place}, {key}")


def _check_braces(file: Path, place: str, op: str, hf: tuple[str, ...], mcore: tuple[str, ...]) -> None:
    """``{e}`` stands in every HF name of an expert_stack row, and no other braces stand anywhere in a row."""
    for name in (*hf, *mcore):
        wanted = ["e"] if op == "expert_stack" and name in hf else []
        if BRACES.findall(name) != wanted:
            what = "needs {e}, once, for the expert's number" if wanted else "may not have braces"
            fail(file, place, f"the name '{name}' of a '{op}' row {what}")
