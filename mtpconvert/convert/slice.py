"""A smaller, still valid checkpoint with real values: first layers, first experts, MTP kept, config adjusted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from mtpconvert.convert.assets import checked_side_files, copy_side_files, room_for, room_for_side_files
from mtpconvert.convert.configs import change_config, read_config
from mtpconvert.convert.execute import Progress
from mtpconvert.convert.inspect_bytes import windows
from mtpconvert.convert.publish import refuse_overlap, staged, sync_tree
from mtpconvert.convert.result import Callbacks
from mtpconvert.convert.slice_plan import SliceOptions, SlicePlan, plan_slice
from mtpconvert.convert.sources import detect_source
from mtpconvert.convert.window import WINDOW, aligned_buffer
from mtpconvert.errors import UsageError
from mtpconvert.mapping.catalogue import mapping_for
from mtpconvert.stores.safetensors.plan import parse_size, plan_layout
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.stores.safetensors.writer import SafetensorsWriter
from mtpconvert.tensors import DTYPE_BITS, Block, whole


def open_slice(source: Path, options: SliceOptions) -> tuple[SafetensorsReader, SlicePlan]:
    """Read the headers of ``source`` and plan. Reads no weights."""
    if (found := detect_source(source)).kind != "hf":
        raise UsageError(f"{source} is no Hugging Face directory but {found.kind}", next_step="convert it first")
    reader, config = SafetensorsReader(source), read_config(source)
    names = reader.inventory()
    plan = plan_slice(mapping_for(config, options.mapping, names), config, names, options, str(source))
    plan.notes += reader.notes
    return reader, plan


def slice_checkpoint(source: Path, target: Path, options: SliceOptions, callbacks: Callbacks) -> SlicePlan:
    """Write the slice of ``source`` into the new directory ``target``, side files too. Raises MtpConvertError."""
    refuse_overlap(target, source, inside=False)
    reader, plan = open_slice(source, options)
    layout = plan_layout(list(plan.target.values()), parse_size(options.max_shard_size))
    side_files = checked_side_files(source)
    needed = room_for(shard.header.end for shard in layout.shards) + room_for_side_files(source, side_files)
    with staged(target, overwrite=options.overwrite, needed=needed) as staging:
        writer = SafetensorsWriter(staging.path, layout)
        with closing(writer):
            writer.create()
            progress = callbacks.start(plan.nbytes)
            for name in layout.inventory():
                _copy(reader, writer, name, plan.parts[name], progress)
            writer.commit()
        copy_side_files(source, staging.path, side_files)
        if plan.config_changes:
            change_config(staging.path, plan.config_changes)
        sync_tree(staging.path)
        staging.publish()
    return plan


def _copy(reader: SafetensorsReader, writer: SafetensorsWriter, name: str, block: Block, progress: Progress) -> None:
    """Bytes of ``block`` to the tensor ``name``, a window at a time."""
    (target,) = writer.chunks(name)
    at = target.offset
    for window in _windows(reader, block):
        writer.write(target.file, window, at)
        at += len(window)
        progress(len(window), name)
    writer.finish_chunk(name, 0, 0)


def _windows(reader: SafetensorsReader, block: Block) -> Iterable[bytes | memoryview]:
    """The bytes of ``block`` in order. A whole tensor is one run of its file, whatever its dtype."""
    spec = reader.inventory()[block.tensor]
    if block != whole(spec.name, spec.shape):
        yield from windows(reader, block, DTYPE_BITS[spec.dtype] // 8)
        return
    (source,) = reader.chunks(spec.name)
    buffer = aligned_buffer(WINDOW)
    for start in range(0, spec.nbytes, WINDOW):
        window = buffer[: min(WINDOW, spec.nbytes - start)]
        reader.read(source.file, window, source.offset + start)
        yield window
