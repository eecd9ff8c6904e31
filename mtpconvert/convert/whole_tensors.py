"""Whole tensors from one safetensors file to another: those that a mapping sets aside."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mtpconvert.convert.window import WINDOW, aligned_buffer, read_exactly
from mtpconvert.stores.base import Reader, Writer
from mtpconvert.stores.durable import write_exactly


def copy_tensors(reader: Reader, writer: Writer, names: Iterable[str]) -> None:
    """Copy each tensor, which is one C-contiguous chunk on both sides, and finish its chunk."""
    buffer = aligned_buffer(WINDOW)
    for name in names:
        (source,), (target,) = reader.chunks(name), writer.chunks(name)
        nbytes = reader.inventory()[name].nbytes
        inside, outside = os.open(reader.path(source.file), os.O_RDONLY), os.open(writer.path(target.file), os.O_WRONLY)
        try:
            for start in range(0, nbytes, WINDOW):
                window = buffer[: min(WINDOW, nbytes - start)]
                read_exactly(inside, window, source.offset + start)
                write_exactly(outside, window, target.offset + start)
        finally:
            os.close(inside)
            os.close(outside)
        writer.finish_chunk(name, 0, 0)
