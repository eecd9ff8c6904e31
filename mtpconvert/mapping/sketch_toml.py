"""The TOML of a drafted mapping: what could be placed, and one marked line for what could not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpconvert.mapping.layers import asked_of_lists
from mtpconvert.mapping.model import language_config
from mtpconvert.mapping.mtp import COUNT_KEYS
from mtpconvert.mapping.sketch import Candidate, Sketch
from mtpconvert.mapping.sketch_places import Spot, places_of
from mtpconvert.mapping.sketch_symbols import Symbols

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Counts:
    """Tensors that rows place, those that are set aside as of another part, all, and name patterns left over."""

    placed: int
    aside: int
    tensors: int
    patterns: int


@dataclass(frozen=True, slots=True)
class Model:
    """config.json as the draft reads it. ``text``: the table of the language model, None where it is the top."""

    config: Mapping[str, Any]
    text: str | None

    @property
    def language(self) -> Mapping[str, Any]:
        return self.config if self.text is None else language_config(self.config, self.text)

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "NewForCausalLM"


def draft_toml(result: Sketch, model: Model, count: int, remarks: str) -> tuple[str, Counts]:
    """The draft's text and what it covers. ``count``: of trunk layers. ``remarks`` end it as comments."""
    config = model.language
    places, symbols = places_of(result, config, count), Symbols()
    groups = [f"{name} = [\n{_rows(rows, symbols)}]" for name, rows in places.groups.items()]
    placed, tensors, missing = _tally(result)
    towers = [site for site, _ in result.sites if site.tower]
    aside = sum(len(site.names) for site in towers)
    names = ", ".join(one.mapping.architecture for one in result.used) or "none"
    said = f"{placed} of {tensors + aside} tensors placed" + (f", {aside} set aside" if aside else "")
    head = [
        f"# Drafted by 'mtpconvert mappings new': {said}, by rows of {names}.",
        "# Names and shapes agree with config.json. That says nothing about what the numbers mean: hold every row",
        "# against the modelling code, and name sources under evidence (CONTRIBUTING.md, 'Add an architecture').",
        "schema       = 1",
        f"architecture = {json.dumps(model.architecture)}",
        'mcore_model  = "GPTModel"',
        "evidence     = []",
        *([] if model.text is None else [f"text         = {json.dumps(model.text)}"]),
        *([] if not towers else _passthrough([site.hf for site in towers], aside)),
        *missing,
    ]
    tables = {
        "[dims]": [f"{name} = {json.dumps(expression)}" for name, expression in symbols.dims.items()],
        "[defaults]": [_default(key, *entry) for key, entry in symbols.defaults.items()],
        "[kinds]": _kinds(places.layers, config, count),
        "[layers]": [f"{name} = {selector}" for name, selector in places.layers.items()],
        "[mtp]": _mtp(result, model),
    }
    blocks = ["\n".join(head), *("\n".join([title, *lines]) for title, lines in tables.items() if lines)]
    blocks += [_place(spot, rows) for spot, rows in places.spots.items()]
    blocks += ["\n".join(["[rows]", *groups])] if groups else []
    blocks += ["\n".join(f"# {line}".rstrip() for line in remarks.splitlines())] if remarks else []
    return "\n\n".join(blocks) + "\n", Counts(placed, aside, tensors + aside, len(missing))


def _passthrough(prefixes: list[str], count: int) -> list[str]:
    """Names say that these are no part of the language model; whoever finishes the draft decides."""
    return [
        f"passthrough  = {json.dumps(prefixes)}   # {count} tensors that are set aside and come back, not converted"
    ]


def _kinds(selectors: Mapping[str, str], config: Mapping[str, Any], count: int) -> list[str]:
    """What stands in the lists that selectors ask, as far as the trunk goes."""
    keys = dict.fromkeys(key for selector in selectors.values() for key, _ in asked_of_lists(selector))
    return [f"{key} = {json.dumps(sorted(set(config[key][:count])))}" for key in keys]


def _rows(rows: list[Candidate], symbols: Symbols) -> str:
    return "".join(f"  {_row(candidate, symbols)},\n" for candidate in rows)


def _row(candidate: Candidate, symbols: Symbols) -> str:
    row, known = candidate.row, candidate.known
    entries: dict[str, Any] = {
        "op": row.op,
        "of": row.of,
        "experts": None if row.experts is None else symbols.expression(row.experts, known),
        "hf": row.hf[0] if len(row.hf) == 1 else list(row.hf),
        "mcore": (row.mcore[0] if len(row.mcore) == 1 else list(row.mcore)) or None,
        "source": row.source,
        "dims": [symbols.expression(one, known) for one in row.dims],
        "codec": row.codec,
        "dtype": None if row.dtype is None else _DTYPES[row.dtype],
        "reason": row.reason,
        "when": None if row.when is None else symbols.expression(row.when, known),
        "unless": None if row.unless is None else symbols.expression(row.unless, known),
    }
    return (
        "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entries.items() if value is not None) + " }"
    )


def _default(key: str, value: Any, source: str) -> str:
    name = json.dumps(key) if "." in key else key
    return f"{name} = {{ value = {json.dumps(value)}, source = {json.dumps(source)} }}"


def _place(spot: Spot, groups: list[str]) -> str:
    each = [] if spot.each is None else [f'each  = "{spot.each}"']
    prefixes = [f"{key} = {json.dumps(value)}" for key, value in (("hf   ", spot.hf), ("mcore", spot.mcore)) if value]
    return "\n".join(["[[place]]", f"rows  = {json.dumps(groups)}", *each, *prefixes])


def _mtp(result: Sketch, model: Model) -> list[str]:
    """Lines of the [mtp] table: the count keys that the config has, and where layer ``{i}`` stands."""
    mtp = [site for site, classes in result.sites if site.mtp and any(one.placed for one in classes)]
    present = [site.hf for site in mtp if site.numbered]
    if not present:
        return []
    tables = {f"{key}.": table for key, table in model.config.items() if isinstance(table, Mapping)}
    own = {} if model.text is None else {f"{model.text}.": tables[f"{model.text}."]}
    levels = {**own, "": model.config, **tables}
    keys = [path + key for path, table in levels.items() for key in table if key in COUNT_KEYS]
    usual = next(iter(own), "") + COUNT_KEYS[0]
    return [f"count   = {json.dumps(keys or [usual])}", f"present = {json.dumps(present[0])}"]


def _tally(result: Sketch) -> tuple[int, int, list[str]]:
    """(tensors placed, all tensors, a line "# not placed: model.layers.{i}.x.weight [4, 4] BF16 x3" for each other)."""
    placed = tensors = 0
    missing: Counter[tuple[str, str, str]] = Counter()
    for site, classes in result.sites:
        for one in [] if site.tower else classes:
            named = {name for candidate in one.placed for name in candidate.row.hf}
            for tail, spec in site.layers[one.numbers[0]].items():
                number = len(one.numbers) * max(spec.experts, 1)
                tensors += number
                if tail in named:
                    placed += number
                else:
                    missing[site.hf + tail, str(list(spec.shape)), spec.dtype] += number
    lines = [f"# not placed: {name} {shape} {dtype} x{number}" for (name, shape, dtype), number in missing.items()]
    return placed, tensors, lines
