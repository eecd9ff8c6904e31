"""Hugging Face -> Megatron torch_dist, from two paths to a published directory."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconvert import __version__
from mtpconvert.convert.arguments import Facts, Plain, launch_flags, megatron_arguments, moe_layers, without_flag
from mtpconvert.convert.assets import (
    ASIDE,
    ORIGINALS,
    OURS,
    SCALES,
    checked_side_files,
    copy_side_files,
    left_out_notes,
    room_for,
    room_for_side_files,
    write_manifest,
)
from mtpconvert.convert.chunking import chunk_boxes, file_count
from mtpconvert.convert.configs import change_config, read_config
from mtpconvert.convert.copies import compare_copies
from mtpconvert.convert.decoded_reader import DecodedReader
from mtpconvert.convert.execute import execute
from mtpconvert.convert.notes import drop_notes, spec_notes
from mtpconvert.convert.packings import Packing, packing_of
from mtpconvert.convert.publish import refuse_overlap, staged, sync_tree
from mtpconvert.convert.result import Callbacks, Conversion
from mtpconvert.convert.row_codecs import ComputedReader
from mtpconvert.convert.sources import detect_source
from mtpconvert.convert.stacked import is_stacked
from mtpconvert.convert.whole_tensors import copy_tensors
from mtpconvert.errors import CheckpointError, UsageError
from mtpconvert.garbage import no_gc
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.mapping.dialect import DialectName, check_dialect, dialect_notes
from mtpconvert.mapping.kinds import without_mtp
from mtpconvert.mapping.model import Mapping
from mtpconvert.mapping.plan import Plan, default_notes, mtp_names, plan_to_mcore, vocab_multiple
from mtpconvert.mapping.versions import refuse_version
from mtpconvert.stores.detect import ASSETS, HEADERS, TRACKER
from mtpconvert.stores.safetensors.plan import plan_layout, subset_layout
from mtpconvert.stores.safetensors.reader import SafetensorsReader, save_headers
from mtpconvert.stores.safetensors.writer import SafetensorsWriter
from mtpconvert.stores.torch_dist.writer import McoreVersion, Spec, TorchDistWriter
from mtpconvert.tensors import DTYPE_BITS, Inventory

NO_ARGUMENTS = (
    "the mapping has no [arguments]: the checkpoint's args hold nothing of the model, not even its sizes, and Megatron"
    " cannot be launched from them"
)
_RECORD_OVERHEAD = 2048  # bytes, generously: container around a record and its lines in .metadata


@dataclass(frozen=True)
class ToMcore:
    """Options of ``hf2mcore`` under the names of its flags."""

    spec: Spec = "te"
    mcore_version: McoreVersion = "0.16"
    iteration: str = "release"
    make_vocab_size_divisible_by: int = 128
    tp: int = 1  # parallel sizes to launch with: torch_dist itself has none; they go into args
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    mtp: str = "keep"
    mtp_copies: str = "require-equal"
    overwrite: bool = False
    mapping: Path | None = None
    dialect: DialectName = "stock"

    @property
    def iteration_number(self) -> int:
        """0 for a release. Raises UsageError for what is neither a number nor "release"."""
        if self.iteration == "release":
            return 0
        if re.fullmatch("[0-9]+", self.iteration) is None:
            raise UsageError(
                f"--iteration is '{self.iteration}', neither a number nor 'release'",
                next_step="give a number from 0 on, or leave the option out for a release",
            )
        return int(self.iteration)

    @property
    def iteration_folder(self) -> str:
        """As megatron/training/checkpointing.py:get_checkpoint_name spells it."""
        return "release" if self.iteration == "release" else f"iter_{self.iteration_number:07d}"


@dataclass
class HfSource:
    """A source read as far as its headers: what ``plan`` shows and ``hf2mcore`` goes on from."""

    reader: SafetensorsReader | DecodedReader  # tensors as the mapping sees them
    files: SafetensorsReader  # tensors as they are stored
    packing: Packing
    config: dict[str, Any]
    mapping: Mapping
    plan: Plan

    def scales(self) -> Inventory:
        """The scales to keep: Megatron has no place for them."""
        packed = self.packing.tensors
        if self.packing.kind != "fp8_block":
            return {}
        return {packed[name].scales.name: packed[name].scales for name in self.plan.hf if name in packed}


@no_gc()
def open_source(source: Path, options: ToMcore) -> HfSource:
    """Detect, read headers, choose the mapping, plan and prove. Reads no weights."""
    found = detect_source(source)
    if found.kind != "hf":
        raise UsageError(
            f"{source} is no Hugging Face directory but {found.kind}", next_step="mcore2hf goes the other way"
        )
    for own in OURS:
        if (source / own).exists():
            raise CheckpointError(
                f"the source has something called '{own}', the name of what {ASSETS} keeps beside side files",
                where=str(source / own),
                next_step="move it away",
            )
    files, config = SafetensorsReader(source), read_config(source)
    mapping = mapping_for(config, options.mapping, files.inventory(), drop_mtp=options.mtp == "drop")
    refuse_version(mapping, config, options.mcore_version)
    check_dialect(mapping, options.dialect, options.spec, files.inventory())
    stored = files.inventory()
    dropped = mtp_names(mapping, stored, config) if options.mtp == "drop" else set()
    kept = {name: spec for name, spec in stored.items() if name not in dropped}
    packing = packing_of(config, kept, str(source)).of_language_model(mapping)
    reader: SafetensorsReader | DecodedReader = files if packing.kind is None else DecodedReader(files, packing)
    multiple = vocab_multiple(options.make_vocab_size_divisible_by, options.tp)
    plan = plan_to_mcore(
        mapping,
        config,
        reader.inventory(),
        vocab_multiple=multiple,
        drop_mtp=options.mtp == "drop",
        where=str(source),
    )
    plan.notes += [*dialect_notes(mapping), *files.notes, *packing.notes, *_packing_notes(plan, packing)]
    return HfSource(reader, files, packing, config, mapping, plan)


def _packing_notes(plan: Plan, packing: Packing) -> list[str]:
    count = sum(name in packing.tensors for name in plan.hf)
    if packing.kind == "fp8_block":
        assert packing.blocks is not None
        size = f"{packing.blocks.rows} x {packing.blocks.columns}"
        return [f"{count:,} tensors are FP8 in blocks of {size}: decoded to bf16, their scales kept in {ASSETS}"]
    return [f"{count:,} tensors are MXFP4: decoded to bf16, exactly"] if packing.kind else []


def hf2mcore(source: Path, target: Path, options: ToMcore, callbacks: Callbacks) -> Conversion:
    """Convert ``source`` into ``target``, which Megatron-LM's ``--load`` reads. Raises MtpConvertError."""
    refuse_overlap(target, source, inside=False)
    opened = open_source(source, options)
    plan, reader, files = opened.plan, opened.reader, opened.files
    if isinstance(reader, DecodedReader):
        reader.check_scales()
    computed = ComputedReader(reader, plan.codecs)
    arguments = _arguments(opened, options)
    changes = _config_changes(opened, options)
    side_files = checked_side_files(source)
    notes = [
        *plan.notes,
        *compare_copies(plan, reader, use_trunk=options.mtp_copies == "use-trunk"),
        *drop_notes(plan),
        *([] if opened.mapping.dialect else spec_notes(plan)),
        *left_out_notes(source),
        *(without_flag(arguments, options.mcore_version) if opened.mapping.arguments else [NO_ARGUMENTS]),
        *computed.notes(),
    ]
    boxes = chunk_boxes(plan)
    needed = plan.nbytes + _fill_bytes(plan) + _RECORD_OVERHEAD * sum(map(len, boxes.values())) + _aside_bytes(plan)
    needed += room_for(len(shard.header.raw) for shard in files.shards) + room_for_side_files(source, side_files)
    needed += room_for([0] * 10) + (0 if files.index_bytes is None else 2 * room_for([len(files.index_bytes)]))
    needed += sum(spec.nbytes for spec in opened.scales().values())
    needed += sum(plan.hf[name].nbytes for name in computed.lost)
    with staged(target, overwrite=options.overwrite, needed=needed) as staging:
        folder = staging.path / options.iteration_folder
        folder.mkdir()
        writer = TorchDistWriter(
            folder,
            list(plan.mcore.values()),
            boxes,
            stacked=is_stacked(plan.mcore),
            spec=options.spec,
            mcore_version=options.mcore_version,
            common={"args": arguments, "iteration": options.iteration_number},
            files=file_count(plan.nbytes),
        )
        with closing(writer):
            writer.create()
            moved = execute(plan, computed, writer, callbacks.start(plan.nbytes))
            writer.commit()
        originals = {name: plan.hf[name] for name in computed.lost}
        _write_assets(opened, side_files, staging.path / ASSETS, changes, originals)
        tracker = "release" if options.iteration == "release" else str(options.iteration_number)
        (staging.path / TRACKER).write_text(tracker, encoding="utf-8")
        sync_tree(staging.path / ASSETS)
        sync_tree(staging.path)
        audit = callbacks.gate(source, staging.path) if callbacks.gate else None
        staging.publish()
    stock = options.dialect == "stock" and opened.mapping.arguments
    flags = launch_flags(arguments, version=options.mcore_version) if stock else []
    return Conversion(source, target, plan, moved, flags, changes, notes, options.dialect, audit)


