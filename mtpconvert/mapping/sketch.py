"""A first draft of a mapping: rows of all known mappings that fit the tensors of a checkpoint, by name and by shape.

A row fits where its HF names are there and its dims, evaluated on the config, give their shapes. Groups of which all
rows fit come first, so that a norm goes where the rest of its group goes. That names and shapes agree says nothing
about what the numbers mean; a person has to check that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtpconvert.errors import MtpConvertError
from mtpconvert.mapping.dims import Scope, evaluate
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.mapping.model import Place, Row
from mtpconvert.mapping.ops import ALIASES, OPS
from mtpconvert.mapping.sites import Found, Site, Tensors
from mtpconvert.tensors import Shape, Tile

_BLOCK = "transformer_layer."  # of an MTP layer: megatron/core/transformer/multi_token_prediction.py

_NAME = re.compile(r"[A-Za-z_][\w.]*")
# transformers configuration_*.py: attribute_map and the families' own names
_SYNONYMS = (("num_experts", "num_local_experts", "n_routed_experts"), ("n_shared_experts", "num_shared_experts"))


@dataclass(frozen=True)
class Known:
    """A mapping at hand, with the config read by its defaults and symbols."""

    mapping: MappingFile
    scope: Scope

    def holds(self, row: Row) -> bool:
        """Whether the row's ``when`` and ``unless`` let it apply."""
        return (row.when is None or self.scope.truth(row.when)) and (
            row.unless is None or not self.scope.truth(row.unless)
        )


@dataclass(frozen=True)
class Candidate:
    """One row where it could stand: ``mcore`` is the prefix of its Megatron names."""

    known: Known
    row: Row
    mcore: str


@dataclass
class Sketched:
    """A class of layers with the rows that fit it."""

    numbers: list[int]
    placed: list[Candidate]


@dataclass
class Sketch:
    """``sites``: each site with its classes of layers. ``used``: mappings whose rows were taken, the best first."""

    sites: list[tuple[Site, list[Sketched]]]
    used: list[Known] = field(default_factory=list)


def known_mapping(mapping: MappingFile, config: Mapping[str, Any]) -> Known:
    """``mapping`` with what its symbols are on this config; those that the config gives no value stay undefined.

    A key that the config has under another of its usual names is read under that.
    """
    dims = {symbol: _NAME.sub(lambda match: _usual(match[0], config), one) for symbol, one in mapping.dims.items()}
    mapping = replace(mapping, dims=dims)
    scope = Scope(config, mapping.defaults, {"mtp_layers": 0})
    for symbol, expression in mapping.dims.items():
        try:
            scope.symbols[symbol] = evaluate(expression, scope)
        except MtpConvertError:
            continue  # a size of a module that this model lacks; a row that needs it does not fit
    return Known(mapping, scope)


def _usual(key: str, config: Mapping[str, Any]) -> str:
    for names in _SYNONYMS:
        if key in names and config.get(key) is None:
            return next((name for name in names if config.get(name) is not None), key)
    return key


def sketch(sites: list[Site], known: list[Known]) -> Sketch:
    """Fit rows of ``known``, the closest mapping first, to every site."""
    result = Sketch([])
    root = next((root_of(site.hf) for site in sites if site.hf and not (site.mtp or site.other)), "model.")
    for site in sites:
        groups = [] if site.other else [group for one in known for group in _groups(one, site, root)]
        classes = [_fit(numbers, tensors, groups) for numbers, tensors in site.classes()]
        result.sites.append((site, classes))
    taken = {id(c.known) for _, classes in result.sites for one in classes for c in one.placed}
    result.used = [one for one in known if id(one) in taken]
    return result


def root_of(prefix: str) -> str:
    """What stands before the layers: "model.language_model." of "model.language_model.layers.{i}."."""
    return prefix[: prefix[: prefix.index("{") - 1].rfind(".") + 1]


