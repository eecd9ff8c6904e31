"""TOML -> Mapping. Whatever can be checked without a config is checked here; errors name file, group and row."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingOf
from pathlib import Path
from typing import Any

from mtpconvert.errors import MappingError
from mtpconvert.mapping.dialect import load_dialect
from mtpconvert.mapping.kinds import load_kinds
from mtpconvert.mapping.layers import Selector, check_selector
from mtpconvert.mapping.load_rows import load_rows
from mtpconvert.mapping.model import Mapping, MtpRule, Place, Row
from mtpconvert.mapping.spelling import load_spellings
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
from mtpconvert.mapping.versions import load_unsupported

SCHEMA = 1
_TOP_KEYS = {
    "schema", "architecture", "mcore_model", "evidence", "include", "dims", "defaults", "layers", "place", "rows",
    "variants", "mtp", "arguments", "unsupported", "dialect", "text", "passthrough",
    "spelling", "kinds",
}  # fmt: skip
_PRESENT = re.compile(r"[^{}]*\{(?:[A-Za-z_][\w.]*\+)?i\}[^{}]*")


def load_mapping(file: Path, shared: Path | None = None) -> Mapping:
    """Read and check one mapping file. ``shared``: where included files are that do not stand beside it.

    Raises MappingError naming file, group and row.
    """
    table = read_toml(file)
    known(table, _TOP_KEYS, file, "top level")
    if table.get("schema") != SCHEMA:
        fail(file, "top level", f"schema is {table.get('schema')!r}, this version reads {SCHEMA}")
    if table.get("mcore_model", "GPTModel") != "GPTModel":
        fail(file, "top level", f"mcore_model is {table['mcore_model']!r}, only GPTModel is known")
    rows = load_rows(file, table, shared or file.parent / "_shared")
    variants = {
        name: texts_of(groups, file, f"[variants] {name}")
        for name, groups in table_of(table.get("variants", {}), file, "[variants]").items()
    }
    layers: dict[str, Selector] = {}
    for name, value in table_of(table.get("layers", {}), file, "[layers]").items():
        layers[name] = _selector(file, name, value, layers)
    entries = tables_of(table.get("place", []), file, "[[place]]")
    places = tuple(_place(file, number, entry) for number, entry in enumerate(entries, 1))
    _check_placed(file, places, rows, variants, layers)
    defaults, sources = _defaults(file, table_of(table.get("defaults", {}), file, "[defaults]"))
    dims = table_of(table.get("dims", {}), file, "[dims]")
    for symbol, value in dims.items():
        expression(file, f"[dims] {symbol}", value)
    return Mapping(
        file=file,
        architecture=text(file, "top level", table, "architecture"),
        evidence=texts_of(table.get("evidence", []), file, "evidence"),
        dims=dims,
        defaults=defaults,
        default_sources=sources,
        layers=layers,
        places=places,
        rows=rows,
        variants=variants,
        mtp=_mtp(file, table["mtp"], _shared_by_mtp(places, rows)) if "mtp" in table else None,
        arguments=table_of(table.get("arguments", {}), file, "[arguments]"),
        unsupported=load_unsupported(file, table.get("unsupported", [])),
        dialect=load_dialect(file, table["dialect"]) if "dialect" in table else None,
        text=optional_text(file, "top level", table, "text"),
        passthrough=texts_of(table.get("passthrough", []), file, "passthrough"),
        spellings=load_spellings(file, table.get("spelling", []), places, variants),
        kinds=load_kinds(file, table.get("kinds", {}), layers),
    )


def _place(file: Path, number: int, entry: MappingOf[str, Any]) -> Place:
    where = f"place {number}"
    known(entry, {"rows", "each", "hf", "mcore"}, file, where)
    each = optional_text(file, where, entry, "each")
    prefixes = {key: optional_text(file, where, entry, key) or "" for key in ("hf", "mcore")}
    for key, prefix in prefixes.items():
        inside = BRACES.findall(prefix)
        for value in inside:
            expression(file, where, value)
        numbered = any("i" in re.split(r"[*+/-]", value.replace(" ", "")) for value in inside)
        # Qwen's MTP has one projection and one set of norms, whatever the depth; a second layer is no bijection then.
        shared = key == "hf" and prefix == "mtp."
        if numbered != (each is not None) and not shared:
            what = "needs {i}, the layer's number" if each is not None else "has {i}, and no 'each' gives it a number"
            fail(file, where, f"{key} = '{prefix}' {what}")
    rows = texts_of(entry.get("rows", []), file, f"{where}, rows")
    if not rows:
        fail(file, where, "places no row group")
    return Place(rows, each, prefixes["hf"], prefixes["mcore"])


def _check_placed(
    file: Path,
    places: tuple[Place, ...],
    rows: MappingOf[str, tuple[Row, ...]],
    variants: MappingOf[str, tuple[str, ...]],
    layers: MappingOf[str, Selector],
) -> None:
    placed = {name for place in places for name in place.rows}
    for name in sorted(placed - rows.keys() - variants.keys()):
        fail(file, "[[place]]", f"places '{name}', which is no row group and no variant")
    for variant, groups in variants.items():
        if variant in rows:
            fail(file, f"[variants] {variant}", "has the name of a row group")
        if variant not in placed:
            fail(file, f"[variants] {variant}", "the variant is placed nowhere")
        if unknown := [group for group in groups if group not in rows]:
            fail(file, f"[variants] {variant}", f"names unknown row groups {', '.join(unknown)}")
        if len(groups) < 2:
            fail(file, f"[variants] {variant}", "needs two row groups or more to choose from")
        placed |= set(groups)
    for name in sorted(rows.keys() - placed):
        fail(file, f"group {name}", "the row group is placed nowhere")
    for place in places:
        if place.each is not None and place.each not in layers:
            fail(file, "[[place]]", f"each = '{place.each}' is no name of [layers]")


def _selector(file: Path, name: str, value: object, earlier: MappingOf[str, Selector]) -> Selector:
    if isinstance(value, str):
        try:
            check_selector(value, earlier)
        except MappingError as error:
            fail(file, f"[layers] {name}", error.what)
        return value
    if isinstance(value, list) and len(value) == 2:
        first, last = (expression(file, f"[layers] {name}", one) for one in value)
        return (first, last)
    return fail(file, f"[layers] {name}", "is neither [first, last] nor a selection in words")


def _defaults(file: Path, table: MappingOf[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """``key = { value = ..., source = "class and line" }``; a value "=expr" is evaluated when it is needed."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, entry in table.items():
        where = f"[defaults] {key}"
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            fail(file, where, "needs exactly value and source (the class and line it comes from)")
        values[key], sources[key] = entry["value"], text(file, where, entry, "source")
        if isinstance(values[key], str) and values[key].startswith("="):
            expression(file, where, values[key][1:])
    return values, sources


