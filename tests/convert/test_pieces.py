"""Pieces against numpy: whatever grids, boxes, chunk borders and windows, every element lands where numpy puts it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconvert.convert.pieces import clip, pieces_of
from mtpconvert.convert.window import Gatherer
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.source_files import read_exactly
from mtpconvert.tensors import Block, Tile

ITEM = 2


def cuts(draw, size: int) -> list[tuple[int, int]]:
    """A partition of [0, size) into intervals."""
    inner = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
    return list(itertools.pairwise([0, *inner, size]))


def chunked(draw, shape: tuple[int, ...], name: str, folder: Path) -> tuple[list[Chunk], np.ndarray]:
    """The tensor 0, 1, 2, ... cut into chunks that lie one after another in a file, shuffled, some strided."""
    values = (np.arange(int(np.prod(shape)), dtype="<u2") + 1).reshape(shape)
    boxes = draw(st.permutations(list(itertools.product(*(cuts(draw, size) for size in shape)))))
    chunks, content = [], b""
    for box in boxes:
        part = values[tuple(slice(a, b) for a, b in box)]
        order = draw(st.permutations(range(part.ndim)))
        stored = np.ascontiguousarray(part.transpose(order))
        strides = [0] * part.ndim
        for position, axis in enumerate(order):
            strides[axis] = stored.strides[position]
        chunks.append(Chunk(tuple(box), 0, len(content), tuple(strides)))
        content += stored.tobytes()
    (folder / name).write_bytes(content)
    return chunks, values


@st.composite
def cases(draw):
    """A tile between [A*B, C] cut as grid [A, B, C] and a tensor with an own grid, perhaps with its axes turned."""
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=3)))
    box = []
    for size in grid:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    source = Block("s", (grid[0] * grid[1], grid[2]), grid, tuple(box))
    perm = tuple(draw(st.permutations(range(len(source.extents))))) if draw(st.booleans()) else None
    extents = source.extents if perm is None else tuple(source.extents[p] for p in perm)
    before = draw(st.integers(0, 2))
    target_grid = (3, *extents, 2)
    target_box = ((before, before + 1), *((0, n) for n in extents), (1, 2))
    target = Block("t", target_grid, target_grid, target_box)
    return Tile(source, target, perm), draw(st.data())


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([3, 8, 64]), st.booleans())
def test_every_element_lands_where_numpy_puts_it(tmp_path_factory, case, window, reverse):
    tile, data = case
    folder = tmp_path_factory.mktemp("pieces")
    sources, values = chunked(data.draw, tile.hf.shape, "s", folder)
    shape = tile.mcore.shape
    if reverse:  # mcore -> HF: the arrow turned round over the same tile
        sources, values = chunked(data.draw, shape, "t", folder)
        shape = tile.hf.shape
    target_boxes = list(itertools.product(*(cuts(data.draw, size) for size in shape)))
    got = np.zeros(shape, "<u2")
    import os

    descriptor = os.open(folder / ("t" if reverse else "s"), os.O_RDONLY)
    gatherer = Gatherer(lambda _, buffer, offset: read_exactly(descriptor, buffer, offset))
    for box in target_boxes:
        part = np.zeros([b - a for a, b in box], "<u2")
        chunk = Chunk(tuple(box), 0, 1000, part.strides)
        pieces = list(pieces_of(tile, not reverse, sources, chunk, ITEM))
        content = bytearray(part.nbytes)
        for start in range(0, part.nbytes, window):
            stop = min(start + window, part.nbytes)
            buffer = memoryview(bytearray(stop - start))
            for piece in pieces:
                for clipped in clip(piece, start, stop):
                    gatherer.gather(clipped, buffer, start)
            content[start:stop] = buffer
        got[tuple(slice(a, b) for a, b in box)] = np.frombuffer(bytes(content), "<u2").reshape(part.shape)
    os.close(descriptor)

    hf = values if not reverse else np.zeros(tile.hf.shape, "<u2")
    mcore = values if reverse else np.zeros(tile.mcore.shape, "<u2")
    hf_part = hf.reshape(tile.hf.grid)[tuple(slice(a, b) for a, b in tile.hf.box)]
    mcore_part = mcore.reshape(tile.mcore.grid)[tuple(slice(a, b) for a, b in tile.mcore.box)]
    if reverse:
        flat = mcore_part.reshape(tile.mcore.extents)
        if tile.perm is not None:
            flat = flat.transpose(np.argsort(tile.perm))
        hf_part[...] = flat.reshape(hf_part.shape)
    else:
        flat = hf_part.reshape(tile.hf.extents)
        if tile.perm is not None:
            flat = flat.transpose(tile.perm)
        mcore_part[...] = flat.reshape(mcore_part.shape)
    assert np.array_equal(got, hf if reverse else mcore)
