"""(mapping, config, source inventory, reference) -> Plan: everything that will move, decided from headers alone.

The closed world is held here: every source tensor ends in a tile, an alias to be compared, an aside, or a named
drop; every target tensor has its tiles. Anything else raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtpconvert.errors import UsageError
from mtpconvert.garbage import no_gc
from mtpconvert.mapping import check
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.expand import Expansion, Expected, expand, proven
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.mapping.mtp import (
    MCORE_MTP,
    MtpCount,
    agree,
    declared_mtp,
    homeless_in_mcore,
    looks_like_mtp,
    mtp_count,
    present_in_hf,
    present_in_mcore,
)
from mtpconvert.mapping.prove import Proof
from mtpconvert.tensors import Block, Copy, Fill, Inventory, TensorSpec, Tile

OTHER_PART = "another part of the model than the language model, which is all that Megatron's GPTModel is"
Direction = Literal["hf2mcore", "mcore2hf"]


@dataclass
class Plan:
    direction: Direction
    architecture: str
    mapping_file: str
    tiles: list[Tile]
    fills: list[Fill]
    copies: list[Copy]  # hf2mcore: to be compared and left out; mcore2hf: to be written again
    asides: dict[str, str]  # HF tensor -> why Megatron has no place for it
    hf: Inventory
    mcore: Inventory
    dropped: list[TensorSpec]
    mtp: MtpCount
    proof: Proof
    defaults: dict[str, Any]
    variants: dict[str, str]
    codecs: dict[str, str]  # HF tensor -> what is computed between the two sides; every other one moves as bytes
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that tiles move."""
        source = self.hf if self.direction == "hf2mcore" else self.mcore
        moved = {tile.hf.tensor if self.direction == "hf2mcore" else tile.mcore.tensor for tile in self.tiles}
        return sum(source[name].nbytes for name in moved)

    @no_gc()
    def document(self) -> dict[str, Any]:
        """The plan as plain values: what ``plan --json`` prints; canonical, so equal plans have equal digests."""
        return {
            "schema_version": 1,
            "direction": self.direction,
            "architecture": self.architecture,
            "mapping": self.mapping_file,
            "hf": {name: [spec.dtype, list(spec.shape)] for name, spec in sorted(self.hf.items())},
            "mcore": {name: [spec.dtype, list(spec.shape)] for name, spec in sorted(self.mcore.items())},
            "tiles": [[_block(t.hf), _block(t.mcore), t.perm] for t in self.tiles],
            "fills": [_block(fill.mcore) for fill in self.fills],
            "copies": [[copy.tensor, copy.source] for copy in self.copies],
            "asides": self.asides,
            "dropped": [spec.name for spec in self.dropped],
            "variants": self.variants,
            "codecs": self.codecs,
            "defaults": self.defaults,
            "notes": self.notes,
            "totals": {
                "tiles": self.proof.tiles,
                "hf_tensors": len(self.hf),
                "mcore_tensors": len(self.mcore),
                "elements": self.proof.elements,
                "bytes": self.nbytes,
            },
            "mtp": {
                "key": self.mtp.key,
                "declared": self.mtp.declared,
                "present": self.mtp.present,
                "written": self.mtp.written,
                "tensors": self.mtp.tensors,
                "bytes": self.mtp.nbytes,
            },
        }

    def digest(self) -> str:
        """Of the document without its notes: what is said of a plan does not change it."""
        document = {key: value for key, value in self.document().items() if key != "notes"}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_to_mcore(
    mapping: MappingFile,
    config: Mapping[str, Any],
    source: Inventory,
    *,
    vocab_multiple: int,
    drop_mtp: bool = False,
    where: str = "",
) -> Plan:
    """Plan HF -> Megatron. ``vocab_multiple``: Megatron's vocabulary rows are a multiple of it.

    Raises MtpLostError, UnmappedTensorError, CheckpointError, ConfigError, MappingError, NotABijectionError.
    """
    scope = mapping.scope(config)
    declared = declared_mtp(config, mapping.mtp)
    dropped: list[TensorSpec] = []
    if drop_mtp:
        lost = mtp_names(mapping, source, config)
        dropped = [spec for name, spec in source.items() if name in lost]
        source = {name: spec for name, spec in source.items() if name not in lost}
        layers, present, note = 0, len(present_in_hf(lost, mapping.mtp, scope)), None
    else:
        found = present_in_hf(source, mapping.mtp, scope)
        layers, note = agree(declared, found, mapping.mtp, _mtp_layer(mapping, config, "hf"), where)
        present = layers
    scope.symbols["mtp_layers"] = layers
    vocab = scope.integer("vocab_size")
    expansion = expand(mapping, scope, -(-vocab // vocab_multiple) * vocab_multiple, source)
    proof = proven(mapping, expansion)
    for name, spec in source.items():
        if mapping.passes_through(name):
            expansion.asides[name] = (Expected(name, spec.shape, None, "passthrough", None), OTHER_PART)
    asides = {name: reason for name, (_, reason) in expansion.asides.items() if name in source}
    copies = [copy for name, (_, copy) in expansion.aliases.items() if name in source]
    check.hf_source(expansion, source, scope.value("num_hidden_layers"), where)
    hf = dict(source)
    mcore = check.derived(expansion, hf, "mcore", where)
    written = [spec for name, spec in mcore.items() if expansion.mcore[name].mtp is not None]
    plan = _plan("hf2mcore", mapping, scope, expansion, proof, copies, asides, hf, mcore, dropped, note)
    plan.mtp = mtp_count(mapping.mtp, declared, present, layers, written)
    return plan


def plan_to_hf(
    mapping: MappingFile,
    config: Mapping[str, Any],
    source: Inventory,
    *,
    reference: Collection[str] | None,
    before: Collection[str] = (),
    drop_mtp: bool = False,
    vocab_rows: int | None = None,
    where: str = "",
) -> Plan:
    """Plan Megatron -> HF. ``reference``: the tensor names that the HF side shall have; None: as the mapping says, and
    ``before``, the names that it once had, chooses among variants and says what was set aside.

    ``vocab_rows`` overrides the config's ``vocab_size``. Raises as ``plan_to_mcore`` does.
    """
    scope = mapping.scope(config)
    declared = declared_mtp(config, mapping.mtp)
    dropped: list[TensorSpec] = []
    found = present_in_mcore(source)
    if drop_mtp:
        dropped = [spec for name, spec in source.items() if name.startswith(MCORE_MTP)]
        source = {name: spec for name, spec in source.items() if not name.startswith(MCORE_MTP)}
        if reference is not None:
            lost = mtp_names(mapping, reference, config)
            reference = [name for name in reference if name not in lost]
        layers, note = 0, None
    else:
        found = homeless_in_mcore(found, mapping.mtp)
        layers, note = agree(declared, found, mapping.mtp, _mtp_layer(mapping, config, "mcore"), where)
    scope.symbols["mtp_layers"] = layers
    if vocab_rows is not None:
        scope.config = {**scope.config, "vocab_size": vocab_rows}
    padded = check.megatron_vocab_rows(source, scope.integer("vocab_size"), where)
    listed = before if reference is None else reference
    expansion = expand(mapping, scope, padded, listed or None)
    proof = proven(mapping, expansion)
    check.mcore_source(expansion, source, where)
    mcore = dict(source)
    hf = check.derived(expansion, mcore, "hf", where)
    copies = check.wanted_copies(expansion, reference)
    for copy in copies:
        hf[copy.tensor] = replace(hf[copy.source], name=copy.tensor)
    asides = {name: reason for name, (_, reason) in expansion.asides.items() if name in listed}
    asides |= {name: OTHER_PART for name in listed if mapping.passes_through(name)}
    if reference is not None:
        check.reference_names(reference, hf, asides, scope.value("num_hidden_layers"), where)
    written = [spec for name, spec in hf.items() if check.mtp_of(expansion, name) is not None]
    plan = _plan("mcore2hf", mapping, scope, expansion, proof, copies, asides, hf, mcore, dropped, note)
    plan.tiles = [*plan.tiles, *_alias_tiles(plan)]
    plan.mtp = mtp_count(mapping.mtp, declared, layers if not drop_mtp else len(found), layers, written)
    return plan


def _mtp_layer(
    mapping: MappingFile, config: Mapping[str, Any], side: Literal["hf", "mcore"]
) -> Callable[[int], list[str]]:
    """The function that names the tensors which an MTP layer should have on one side, were it there."""

    def names(layer: int) -> list[str]:
        scope = mapping.scope(config, {"mtp_layers": layer + 1})
        expansion = expand(mapping, scope, scope.integer("vocab_size"), None)
        entries = expansion.hf if side == "hf" else expansion.mcore
        return [entry.name for entry in entries.values() if entry.mtp == layer]

    return names


def mtp_names(mapping: MappingFile, names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """The HF tensors that ``--mtp drop`` leaves out: those of the mapping's MTP layers, and all that look so."""
    scope = mapping.scope(config)
    trunk = scope.value("num_hidden_layers")
    return _mtp_names(mapping, names, scope) | {name for name in names if looks_like_mtp(name, trunk)}


def _mtp_names(mapping: MappingFile, names: Collection[str], scope: Scope) -> set[str]:
    found = present_in_hf(names, mapping.mtp, scope)
    return {name for layer in found.values() for name in layer}


def _plan(
    direction: Direction,
    mapping: MappingFile,
    scope: Scope,
    expansion: Expansion,
    proof: Proof,
    copies: list[Copy],
    asides: dict[str, str],
    hf: Inventory,
    mcore: Inventory,
    dropped: list[TensorSpec],
    note: str | None,
) -> Plan:
    notes = [*([] if note is None else [note]), *default_notes(scope, mapping)]
    return Plan(
        direction, mapping.architecture, mapping.file.name, expansion.tiles, expansion.fills, copies, asides, hf, mcore,
        dropped, MtpCount(None, None, 0, 0, 0, 0), proof, dict(scope.used_defaults), expansion.variants,
        expansion.codecs, notes,
    )  # fmt: skip


def default_notes(scope: Scope, mapping: MappingFile, known: Collection[str] = ()) -> list[str]:
    """A line for every default that stood in for a config key, those in ``known`` left out."""
    return [
        f"config.json has no {key}: taken as {value!r} ({mapping.default_sources.get(key, 'the default of its class')})"
        for key, value in scope.used_defaults.items()
        if key not in known
    ]


def _alias_tiles(plan: Plan) -> list[Tile]:
    """The tiles of a copy's source, once more for the copy."""
    sources = {copy.source for copy in plan.copies}
    by_source: dict[str, list[Tile]] = {name: [] for name in sources}
    for tile in plan.tiles:
        if tile.hf.tensor in sources:
            by_source[tile.hf.tensor].append(tile)
    return [
        replace(tile, hf=replace(tile.hf, tensor=copy.tensor))
        for copy in plan.copies
        for tile in by_source[copy.source]
    ]


def _block(block: Block) -> list[Any]:
    return [block.tensor, list(block.grid), [list(interval) for interval in block.box]]


def vocab_multiple(divisible_by: int, tensor_parallel: int) -> int:
    """Megatron-LM pads the vocabulary to a multiple of ``--make-vocab-size-divisible-by`` x TP."""
    if divisible_by < 1 or tensor_parallel < 1:
        raise UsageError("--make-vocab-size-divisible-by and --tp must be at least 1")
    return divisible_by * tensor_parallel
