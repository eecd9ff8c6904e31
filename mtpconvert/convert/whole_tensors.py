"""Whole tensors from one safetensors file to another: those that a mapping or a codec sets aside."""

from __future__ import annotations

from collections.abc import Iterable

from mtpconvert.convert.window import WINDOW, aligned_buffer
from mtpconvert.stores.base import Reader, Writer


def copy_tensors(reader: Reader, writer: Writer, names: Iterable[str]) -> None:
    """Copy each tensor, which is one C-contiguous chunk on both sides, and finish its chunk."""
    buffer, inventory = aligned_buffer(WINDOW), reader.inventory()
    for name in names:
        (source,), (target,) = reader.chunks(name), writer.chunks(name)
        nbytes = inventory[name].nbytes
        for start in range(0, nbytes, WINDOW):
            window = buffer[: min(WINDOW, nbytes - start)]
            reader.read(source.file, window, source.offset + start)
            writer.write(target.file, window, target.offset + start)
        writer.finish_chunk(name, 0, 0)