def _config_changes(opened: HfSource, options: ToMcore) -> dict[str, Any]:
    """``--mtp drop`` writes an explicit 0: readers of several families take a missing count for 1."""
    if options.mtp != "drop":
        return {}
    key, mapping = opened.plan.mtp.key, opened.mapping
    return {**({} if key is None else {key: 0}), **without_mtp(opened.config, mapping.kinds, mapping.text)}


def _arguments(opened: HfSource, options: ToMcore) -> dict[str, Plain]:
    plan = opened.plan
    scope = opened.mapping.scope(opened.config)
    scope.symbols["mtp_layers"] = plan.mtp.written
    experts = moe_layers(plan.mcore, scope.integer("num_hidden_layers"))
    facts = Facts(
        vocab_size=scope.integer("vocab_size"),
        padded_vocab_size=plan.mcore["embedding.word_embeddings.weight"].shape[0],
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        moe_layer_freq=1 if experts is not None and is_stacked(plan.mcore) else experts,
        spec=options.spec,
        tp=options.tp,
        pp=options.pp,
        vpp=options.vpp,
        ep=options.ep,
        etp=options.etp,
    )
    arguments = megatron_arguments(opened.mapping.arguments, scope, facts)
    plan.notes += default_notes(scope, opened.mapping, known=plan.defaults)
    return arguments


