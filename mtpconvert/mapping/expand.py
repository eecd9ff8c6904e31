"""Mapping + config -> every tile of the model, and what each side must hold for them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtpconvert.errors import ConfigError, MappingError, NotABijectionError
from mtpconvert.mapping.dims import Scope, evaluate
from mtpconvert.mapping.layers import select_layers
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.mapping.model import Row
from mtpconvert.mapping.ops import ALIASES, OPS, Op, expert_stack
from mtpconvert.mapping.prove import Proof, prove
from mtpconvert.tensors import Block, Copy, Fill, Shape, Tile

MOST_TILES = 500_000  # ten times DeepSeek-V3's; a config with a slip in a count would fill the memory
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that the expansion names. ``mtp``: its MTP layer, or None. ``dtype``: the row's contract, or None."""

    name: str
    shape: Shape
    dtype: str | None
    row: str
    mtp: int | None


@dataclass
class Expansion:
    """``hf`` holds the tensors that must be there; ``aliases`` and ``asides`` may be absent.

    The source of every alias is a tensor of ``hf``: chains (head copy -> tied head -> embedding) are followed.
    """

    tiles: list[Tile] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    hf: dict[str, Expected] = field(default_factory=dict)
    mcore: dict[str, Expected] = field(default_factory=dict)
    aliases: dict[str, tuple[Expected, Copy]] = field(default_factory=dict)
    asides: dict[str, tuple[Expected, str]] = field(default_factory=dict)
    codecs: dict[str, str] = field(default_factory=dict)  # HF tensor -> the codec of its row
    variants: dict[str, str] = field(default_factory=dict)  # "variant @ prefix" -> the group that applies
    more_rows: dict[str, list[str]] = field(default_factory=dict)  # tensor -> rows that name it after the first one

    def rows_of(self, tensor: str) -> list[str]:
        """Where the mapping names the tensor, as far as it does."""
        first = [side[tensor].row for side in (self.hf, self.mcore) if tensor in side]
        return first + self.more_rows.get(tensor, [])


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A row whose dims are numbers; they are the same for every layer."""

    row: Row
    dims: Shape
    op: Op | None


def expand(mapping: MappingFile, scope: Scope, padded_vocab: int, hf_present: Container[str] | None) -> Expansion:
    """Expand every row for every layer of its places.

    ``scope`` must hold the symbol ``mtp_layers``. ``padded_vocab``: vocabulary rows on the Megatron side.
    ``hf_present``: the HF names of the source or of the reference, which choose among variants (None: the first).
    Raises ConfigError or MappingError naming file, group and row.
    """
    for symbol, expression in mapping.dims.items():
        # Symbols of modules that this model lacks (an MoE size of a dense one) stay undefined until a row needs them.
        try:
            scope.symbols[symbol] = evaluate(expression, scope)
            scope.undefined.pop(symbol, None)
        except ConfigError as error:
            scope.symbols.pop(symbol, None)
            scope.undefined[symbol] = error
    layers = select_layers(mapping.layers, scope)
    compiled: dict[str, list[_Compiled]] = {}
    result = Expansion()
    for place in mapping.places:
        numbers: Sequence[int | None] = [None] if place.each is None else layers[place.each]
        for number in numbers:
            hf, mcore = (_prefix(text, number, scope) for text in (place.hf, place.mcore))
            mtp = number if mcore.startswith("mtp.") else None
            for name in place.rows:
                group = _choose(mapping, name, hf, scope, hf_present, compiled)
                if name in mapping.variants:
                    result.variants[f"{name} @ {hf}"] = group
                for entry in _compile(mapping, group, scope, compiled):
                    _instantiate(entry, hf, mcore, mtp, padded_vocab, result)
    _resolve_aliases(result)
    return result


def proven(mapping: MappingFile, expansion: Expansion) -> Proof:
    """``prove`` the expansion; a NotABijectionError names the file and the rows at fault too."""
    try:
        return prove(expansion.tiles, expansion.fills)
    except NotABijectionError as error:
        words = (error.where or "").split()
        rows = dict.fromkeys(row for word in words for row in expansion.rows_of(word))
        error.where = f"{error.where} ({mapping.file}; {'; '.join(rows)})"
        raise


def _resolve_aliases(result: Expansion) -> None:
    """Point every alias at the tensor of ``hf`` that it repeats. Raises MappingError where there is none."""
    names = [*result.hf, *result.aliases, *result.asides]
    if len(names) > len(set(names)):
        entry = next(e for e, _ in [*result.aliases.values(), *result.asides.values()] if names.count(e.name) > 1)
        raise MappingError(f"{entry.name} has a second row, which gives it another meaning", where=entry.row)
    for name, (entry, copy) in result.aliases.items():
        source, seen = copy.source, {name}
        while source in result.aliases and source not in seen:
            seen.add(source)
            source = result.aliases[source][1].source
        if source not in result.hf:
            raise MappingError(
                f"{name} repeats {copy.source}, which no row relates to a Megatron tensor", where=entry.row
            )
        if result.hf[source].shape != entry.shape:
            raise MappingError(
                f"{name} is {list(entry.shape)} and repeats {source}, which is {list(result.hf[source].shape)}",
                where=entry.row,
            )
        result.aliases[name] = (entry, replace(copy, source=source))


def _instantiate(entry: _Compiled, hf: str, mcore: str, mtp: int | None, padded_vocab: int, result: Expansion) -> None:
    row = entry.row
    names = [hf + name for name in row.hf]
    if row.codec is not None:
        result.codecs[names[0]] = row.codec
    if entry.op is None:
        expected = Expected(names[0], entry.dims, row.dtype, row.place, mtp)
        if names[0] in result.aliases or names[0] in result.asides:
            raise MappingError(f"{names[0]} has a second row, which gives it another meaning", where=row.place)
        if row.op == "aside":
            result.asides[names[0]] = (expected, row.reason or "")
        else:
            assert row.source is not None  # load: an alias row has one
            result.aliases[names[0]] = (expected, Copy(names[0], row.source, entry.dims, row.op == "tie"))
        return
    for piece in entry.op(names, [mcore + name for name in row.mcore], entry.dims, padded_vocab):
        if isinstance(piece, Copy):
            raise MappingError("an op of OPS yielded a Copy", where=row.place)
        block = piece.mcore
        _expect(result.mcore, block, row, mtp, result.more_rows)
        if isinstance(piece, Fill):
            result.fills.append(piece)
            continue
        result.tiles.append(piece)
        if len(result.tiles) > MOST_TILES:
            raise ConfigError(
                f"config.json describes a model of more than {MOST_TILES:,} tensors",
                where=row.place,
                next_step="check its counts of layers and experts",
            )
        _expect(result.hf, piece.hf, row, mtp, result.more_rows)


def _expect(
    side: dict[str, Expected], block: Block, row: Row, mtp: int | None, more_rows: dict[str, list[str]]
) -> None:
    known = side.get(block.tensor)
    if known is None:
        side[block.tensor] = Expected(block.tensor, block.shape, row.dtype, row.place, mtp)
    elif known.row != row.place and row.place not in more_rows.get(block.tensor, []):
        more_rows.setdefault(block.tensor, []).append(row.place)


def _compile(
    mapping: MappingFile, group: str, scope: Scope, compiled: dict[str, list[_Compiled]]
) -> Sequence[_Compiled]:
    """The rows of a group that apply (``when``, ``unless``), with dims evaluated."""
    if group not in compiled:
        compiled[group] = [
            _compile_row(row, scope)
            for row in mapping.rows[group]
            if (row.when is None or scope.truth(row.when)) and (row.unless is None or not scope.truth(row.unless))
        ]
    return compiled[group]


def _compile_row(row: Row, scope: Scope) -> _Compiled:
    try:
        dims = tuple(evaluate(expression, scope) for expression in row.dims)
        if any(size < 1 for size in dims):
            raise ConfigError(
                f"dims = {list(row.dims)} are {list(dims)}, and a tensor has no such shape",
                next_step="check these sizes in config.json, or give the row a 'when'",
            )
        if row.op in ALIASES or row.op == "aside":
            return _Compiled(row, dims, None)
        if row.op == "expert_stack":
            assert row.of is not None and row.experts is not None  # load checked both
            return _Compiled(row, dims, expert_stack(OPS[row.of], evaluate(row.experts, scope)))
        return _Compiled(row, dims, OPS[row.op])
    except ConfigError as error:
        raise ConfigError(error.what, where=row.place, next_step=error.next_step) from error


def _choose(
    mapping: MappingFile,
    name: str,
    prefix: str,
    scope: Scope,
    present: Container[str] | None,
    compiled: dict[str, list[_Compiled]],
) -> str:
    """``name`` itself for a row group; for a variant the group most of whose HF names are present under ``prefix``."""
    groups = mapping.variants.get(name)
    if groups is None:
        return name
    if present is None:
        return groups[0]

    def share(group: str) -> float:
        names = [n.replace("{e}", "0") for entry in _compile(mapping, group, scope, compiled) for n in entry.row.hf]
        return sum(prefix + n in present for n in names) / max(len(names), 1)

    return max(groups, key=share)


def _prefix(text: str, number: int | None, scope: Scope) -> str:
    extra: Mapping[str, int] = {} if number is None else {"i": number}
    return _BRACES.sub(lambda match: str(evaluate(match[1], scope, **extra)), text)
