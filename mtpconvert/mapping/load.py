"""TOML -> Mapping. Whatever can be checked without a config is checked here; errors name file, group and row."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping as MappingOf
from pathlib import Path
from typing import Any, NoReturn

from mtpconvert.errors import MappingError
from mtpconvert.mapping.dims import check_expression
from mtpconvert.mapping.layers import Selector
from mtpconvert.mapping.model import Mapping, MtpRule, Place, Row
from mtpconvert.mapping.ops import ALIASES, ARITY, MIN_DIMS, OPS, OPS_OF_EXPERTS

SCHEMA = 1
_TOP_KEYS = {
    "schema", "architecture", "mcore_model", "evidence", "include", "dims", "defaults", "layers", "place", "rows",
    "variants", "mtp", "arguments",
}  # fmt: skip
_ROW_KEYS = {"op", "hf", "mcore", "source", "dims", "of", "experts", "when", "unless", "dtype", "reason"}
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BRACES = re.compile(r"\{([^{}]*)\}")


def load_mapping(file: Path) -> Mapping:
    """Read and check one mapping file. Raises MappingError naming file, group and row."""
    table = _read(file)
    _known(table, _TOP_KEYS, file, "top level")
    if table.get("schema") != SCHEMA:
        _fail(file, "top level", f"schema is {table.get('schema')!r}, this version reads {SCHEMA}")
    if table.get("mcore_model", "GPTModel") != "GPTModel":
        _fail(file, "top level", f"mcore_model is {table['mcore_model']!r}, only GPTModel is known")
    rows = _rows(file, table)
    variants = {name: tuple(groups) for name, groups in table.get("variants", {}).items()}
    layers = {name: _selector(file, name, value) for name, value in table.get("layers", {}).items()}
    places = tuple(_place(file, number, entry) for number, entry in enumerate(table.get("place", []), 1))
    _check_placed(file, places, rows, variants, layers)
    defaults, sources = _defaults(file, table.get("defaults", {}))
    dims = table.get("dims", {})
    for symbol, expression in dims.items():
        _expression(file, f"[dims] {symbol}", expression)
    return Mapping(
        file=file,
        architecture=_text(file, "top level", table, "architecture"),
        evidence=tuple(table.get("evidence", ())),
        dims=dims,
        defaults=defaults,
        default_sources=sources,
        layers=layers,
        places=places,
        rows=rows,
        variants=variants,
        mtp=_mtp(file, table.get("mtp")),
        arguments=table.get("arguments", {}),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MappingError(f"the mapping file cannot be read: {error}", where=str(file)) from error


def _rows(file: Path, table: MappingOf[str, Any]) -> dict[str, tuple[Row, ...]]:
    """Row groups of the file and of every shared file that it includes."""
    groups: dict[str, tuple[Row, ...]] = {}
    sources = [(file.parent / "_shared" / f"{name}.toml") for name in table.get("include", [])]
    for source, tables in [*((s, _read(s)) for s in sources), (file, table)]:
        if source != file:
            _known(tables, {"rows"}, source, "top level")
        for group, entries in tables.get("rows", {}).items():
            if group in groups:
                _fail(source, f"group {group}", "a row group of this name stands already in another included file")
            groups[group] = tuple(_row(source, group, number, entry) for number, entry in enumerate(entries, 1))
    return groups


def _row(file: Path, group: str, number: int, entry: MappingOf[str, Any]) -> Row:
    place = f"group {group}, row {number}"
    _known(entry, _ROW_KEYS, file, place)
    op = _text(file, place, entry, "op")
    of = entry.get("of")
    if op == "expert_stack":
        if of not in OPS_OF_EXPERTS:
            _fail(file, place, f"expert_stack needs of = one of {', '.join(OPS_OF_EXPERTS)}, not {of!r}")
        _expression(file, place, entry.get("experts"))
    elif op not in OPS and op not in ALIASES and op != "aside":
        _fail(file, place, f"unknown op '{op}'; known: {', '.join([*OPS, 'expert_stack', *ALIASES, 'aside'])}")
    hf, mcore = _names(entry.get("hf")), _names(entry.get("mcore"))
    if (len(hf), len(mcore)) != ARITY[of or op]:
        wanted = ARITY[of or op]
        _fail(
            file, place, f"'{op}' relates {wanted[0]} HF to {wanted[1]} Megatron names, not {len(hf)} to {len(mcore)}"
        )
    if (op in ALIASES) != ("source" in entry):
        _fail(file, place, f"'source' belongs to {' and '.join(ALIASES)} rows, and they need it")
    if op == "aside" and not entry.get("reason"):
        _fail(file, place, "an aside row needs a reason")
    dtype = entry.get("dtype")
    if dtype is not None and dtype not in _DTYPES:
        _fail(file, place, f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    dims = tuple(entry.get("dims", ()))
    if len(dims) < MIN_DIMS.get(of or op, 0):
        _fail(file, place, f"'{op}' needs at least {MIN_DIMS[of or op]} dims")
    for expression in dims:
        _expression(file, place, expression)
    return Row(
        op=op, hf=hf, mcore=mcore, dims=dims, place=f"{file.name}: {place}", source=entry.get("source"), of=of,
        experts=entry.get("experts"), when=entry.get("when"), unless=entry.get("unless"),
        dtype=None if dtype is None else _DTYPES[dtype], reason=entry.get("reason"),
    )  # fmt: skip


def _place(file: Path, number: int, entry: MappingOf[str, Any]) -> Place:
    where = f"place {number}"
    _known(entry, {"rows", "each", "hf", "mcore"}, file, where)
    for prefix in (entry.get("hf", ""), entry.get("mcore", "")):
        for expression in _BRACES.findall(prefix):
            _expression(file, where, expression)
    if not entry.get("rows"):
        _fail(file, where, "places no row group")
    return Place(tuple(entry["rows"]), entry.get("each"), entry.get("hf", ""), entry.get("mcore", ""))


def _check_placed(
    file: Path,
    places: tuple[Place, ...],
    rows: MappingOf[str, tuple[Row, ...]],
    variants: MappingOf[str, tuple[str, ...]],
    layers: MappingOf[str, Selector],
) -> None:
    placed = {name for place in places for name in place.rows}
    for name in sorted(placed - rows.keys() - variants.keys()):
        _fail(file, "[[place]]", f"places '{name}', which is no row group and no variant")
    for variant, groups in variants.items():
        if unknown := [group for group in groups if group not in rows]:
            _fail(file, f"[variants] {variant}", f"names unknown row groups {', '.join(unknown)}")
        placed |= set(groups)
    for name in sorted(rows.keys() - placed):
        _fail(file, f"group {name}", "the row group is placed nowhere")
    for place in places:
        if place.each is not None and place.each not in layers:
            _fail(file, "[[place]]", f"each = '{place.each}' is no name of [layers]")


def _selector(file: Path, name: str, value: object) -> Selector:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 2:
        for expression in value:
            _expression(file, f"[layers] {name}", expression)
        return (value[0], value[1])
    return _fail(file, f"[layers] {name}", "is neither [first, last] nor a selection in words")


def _defaults(file: Path, table: MappingOf[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """``key = { value = ..., source = "class and line" }``; a value "=expr" is evaluated when it is needed."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, entry in table.items():
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            _fail(file, f"[defaults] {key}", "needs exactly value and source (the class and line it comes from)")
        values[key], sources[key] = entry["value"], entry["source"]
    return values, sources


def _mtp(file: Path, table: MappingOf[str, Any] | None) -> MtpRule | None:
    if table is None:
        return None
    _known(table, {"count", "present", "known_absent"}, file, "[mtp]")
    return MtpRule(tuple(table["count"]), _text(file, "[mtp]", table, "present"), table.get("known_absent"))


def _names(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]


def _text(file: Path, where: str, table: MappingOf[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str):
        _fail(file, where, f"'{key}' is missing or no text")
    return value


def _expression(file: Path, where: str, expression: object) -> None:
    if not isinstance(expression, str):
        _fail(file, where, f"{expression!r} stands where an expression in quotes is needed")
    try:
        check_expression(expression)
    except MappingError as error:
        _fail(file, where, str(error))


def _known(table: MappingOf[str, Any], known: set[str], file: Path, where: str) -> None:
    if unknown := sorted(table.keys() - known):
        _fail(file, where, f"unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _fail(file: Path, where: str, what: str) -> NoReturn:
    raise MappingError(what, where=f"{file}: {where}", next_step="docs/mapping-format.md describes the grammar")
