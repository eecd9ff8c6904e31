"""Row groups and places of a drafted mapping: rows that stand in the same spots share a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconvert.mapping.sites import Site
from mtpconvert.mapping.sketch import Candidate, Sketch, Sketched
from mtpconvert.mapping.sketch_layers import selectors


@dataclass(frozen=True, slots=True)
class Spot:
    """One [[place]]: ``each`` is a name of [layers], None outside the layers."""

    each: str | None
    hf: str
    mcore: str


@dataclass
class Places:
    """``groups``: name -> rows. ``spots``: the groups that stand in each. ``layers``: name -> selector as TOML."""

    groups: dict[str, list[Candidate]] = field(default_factory=dict)
    spots: dict[Spot, list[str]] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)


def places_of(result: Sketch, config: Mapping[str, Any], count: int) -> Places:
    """Sort the rows of all sites into groups. Rows that only some MTP layers have are taken out of ``result``."""
    places = Places()
    rows: dict[tuple[Any, ...], Candidate] = {}
    where: dict[tuple[Any, ...], list[Spot]] = {}
    for site, classes in result.sites:
        if not any(one.placed for one in classes):
            continue
        names = _class_names(site, classes, config, count, places)
        for one, eaches in zip(classes, names, strict=True):
            for candidate in one.placed:
                key = _key(candidate)
                rows.setdefault(key, candidate)
                stands = where.setdefault(key, [])
                stands += [spot for each in eaches if (spot := Spot(each, site.hf, candidate.mcore)) not in stands]
    by_spots: dict[tuple[Spot, ...], list[Candidate]] = {}
    for key, stands in where.items():
        by_spots.setdefault(tuple(stands), []).append(rows[key])
    for spots, members in by_spots.items():
        name = _group_name(spots, places)
        places.groups[name] = members
        for spot in spots:
            places.spots.setdefault(spot, []).append(name)
    return places


def _key(candidate: Candidate) -> tuple[Any, ...]:
    row = candidate.row
    return id(candidate.known), row.op, row.hf, row.mcore, row.dims, row.when, row.unless, row.codec


def _class_names(
    site: Site, classes: list[Sketched], config: Mapping[str, Any], count: int, places: Places
) -> list[list[str | None]]:
    """For each class of layers its names in [layers], which it adds."""
    if not site.hf:
        return [[None] for _ in classes]
    if site.mtp:
        _keep_common(classes)
        places.layers["mtp"] = '["0", "mtp_layers"]'
        return [["mtp"] for _ in classes]
    labels = _labels(classes)
    numbers = [one.numbers for one in classes]
    chosen = selectors(list(zip(labels, numbers, strict=True)), config, count)
    places.layers |= {name: selector for name, (_, selector) in chosen.items()}
    return [[name for name, (of, _) in chosen.items() if of == label] for label in labels]


def _keep_common(classes: list[Sketched]) -> None:
    """MTP layers have one set of rows: those that every layer has."""
    counts = Counter(_key(candidate) for one in classes for candidate in one.placed)
    for one in classes:
        one.placed = [candidate for candidate in one.placed if counts[_key(candidate)] == len(classes)]


def _labels(classes: list[Sketched]) -> list[str]:
    if len(classes) == 1:
        return ["all"]
    kinds = ["moe" if any("{e}" in c.row.hf[0] for c in one.placed) else "dense" for one in classes]
    many = Counter(kinds)
    return [kind if many[kind] == 1 else f"{kind}_kind{at}" for at, kind in enumerate(kinds)]


def _group_name(spots: tuple[Spot, ...], places: Places) -> str:
    """After the layers it stands in: "root", "layer" for all of the trunk, "moe_mtp", "mtp_head"."""
    eaches = [spot.each for spot in spots]
    trunk = [name for name in places.layers if name != "mtp"]
    if eaches == [None]:
        name = "root"
    elif all(each == "mtp" for each in eaches):
        name = "mtp" if spots[0].mcore.endswith("transformer_layer.") else "mtp_head"
    elif len(trunk) == sum(each in trunk for each in eaches):
        name = "layer_mtp" if "mtp" in eaches else "layer"
    else:
        name = "_".join(str(each) for each in eaches)
    number, chosen = 1, name
    while chosen in places.groups:
        number += 1
        chosen = f"{name}_{number}"
    return chosen
