"""Which part of which tensor goes into a slice, decided from headers.

The mapping file of the architecture is expanded twice: on the model's config and on the slice's. A tensor of the slice
is the tensor of the model under the same name (MTP's layer number moved to the new end), whole or, where its shape
shrinks, the leading part along the axes that count experts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconvert.convert.slice_config import sliced_config
from mtpconvert.errors import CheckpointError, ConfigError, MtpLostError, UnmappedTensorError, some
from mtpconvert.mapping.expand import Expansion, Expected, expand
from mtpconvert.mapping.model import Mapping as MappingFile
from mtpconvert.mapping.mtp import MtpCount, agree, declared_mtp, mtp_count, present_in_hf
from mtpconvert.tensors import Block, Inventory, TensorSpec, whole

SCALES = ("_scale_inv", "_scale")  # beside a block-quantised weight, under its name


@dataclass(frozen=True)
class SliceOptions:
    """Options of ``slice`` under the names of its flags; ``experts`` None keeps them all."""

    layers: int
    experts: int | None = None
    max_shard_size: str = "5GB"
    overwrite: bool = False
    mapping: Path | None = None


@dataclass
class SlicePlan:
    """``parts``: the tensor of the slice -> the block of the model's tensor that it is. ``left``: tensors left out."""

    architecture: str
    parts: dict[str, Block]
    target: Inventory
    left: int
    config_changes: dict[str, Any]
    mtp: MtpCount
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.target.values())


def plan_slice(
    mapping: MappingFile, config: Mapping[str, Any], source: Inventory, options: SliceOptions, where: str = ""
) -> SlicePlan:
    """Decide from headers what goes into the slice.

    Raises UsageError for numbers that the model has not, MtpLostError where MTP tensors and config disagree or one is
    missing, UnmappedTensorError for tensors that the mapping does not know, CheckpointError for shapes.
    """
    found = present_in_hf(source, mapping.mtp, mapping.scope(config))
    declared = declared_mtp(config, mapping.mtp)
    layers, note = agree(declared, found, mapping.mtp, lambda _: [], where)
    expert_key = _expert_key(mapping, config)
    changes = sliced_config(
        config, layers=options.layers, experts=options.experts, expert_key=expert_key, mtp_layers=layers
    )
    smaller = {**config, **changes}
    model = _expand(mapping, config, layers, source)
    names = {_renumbered(mapping, name, config, smaller, found) for name in source}
    wanted = _expand(mapping, smaller, layers, names)
    known = _all(model)
    scales = {name: base for name in source if (base := _base_of(name, source)) is not None}
    if unknown := [name for name in source if name not in known and name not in scales]:
        raise UnmappedTensorError(
            f"{len(unknown)} tensors that nothing maps: {some(unknown, 20)}",
            where=where,
            next_step="nothing is left out unless the mapping knows it: extend it, or pass --mapping FILE",
        )
    parts: dict[str, Block] = {}
    target: Inventory = {}
    shrinking = (config.get(expert_key), smaller.get(expert_key)) if expert_key else None
    for name, entry in _all(wanted).items():
        old = _original(mapping, name, entry, config, smaller)
        if old not in source:
            if name in wanted.hf:
                raise _missing(old, entry, where)
            continue  # copies and asides may be absent
        spec = source[old]
        if spec.shape != known[old].shape:
            raise CheckpointError(
                f"{old} is {list(spec.shape)}, config and mapping ({entry.row}) say {list(known[old].shape)}",
                where=where,
                next_step="config.json and tensors must belong to the same model",
            )
        parts[name] = _leading(old, spec, entry, shrinking)
        target[name] = TensorSpec(name, entry.shape, spec.dtype)
        for suffix in SCALES:
            if (scale := source.get(old + suffix)) is not None:
                parts[name + suffix] = _whole_scale(scale, parts[name])
                target[name + suffix] = TensorSpec(name + suffix, scale.shape, scale.dtype)
    mtp = [target[n] for n, entry in _all(wanted).items() if entry.mtp is not None and n in target]
    count = mtp_count(mapping.mtp, declared, layers, layers, mtp)
    notes = [] if note is None else [note]
    return SlicePlan(mapping.architecture, parts, target, len(source) - len(parts), changes, count, notes)


