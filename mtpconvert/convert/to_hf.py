"""Megatron torch_dist -> Hugging Face, from two paths to a published directory."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert.convert.arguments import check_arguments
from mtpconvert.convert.assets import checked_side_files, copy_side_files, room_for, room_for_side_files
from mtpconvert.convert.configs import change_config, read_config
from mtpconvert.convert.encoding_writer import EncodingWriter
from mtpconvert.convert.execute import execute
from mtpconvert.convert.inspect_bytes import nonzero_rows
from mtpconvert.convert.notes import drop_notes
from mtpconvert.convert.packings import Packing, packing_of, quantisation_paths
from mtpconvert.convert.publish import refuse_overlap, staged, sync_tree
from mtpconvert.convert.reference import (
    Reference,
    completed,
    find_reference,
    layout_notes,
    refuse_lost_parts,
    without_own,
)
from mtpconvert.convert.repacking import packing_to_write
from mtpconvert.convert.result import Callbacks, Conversion
from mtpconvert.convert.row_codecs import ComputingWriter
from mtpconvert.convert.whole_tensors import copy_tensors
from mtpconvert.errors import CheckpointError, ConfigError, NotRepresentableError, UsageError, some
from mtpconvert.garbage import no_gc
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.check import VOCAB_TENSORS
from mtpconvert.mapping.dims import Scope
from mtpconvert.mapping.kinds import without_mtp
from mtpconvert.mapping.model import Mapping
from mtpconvert.mapping.mtp import present_in_mcore
from mtpconvert.mapping.plan import Plan, plan_to_hf
from mtpconvert.mapping.spelling import spelled
from mtpconvert.stores.detect import detect
from mtpconvert.stores.safetensors.layout import SafetensorsLayout
from mtpconvert.stores.safetensors.plan import adapt_layout, parse_size, plan_layout
from mtpconvert.stores.safetensors.writer import SafetensorsWriter
from mtpconvert.stores.torch_dist.reader import TorchDistReader
from mtpconvert.tensors import Inventory

DEFAULT_SHARD = "5GB"  # transformers 4.x' default of save_pretrained


@dataclass(frozen=True)
class ToHf:
    """Options of ``mcore2hf`` under the names of its flags."""

    reference: Path | None = None
    mtp: str = "keep"
    max_shard_size: str | None = None
    vocab_size: str = "from-config"
    overwrite: bool = False
    mapping: Path | None = None
    dtype: str = "keep"


@dataclass
class McoreSource:
    """A source read as far as its headers: what ``plan`` shows and ``mcore2hf`` goes on from."""

    reader: TorchDistReader
    reference: Reference
    config: dict[str, Any]
    mapping: Mapping
    plan: Plan
    packing: Packing  # of the HF side to be written; plain with --dtype bfloat16
    config_changes: dict[str, Any]
    renamed: dict[str, str]  # tensors of the reference that come back decoded, under another name


@no_gc()
def open_source(source: Path, options: ToHf) -> McoreSource:
    """Detect, read metadata, find the reference, check arguments, plan and prove. Reads no weights."""
    found = detect(source)
    if found.kind != "torch_dist" or found.iteration_dir is None:
        raise UsageError(
            f"{source} is no Megatron checkpoint but {found.kind}", next_step="hf2mcore goes the other way"
        )
    reference = find_reference(options.reference, found.assets, source)
    reader, config = TorchDistReader(found.iteration_dir), read_config(reference.folder)
    stored = [] if reference.layout is None else list(reference.layout.inventory())
    mapping = mapping_for(config, options.mapping, stored, drop_mtp=options.mtp == "drop")
    reference, notes = completed(reference, mapping, config)
    refuse_lost_parts(reference, mapping, config, notes)
    opened = _opened(source, reader, reference, config, mapping, options)
    if reference.layout is None and (other := _other_shapes(opened)):
        reference, notes = without_own(reference, f"it has tensors of other shapes: {some(other)}")
        refuse_lost_parts(reference, mapping, config, notes)
        opened = _opened(source, reader, reference, config, mapping, options)
    opened.plan.notes += [*layout_notes(reference, opened.plan.variants, opened.plan.asides), *notes]
    return opened


def _opened(
    source: Path,
    reader: TorchDistReader,
    reference: Reference,
    config: dict[str, Any],
    mapping: Mapping,
    options: ToHf,
) -> McoreSource:
    stored = reference.before
    if reference.layout is None:
        mapping = spelled(mapping, stored)
    packs = bool(quantisation_paths(config)) or reference.layout is not None
    packing_config = config if packs or reference.own is None else read_config(reference.own.folder)
    packing = packing_of(packing_config, stored, str(reference.folder)).of_language_model(mapping)
    names = list(packing.decoded(stored))
    if not packs:
        packing = Packing()  # by the reference's config.json, what was packed is to be plain now
    changes: dict[str, Any] = {}
    rows = _vocab_rows(reader.inventory(), config, mapping.config_key("vocab_size"), options)
    if rows is not None:
        changes[mapping.config_key("vocab_size")] = rows
    plan = plan_to_hf(
        mapping,
        config,
        reader.inventory(),
        reference=None if reference.layout is None else names,
        before=names,
        drop_mtp=options.mtp == "drop",
        vocab_rows=rows,
        where=str(reader.root),
    )
    if options.mtp == "drop":
        changes |= {} if plan.mtp.key is None else {plan.mtp.key: 0}
        changes |= without_mtp(config, mapping.kinds, mapping.text)
    scope = mapping.scope(config, {"mtp_layers": len(present_in_mcore(reader.inventory()))})
    if rows is not None:
        scope.config = {**scope.config, "vocab_size": rows}
    where = reader.args_file or str(source)
    plan.notes += reader.notes
    plan.notes += check_arguments(reader.args, mapping.arguments, scope, where=where, spelled=reader.args_spelled)
    packed = packing.only(plan.hf)
    packing, removed = packing_to_write(plan, packed, config, reference, options.dtype)
    renamed = {} if packing.tensors else {one.codes.name: name for name, one in packed.tensors.items()}
    changes |= removed
    return McoreSource(reader, reference, config, mapping, plan, packing, changes, renamed)


def mcore2hf(source: Path, target: Path, options: ToHf, callbacks: Callbacks) -> Conversion:
    """Convert ``source`` into the Hugging Face directory ``target``. Raises MtpConvertError."""
    refuse_overlap(target, source, inside=True)
    opened = open_source(source, options)
    refuse_overlap(target, opened.reference.folder, inside=False)
    plan, reader = opened.plan, opened.reader
    packing = opened.packing
    plain = {name: spec for name, spec in plan.hf.items() if name not in packing.tensors}
    wanted = {**plain, **packing.stored(plan.hf), **_aside_specs(opened)}
    layout = _layout(opened, wanted, options)
    folder = opened.reference.folder
    side_files = checked_side_files(folder)
    notes = [
        *plan.notes,
        *drop_notes(plan),
        *_padding_notes(plan, reader),
        *_dtype_notes(plain, opened.reference.before),
    ]
    needed = room_for(shard.header.end for shard in layout.shards) + room_for_side_files(folder, side_files)
    needed += 0 if layout.index is None else room_for([len(layout.index.raw)])
    with staged(target, overwrite=options.overwrite, needed=needed) as staging:
        files = SafetensorsWriter(staging.path, layout)
        writer: SafetensorsWriter | EncodingWriter = files
        if packing.tensors:
            assert opened.reference.scales is not None  # _check_encodable
            writer = EncodingWriter(files, packing, opened.reference.scales)
        computing = ComputingWriter(writer, plan.codecs, plan.hf, opened.reference.originals)
        with closing(computing):
            computing.create()
            moved = execute(plan, reader, computing, callbacks.start(sum(spec.nbytes for spec in plan.hf.values())))
            if opened.reference.asides is not None:
                copy_tensors(opened.reference.asides, files, plan.asides)
            computing.commit()
        notes += computing.restored.notes()
        if isinstance(writer, EncodingWriter):
            notes += writer.requantised.notes()
        copy_side_files(folder, staging.path, side_files)
        if opened.config_changes:
            change_config(staging.path, opened.config_changes)
        sync_tree(staging.path)
        audit = callbacks.gate(source, staging.path) if callbacks.gate else None
        staging.publish()
    return Conversion(source, target, plan, moved, [], opened.config_changes, notes, audit=audit)


def _vocab_rows(source: Inventory, config: dict[str, Any], key: str, options: ToHf) -> int | None:
    if options.vocab_size != "from-megatron":
        return None
    spec = source.get("embedding.word_embeddings.weight")
    if spec is None:
        raise CheckpointError(
            "there is no embedding.word_embeddings.weight to take the vocabulary size from",
            next_step="leave out --vocab-size from-megatron",
        )
    if Scope(config).value(key) is None:
        raise ConfigError(
            f"config.json has no {key} to be rewritten",
            where=f"config.json: {key}",
            next_step="add it, or leave out --vocab-size from-megatron",
        )
    return spec.shape[0]


def _aside_specs(opened: McoreSource) -> Inventory:
    """Specs of the tensors that a row sets aside and the reference keeps; their bytes are in the reference."""
    if not opened.plan.asides:
        return {}
    kept = {} if opened.reference.asides is None else opened.reference.asides.inventory()
    before = opened.reference.before
    if lost := [name for name in opened.plan.asides if name not in kept or kept[name] != before[name]]:
        raise CheckpointError(
            f"the reference lists {', '.join(lost[:5])} and no longer holds the bytes",
            where=str(opened.reference.folder),
            next_step="pass --reference with the original Hugging Face directory",
        )
    specs = {name: kept[name] for name in opened.plan.asides}
    packed = [name for name, spec in specs.items() if spec.dtype.startswith("F8_")]
    if packed and (None in opened.config_changes.values() or not quantisation_paths(opened.config)):
        raise NotRepresentableError(
            f"{len(packed)} tensors that are set aside are FP8 and come back so, which a config.json without"
            f" quantization_config contradicts: {some(packed, 3)}",
            where=str(opened.reference.folder),
            next_step="leave out --dtype bfloat16",
        )
    return specs


def _layout(opened: McoreSource, wanted: Inventory, options: ToHf) -> SafetensorsLayout:
    layout = opened.reference.layout
    if layout is None or options.max_shard_size is not None:
        return plan_layout(list(wanted.values()), parse_size(options.max_shard_size or DEFAULT_SHARD))
    return adapt_layout(layout, wanted, opened.renamed)


def _padding_notes(plan: Plan, reader: TorchDistReader) -> list[str]:
    notes = []
    for fill in plan.fills:
        rows = fill.mcore.box[0][1] - fill.mcore.box[0][0]
        if used := nonzero_rows(reader, fill.mcore):
            notes.append(
                f"{fill.mcore.tensor}: {used} of {rows} vocabulary padding rows are not zero (normal after training);"
                " they are left out"
            )
    return notes


def _other_shapes(opened: McoreSource) -> list[str]:
    """Tensors that had another shape before, those with a row per token left out; packed ones have a check of their
    own."""
    before, plan = opened.reference.before, opened.plan
    rows = {tile.hf.tensor for tile in plan.tiles if tile.mcore.tensor in VOCAB_TENSORS}
    plain = [name for name in plan.hf if name in before and before[name].dtype in ("BF16", "F16", "F32")]
    return [name for name in plain if before[name].shape != plan.hf[name].shape and name not in rows]


def _dtype_notes(written: Inventory, before: Inventory) -> list[str]:
    changed: dict[str, int] = {}
    for name, spec in written.items():
        if name in before and before[name].dtype != spec.dtype:
            change = f"{before[name].dtype} in the reference, {spec.dtype} in Megatron"
            changed[change] = changed.get(change, 0) + 1
    return [f"{count} tensors are {change}: written as Megatron has them" for change, count in changed.items()]