def _fill_bytes(plan: Plan) -> int:
    return sum(fill.mcore.volume * DTYPE_BITS[plan.mcore[fill.mcore.tensor].dtype] // 8 for fill in plan.fills)


def _aside_bytes(plan: Plan) -> int:
    return sum(plan.hf[name].nbytes for name in plan.asides)


def _write_assets(
    opened: HfSource, side_files: list[Path], assets: Path, changes: dict[str, Any], originals: Inventory
) -> None:
    """Side files, the layout of the shards, and the tensors that Megatron has no place for."""
    plan, files, scales = opened.plan, opened.files, opened.scales()
    assets.mkdir()
    copy_side_files(files.root, assets, side_files)
    if changes:
        change_config(assets, changes)
    layout = files.layout
    if plan.dropped:
        layout = subset_layout(layout, {*plan.hf, *opened.packing.stored(plan.hf)} & set(files.inventory()))
    save_headers(layout, assets / HEADERS)
    if layout.index is not None:
        (assets / layout.index.name).write_bytes(layout.index.raw)
    asides = {name: files.layout.places[name][1] for name in plan.asides}
    for folder, kept in ((ASIDE, asides), (SCALES, scales), (ORIGINALS, originals)):
        if kept:
            writer = SafetensorsWriter(assets / folder, plan_layout(list(kept.values()), 1 << 40))
            with closing(writer):
                writer.create()
                copy_tensors(files, writer, kept)
                writer.commit()
    write_manifest(
        assets,
        {
            "schema_version": 1,
            "tool_version": __version__,
            "architecture": plan.architecture,
            "mapping": plan.mapping_file,
            "plan_sha256": plan.digest(),
            "packing": opened.packing.kind,
            "config_changes": changes,
        },
    )