def _expert_key(mapping: MappingFile, config: Mapping[str, Any]) -> str | None:
    """The config key behind the ``experts`` of the mapping's expert rows; None where the config has no such key."""
    for rows in mapping.rows.values():
        for row in rows:
            key = None if row.experts is None else mapping.dims.get(row.experts, row.experts)
            if key is not None and config.get(key):
                if not isinstance(config[key], int):
                    raise ConfigError(f"'{key}' is {config[key]!r}, no number of experts", where=f"config.json: {key}")
                return key
    return None


def _expand(mapping: MappingFile, config: Mapping[str, Any], mtp_layers: int, present: Container[str]) -> Expansion:
    scope = mapping.scope(config, {"mtp_layers": mtp_layers})
    return expand(mapping, scope, scope.integer("vocab_size"), present)


def _all(expansion: Expansion) -> dict[str, Expected]:
    optional = {name: entry for name, (entry, _) in [*expansion.aliases.items(), *expansion.asides.items()]}
    return {**expansion.hf, **optional}


def _mtp_prefix(mapping: MappingFile, config: Mapping[str, Any], layer: int) -> str:
    """``model.layers.{num_hidden_layers+i}.`` for one MTP layer."""
    assert mapping.mtp is not None and mapping.mtp.present is not None  # callers have an MTP layer at hand
    before, _, rest = mapping.mtp.present.partition("{")
    inside, _, after = rest.partition("}")
    offset = 0 if inside == "i" else mapping.scope(config).integer(inside.removesuffix("+i"))
    return f"{before}{offset + layer}{after}"


def _original(
    mapping: MappingFile, name: str, entry: Expected, config: Mapping[str, Any], smaller: Mapping[str, Any]
) -> str:
    """The model's name of the slice's tensor ``name``."""
    if entry.mtp is None or mapping.mtp is None:
        return name
    new, old = (_mtp_prefix(mapping, which, entry.mtp) for which in (smaller, config))
    return old + name.removeprefix(new) if name.startswith(new) else name


def _renumbered(
    mapping: MappingFile,
    name: str,
    config: Mapping[str, Any],
    smaller: Mapping[str, Any],
    found: Mapping[int, list[str]],
) -> str:
    """The slice's name of the model's tensor ``name``, to choose among a mapping's variants."""
    for layer in found:
        old = _mtp_prefix(mapping, config, layer)
        if name.startswith(old):
            return _mtp_prefix(mapping, smaller, layer) + name.removeprefix(old)
    return name


def _base_of(name: str, source: Inventory) -> str | None:
    """The weight that the scale tensor ``name`` belongs to."""
    for suffix in SCALES:
        if name.endswith(suffix) and (base := name.removesuffix(suffix)) in source:
            return base
    return None


def _leading(old: str, spec: TensorSpec, entry: Expected, shrinking: tuple[Any, Any] | None) -> Block:
    """The first part of ``spec`` that has the shape of ``entry``; only axes that count experts may shrink."""
    for had, kept in zip(spec.shape, entry.shape, strict=True):
        if had != kept and (had, kept) != shrinking:
            raise CheckpointError(
                f"{old} would shrink from {list(spec.shape)} to {list(entry.shape)} along an axis of no experts",
                where=entry.row,
                next_step="this mapping makes a size depend on the number of layers; the model cannot be sliced",
            )
    return Block(old, spec.shape, spec.shape, tuple((0, kept) for kept in entry.shape))


def _whole_scale(scale: TensorSpec, block: Block) -> Block:
    """The scales of a weight that is taken whole."""
    if block != whole(block.tensor, block.shape):
        raise CheckpointError(
            f"{block.tensor} has block scales and would be cut",
            where=scale.name,
            next_step="keep all experts (leave --experts out)",
        )
    return whole(scale.name, scale.shape)


def _missing(name: str, entry: Expected, where: str) -> MtpLostError | UnmappedTensorError:
    kind = UnmappedTensorError if entry.mtp is None else MtpLostError
    return kind(
        f"{name} is missing ({entry.row})",
        where=where,
        next_step="a slice needs every tensor of the layers that it keeps, MTP included",
    )
