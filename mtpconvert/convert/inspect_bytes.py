"""Looks at values where headers do not decide: copies that must be equal, padding rows that should be zero."""

from __future__ import annotations

from collections.abc import Iterable

from mtpconvert.convert.nearby import ByFirstAxis, first_axis
from mtpconvert.convert.pieces import clip, pieces_of
from mtpconvert.convert.window import WINDOW, Gatherer, aligned_buffer
from mtpconvert.stores.base import Chunk, Reader
from mtpconvert.tensors import DTYPE_BITS, Block, Shape, Tile, whole


def differing_elements(reader: Reader, left: str, right: str) -> int:
    """How many elements of two tensors of one shape and dtype differ in their bits."""
    spec = reader.inventory()[left]
    size = DTYPE_BITS[spec.dtype] // 8
    total = 0
    for one, other in zip(
        windows(reader, whole(left, spec.shape), size), windows(reader, whole(right, spec.shape), size), strict=True
    ):
        if one != other:
            total += sum(one[at : at + size] != other[at : at + size] for at in range(0, len(one), size))
    return total


def nonzero_rows(reader: Reader, block: Block) -> int:
    """How many rows (first axis) of a block, whose other axes are whole, hold a bit that is set."""
    size = DTYPE_BITS[reader.inventory()[block.tensor].dtype] // 8
    row = size * block.volume // max(1, block.box[0][1] - block.box[0][0])
    found: set[int] = set()
    at = 0
    for content in windows(reader, block, size):
        if any(content):
            found.update((at + index) // row for index, byte in enumerate(content) if byte)
        at += len(content)
    return len(found)


def windows(reader: Reader, block: Block, itemsize: int) -> Iterable[bytes]:
    """The bytes of a block in C order, a window at a time."""
    extents = tuple(stop - start for start, stop in block.box)
    tile = Tile(whole("", extents), block)
    target = Chunk(tuple((0, n) for n in extents), 0, 0, _steps(extents, itemsize))
    chunks = ByFirstAxis((c.box[0] if c.box else (0, 1), c) for c in reader.chunks(block.tensor))
    pieces = list(pieces_of(tile, False, chunks.meeting(*first_axis(block)), target, itemsize))
    buffer = aligned_buffer(WINDOW)
    gatherer = Gatherer(reader.read)
    total = block.volume * itemsize
    for start in range(0, total, WINDOW):
        stop = min(start + WINDOW, total)
        for piece in pieces:
            for part in clip(piece, start, stop):
                gatherer.gather(part, buffer, start)
        yield bytes(buffer[: stop - start])


def _steps(extents: Shape, itemsize: int) -> Shape:
    steps, step = [], itemsize
    for extent in reversed(extents):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))
