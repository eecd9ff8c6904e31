"""Source and reference against an expansion: missing, unknown, mis-shaped, of another dtype. Everything is named."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from mtpconvert.errors import (
    CheckpointError,
    ConfigError,
    MtpLostError,
    NotRepresentableError,
    UnmappedTensorError,
    some,
)
from mtpconvert.mapping.expand import Expansion, Expected
from mtpconvert.mapping.mtp import MCORE_MTP, looks_like_mtp
from mtpconvert.tensors import Copy, Inventory, TensorSpec


def hf_source(expansion: Expansion, source: Inventory, trunk_layers: int, where: str) -> None:
    """Every HF tensor of the source is expected, and every expected one is there with its shape.

    Raises MtpLostError where the tensors at fault are MTP's, UnmappedTensorError otherwise, CheckpointError for shapes.
    """
    optional = {name: entry for name, (entry, _) in [*expansion.aliases.items(), *expansion.asides.items()]}
    _names(expansion.hf, optional, source, where, lambda name: looks_like_mtp(name, trunk_layers))
    _shapes({**expansion.hf, **optional}, source, where)


def mcore_source(expansion: Expansion, source: Inventory, where: str) -> None:
    """The same for a Megatron source."""
    _names(expansion.mcore, {}, source, where, lambda name: name.startswith(MCORE_MTP))
    _shapes(expansion.mcore, source, where)


def _names(
    expected: dict[str, Expected],
    optional: dict[str, Expected],
    source: Inventory,
    where: str,
    is_mtp: Callable[[str], bool],
) -> None:
    missing = [entry for name, entry in expected.items() if name not in source]
    unknown = [name for name in source if name not in expected and name not in optional]
    if source and len(unknown) == len(source):
        raise UnmappedTensorError(
            f"none of {len(source)} tensors has a name that the mapping knows; the source has {some(list(source), 3)};"
            f" the mapping expects {some(list(expected), 3)}",
            where=where,
            next_step="check 'architectures' in config.json; a common prefix that was added or lost shows in the names",
        )
    lost = [entry for entry in missing if entry.mtp is not None]
    surplus = [name for name in unknown if is_mtp(name)]
    homeless = f"{len(surplus)} MTP tensors have no place in the mapping: {', '.join(surplus)}"
    if lost:  # every one is named, however many: they have to be found
        layers = sorted({entry.mtp for entry in lost if entry.mtp is not None})
        raise MtpLostError(
            f"MTP layer {', '.join(map(str, layers))} is incomplete: {len(lost)} tensors are missing:"
            f" {', '.join(entry.name for entry in lost)}" + (f"; {homeless}" if surplus else ""),
            where=where,
            next_step="take them from the checkpoint that this one was made from, or leave MTP out with --mtp drop",
        )
    if surplus:
        raise MtpLostError(
            homeless,
            where=where,
            next_step="extend the mapping (--mapping FILE), or leave MTP out on purpose with --mtp drop",
        )
    if unknown or missing:
        parts = []
        if unknown:
            parts.append(f"{len(unknown)} tensors that nothing maps: {some(unknown, 20)}")
        if missing:
            named = [f"{entry.name} ({entry.row})" for entry in missing]
            parts.append(f"{len(missing)} tensors missing that the mapping needs: {some(named, 20)}")
        raise UnmappedTensorError(
            "; ".join(parts),
            where=where,
            next_step="nothing is skipped: correct the checkpoint, its config or the mapping",
        )


def _shapes(expected: dict[str, Expected], source: Inventory, where: str) -> None:
    wrong = []
    for name, spec in source.items():
        entry = expected.get(name)
        if entry is not None and spec.shape != entry.shape:
            wrong.append(f"{name} is {list(spec.shape)}, config and mapping ({entry.row}) say {list(entry.shape)}")
        if entry is not None and entry.dtype is not None and spec.dtype != entry.dtype:
            wrong.append(f"{name} is {spec.dtype}, the mapping ({entry.row}) says {entry.dtype}")
    if wrong:
        raise CheckpointError(
            "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""),
            where=where,
            next_step="config.json and tensors must belong to the same model",
        )


def derived(expansion: Expansion, source: Inventory, target: Literal["hf", "mcore"], where: str) -> Inventory:
    """Specs of the target's tensors: shapes from the expansion, dtypes from the source tensors that make them.

    Raises CheckpointError where one target tensor would be made of parts with different dtypes.
    """
    wanted = expansion.hf if target == "hf" else expansion.mcore
    specs: Inventory = {}
    for tile in expansion.tiles:
        made, part = (tile.hf, tile.mcore) if target == "hf" else (tile.mcore, tile.hf)
        dtype = source[part.tensor].dtype
        known = specs.get(made.tensor)
        if known is None:
            specs[made.tensor] = TensorSpec(made.tensor, wanted[made.tensor].shape, dtype)
        elif known.dtype != dtype:
            raise CheckpointError(
                f"{made.tensor} would be made of {known.dtype} and {dtype} parts ({part.tensor} is {dtype})",
                where=where,
                next_step="all parts of a fused tensor need one dtype",
            )
    return specs


def megatron_vocab_rows(source: Inventory, vocab: int, where: str) -> int:
    """Rows of Megatron's embedding. Raises ConfigError where they are fewer than the config's tokens."""
    rows = {name: source[name].shape[0] for name in VOCAB_TENSORS if name in source}
    for name, count in rows.items():
        if count < vocab:
            raise ConfigError(
                f"{name} has {count} rows, config.json has vocab_size {vocab}",
                where=where,
                next_step="--vocab-size from-megatron writes the Megatron number into config.json",
            )
    return max(rows.values(), default=vocab)


VOCAB_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")


def wanted_copies(expansion: Expansion, reference: Collection[str] | None) -> list[Copy]:
    """Aliases to write: those that the reference has.

    Without a reference as published checkpoints of the family have it: ``copy_of`` rows are written, ``tie`` rows not.
    """
    copies = [copy for _, copy in expansion.aliases.values()]
    return [copy for copy in copies if (not copy.tie if reference is None else copy.tensor in reference)]


def reference_names(
    reference: Collection[str], hf: Inventory, asides: Collection[str], trunk_layers: int, where: str
) -> None:
    """The reference lists exactly what will be written.

    Raises MtpLostError where it lists MTP tensors that are not, else UnmappedTensorError or NotRepresentableError.
    """
    if unprovided := [name for name in reference if name not in hf and name not in asides]:
        lost = any(looks_like_mtp(name, trunk_layers) for name in unprovided)
        raise (MtpLostError if lost else UnmappedTensorError)(
            f"the reference lists {len(unprovided)} tensors that nothing in the Megatron checkpoint provides:"
            f" {some(unprovided, 20)}",
            where=where,
            next_step="is the reference the model that this checkpoint was trained from?",
        )
    listed = set(reference)
    if extra := [name for name in hf if name not in listed]:
        raise NotRepresentableError(
            f"the Megatron checkpoint gives {len(extra)} tensors that the reference does not list: {some(extra, 20)}",
            where=where,
            next_step="is the reference the model that this checkpoint was trained from?",
        )


def mtp_of(expansion: Expansion, name: str) -> int | None:
    """The MTP layer of an HF tensor, copies included, or None."""
    if name in expansion.aliases:
        return expansion.aliases[name][0].mtp
    return expansion.hf[name].mtp
