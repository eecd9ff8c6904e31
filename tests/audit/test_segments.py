"""Blocks cut out of chunked files, against numpy indexing of the whole tensor; exact covers against counting."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpconvert.audit.cover import cover_fault
from mtpconvert.audit.readers.side import Piece, Side, row_major
from mtpconvert.audit.segments import grid_groups
from mtpconvert.audit.windows import Buffer, Operand, Reader, windows
from mtpconvert.tensors import Block, TensorSpec


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, ...]:
    """A shape with its grid, cuts along each axis (chunks), a memory order, a box of the grid, an order of axes."""
    groups = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
    shape = tuple(prod(group) for group in groups)
    grid = tuple(extent for group in groups for extent in group)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    fortran = draw(st.booleans())
    box = []
    for extent in grid:
        start = draw(st.integers(0, extent - 1))
        box.append((start, draw(st.integers(start + 1, extent))))
    wide = sum(stop - start != 1 for start, stop in box)
    return (
        shape,
        grid,
        cuts,
        fortran,
        tuple(box),
        tuple(draw(st.permutations(range(wide)))),
        draw(st.sampled_from([2, 4])),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), limit=st.sampled_from([4, 16, 64, 1 << 20]))
def test_a_block_is_what_numpy_says(tmp_path: Path, layout: tuple[Any, ...], limit: int) -> None:
    shape, grid, cuts, fortran, box, order, size = layout
    whole = (np.arange(prod(shape)) + 1).astype({2: "<u2", 4: "<u4"}[size]).reshape(shape)
    data, pieces = b"\xff" * 3, []
    for corner in product(*(list(pairwise(cut)) for cut in cuts)):
        part = whole[tuple(slice(*interval) for interval in corner)]
        strides = row_major(part.shape, size)
        if fortran:
            strides = tuple(reversed(row_major(tuple(reversed(part.shape)), size)))
        pieces.append(Piece(corner, 0, len(data), strides))
        data += part.tobytes(order="F" if fortran else "C")
    (tmp_path / "file").write_bytes(data)
    spec = TensorSpec("t", shape, {2: "BF16", 4: "F32"}[size])
    side = Side("left", tmp_path, "megatron", "", {"t": spec}, [tmp_path / "file"], lambda name: pieces)
    operand = Operand(side, Block("t", shape, grid, box), order)
    reader, buffer = Reader(side), Buffer()
    view = whole.reshape(grid)[tuple(slice(*interval) for interval in box)]
    expected = view.reshape([n for n in view.shape if n != 1]).transpose(order)
    assert operand.extents == expected.shape
    seen = np.zeros(expected.shape, bool)
    for window in windows(operand.extents, size, limit):
        length = reader.fill(operand, window, buffer)
        place = tuple(slice(*interval) for interval in window)
        assert buffer.view[:length].tobytes() == expected[place].tobytes()
        assert length <= max(limit, size)
        assert not seen[place].any()
        seen[place] = True
    assert seen.all()
    reader.close()
    index = tuple(n - 1 for n in operand.extents)
    assert whole[operand.tensor_index(index)] == expected[index]


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), harm=st.sampled_from(["none", "drop", "twice"]))
def test_cover_fault_finds_gaps_and_overlaps(layout: tuple[Any, ...], harm: str) -> None:
    shape, grid, _, _, box, _, _ = layout
    sides = [sorted({0, extent, *interval}) for extent, interval in zip(grid, box, strict=True)]
    blocks = [Block("t", shape, grid, corner) for corner in product(*(list(pairwise(s)) for s in sides))]
    if harm == "drop":
        blocks = blocks[1:]
    if harm == "twice":
        blocks.append(blocks[0])
    if not blocks:
        return
    assert (cover_fault(blocks, shape) is None) == (harm == "none")


def test_a_grid_that_refines_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="does not refine"):
        grid_groups((6,), (4, 2))
    assert grid_groups((6, 1, 4), (2, 3, 1, 4, 1)) == [[0, 1], [2], [3, 4]]