def _shared_by_mtp(places: tuple[Place, ...], rows: MappingOf[str, tuple[Row, ...]]) -> tuple[str, ...]:
    """HF tensors of places that stand in every MTP layer, and have one name for all of them."""
    shared = [place for place in places if place.each is not None and not BRACES.search(place.hf)]
    return tuple(place.hf + name for place in shared for group in place.rows for row in rows[group] for name in row.hf)


def _mtp(file: Path, value: object, shared: tuple[str, ...]) -> MtpRule:
    table = table_of(value, file, "[mtp]")
    known(table, {"count", "no_count", "default", "present", "known_absent"}, file, "[mtp]")
    count = texts_of(table.get("count", []), file, "[mtp] count")
    no_count = optional_text(file, "[mtp]", table, "no_count")
    if bool(count) == bool(no_count):
        keys = "config keys" if count else "no config key"
        what = "says that there is none" if count else "does not say why"
        fail(file, "[mtp]", f"'count' names {keys}, and 'no_count' {what}")
    default = _mtp_default(file, table.get("default"), count)
    absent = optional_text(file, "[mtp]", table, "known_absent")
    if absent is not None:
        if "present" in table:
            fail(file, "[mtp]", "'known_absent' says that no MTP is published: 'present' has nothing to name")
        return MtpRule(count, None, absent, no_count, default)
    present = text(file, "[mtp]", table, "present")
    if not _PRESENT.fullmatch(present):
        fail(file, "[mtp]", f"present = '{present}' needs the layer's number once, as {{i}} or {{some_key+i}}")
    return MtpRule(count, present, None, no_count, default, shared)


def _mtp_default(file: Path, value: object, count: tuple[str, ...]) -> tuple[int, str] | None:
    """``default = { value = 1, source = "class" }`` of [mtp]."""
    if value is None:
        return None
    table = table_of(value, file, "[mtp] default")
    number = table.get("value")
    if set(table) != {"value", "source"} or type(number) is not int or number < 1 or not count:
        fail(file, "[mtp] default", "needs exactly value, a number from 1 on, and source, and a key in 'count'")
    return number, text(file, "[mtp] default", table, "source")