def _groups(known: Known, site: Site, root: str) -> Iterator[list[Candidate]]:
    """Row groups of a mapping that may stand at ``site``, with where they would go.

    ``root``: the prefix of the model at hand, in place of the mapping's own.
    """
    mapping = known.mapping
    own = next((root_of(place.hf) for place in mapping.places if place.mcore.startswith("decoder.layers.")), root)

    def named(name: str) -> str:
        return root + name.removeprefix(own) if name.startswith(own) else name

    for place in mapping.places:
        for name in place.rows:
            for group in mapping.variants.get(name, (name,)):
                prefix = _target(place, site)
                if prefix is None:
                    continue
                yield [Candidate(known, _moved(row, place, site, named), prefix) for row in mapping.rows[group]]


def _moved(row: Row, place: Place, site: Site, named: Callable[[str], str]) -> Row:
    """The row with the names that it would have at ``site``; outside the layers they are whole."""
    hf = row.hf if site.hf else tuple(named(place.hf + one) for one in row.hf)
    return replace(row, hf=hf, source=None if row.source is None else named(row.source))


def _target(place: Place, site: Site) -> str | None:
    """The Megatron prefix of a place's rows at ``site``; None where they cannot stand there."""
    if not site.hf:
        return place.mcore if place.each is None else None
    if place.each is None:
        return None
    if place.mcore.startswith("mtp."):
        return place.mcore if site.mtp else None
    return f"mtp.layers.{{i}}.{_BLOCK}" if site.mtp else place.mcore


def _fit(numbers: list[int], tensors: Tensors, groups: list[list[Candidate]]) -> Sketched:
    """Rows for one class of layers: of groups that fit whole, then of others, then those whose condition is off."""
    left = dict(tensors)
    result = Sketched(numbers, [])
    for candidate in _in_order(tensors, groups):
        names = candidate.row.hf
        if all(name in left for name in names) and _fits(candidate, left):
            row = candidate.row
            kept = row if candidate.known.holds(row) else replace(row, when=None, unless=None)
            result.placed.append(replace(candidate, row=kept))
            for name in names:
                del left[name]
    return result


def _in_order(tensors: Tensors, groups: list[list[Candidate]]) -> Iterator[Candidate]:
    def share(group: list[Candidate]) -> float:
        needed = [c for c in group if c.row.mcore and c.known.holds(c.row)]
        return sum(all(name in tensors for name in c.row.hf) for c in needed) / max(len(needed), 1)

    ranked = sorted(groups, key=share, reverse=True)  # stable: the closest mapping first
    yield from (c for group in ranked for c in group if c.known.holds(c.row))
    yield from (c for group in ranked for c in group if not c.known.holds(c.row))


def _fits(candidate: Candidate, tensors: Tensors) -> bool:
    """Whether the row's dims give the shapes, and its contract the dtype, of the tensors that it names."""
    row = candidate.row
    found = {name: tensors[name] for name in row.hf}
    try:
        shapes = dict(_shapes(row, candidate.known.scope))
        experts = evaluate(row.experts, candidate.known.scope) if row.experts is not None else 0
    except MtpConvertError:
        return False
    return all(_agrees(one, shapes.get(name), row, experts) for name, one in found.items())


def _agrees(found: Found, shape: Shape | None, row: Row, experts: int) -> bool:
    return found.shape == shape and found.experts == experts and row.dtype in (None, found.dtype)


def _shapes(row: Row, scope: Scope) -> Iterable[tuple[str, Shape]]:
    """The HF shapes that the row stands for; of one expert where it stacks them."""
    dims = tuple(evaluate(expression, scope) for expression in row.dims)
    if any(size < 1 for size in dims):
        return []
    if row.op in ALIASES or row.op == "aside":
        return [(row.hf[0], dims)]
    op = OPS[row.of if row.op == "expert_stack" and row.of is not None else row.op]
    pieces = op(row.hf, row.mcore, dims, dims[0] if dims else 1)
    return [(piece.hf.tensor, piece.hf.shape) for piece in pieces if isinstance(piece, Tile)]
