"""The proof accepts every right cover and refuses each way to be wrong; covers are cut by hand or by hypothesis."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconvert.errors import NotABijectionError
from mtpconvert.mapping.prove import linear_runs, prove, refinement
from mtpconvert.tensors import Block, Box, Fill, Tile, whole


def block(name: str, shape: tuple[int, ...], box: Box, grid: tuple[int, ...] | None = None) -> Block:
    return Block(name, shape, grid or shape, box)


def rows(name: str, start: int, stop: int, height: int = 6, width: int = 4) -> Block:
    return block(name, (height, width), ((start, stop), (0, width)))


# ---- right covers


def test_totals_of_a_small_model() -> None:
    """a [6,4] in two row blocks; b [4] whole; c [8,4] whose last two rows are padding."""
    tiles = [
        Tile(rows("h.a", 0, 2), rows("m.a", 4, 6)),
        Tile(rows("h.a", 2, 6), rows("m.a", 0, 4)),
        Tile(whole("h.b", (4,)), whole("m.b", (4,))),
        Tile(rows("h.c", 0, 6), rows("m.c", 0, 6, 8)),
    ]
    proof = prove(tiles, [Fill(rows("m.c", 6, 8, 8))])
    assert (proof.tiles, proof.hf_tensors, proof.mcore_tensors) == (4, 3, 3)
    assert (proof.elements, proof.filled) == (24 + 4 + 24, 8)


def test_a_scalar_and_unit_axes() -> None:
    prove([Tile(whole("h", ()), whole("m", ()))], [])
    prove([Tile(whole("h", (1, 5, 1)), whole("m", (5,)))], [])


def test_axes_may_be_turned_by_a_perm() -> None:
    prove([Tile(whole("h", (2, 3, 4)), whole("m", (4, 2, 3)), (2, 0, 1))], [])
    with pytest.raises(NotABijectionError, match="related to a block"):
        prove([Tile(whole("h", (2, 3, 4)), whole("m", (4, 2, 3)), (1, 2, 0))], [])
    for perm in [(0, 1), (0, 1, 1), (1, 2, 3)]:
        with pytest.raises(NotABijectionError, match="is no order of 3 axes"):
            prove([Tile(whole("h", (2, 3, 4)), whole("m", (2, 3, 4)), perm)], [])


def test_one_tensor_may_be_cut_by_different_grids() -> None:
    """[12] as [3,4]: the first column (0, 4, 8), and the rest as runs of another grid."""
    column = block("h", (12,), ((0, 3), (0, 1)), (3, 4))
    others = [block("h", (12,), ((start, start + 3),)) for start in (1, 5, 9)]
    target = [block("m", (12,), ((at, at + 3),)) for at in (0, 3, 6, 9)]
    prove([Tile(a, b) for a, b in zip([column, *others], target, strict=True)], [])
    others[1] = block("h", (12,), ((4, 7),))  # 4 is in the column already, 7 nowhere
    with pytest.raises(NotABijectionError, match="related twice: element 4"):
        prove([Tile(a, b) for a, b in zip([column, *others], target, strict=True)], [])


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it exactly, by cutting again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        if stop - start < 2:
            boxes.append(box)
            continue
        middle = draw(st.integers(start + 1, stop - 1))
        boxes += [(*box[:axis], (a, b), *box[axis + 1 :]) for a, b in ((start, middle), (middle, stop))]
    return shape, draw(st.permutations(boxes))


def tiles_of(shape: tuple[int, ...], boxes: list[Box]) -> list[Tile]:
    """Each box of "h" is a tensor of its own on the Megatron side."""
    tiles = []
    for number, box in enumerate(boxes):
        extents = tuple(b - a for a, b in box)
        tiles.append(Tile(block("h", shape, box), whole(f"m.{number}", extents)))
    return tiles


@given(partitions())
def test_every_partition_is_accepted(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert prove(tiles_of(shape, boxes), []).elements == np.prod(shape)


@settings(max_examples=120)
@given(partitions(), st.data())
def test_a_partition_with_one_box_lost_doubled_or_moved_is_refused(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    number = data.draw(st.integers(0, len(boxes) - 1))
    axis = data.draw(st.integers(0, len(shape) - 1))
    by = data.draw(st.sampled_from([-2, -1, 1, 2]))
    harm = data.draw(st.sampled_from(["lost", "doubled", "moved", "longer"]))
    box = boxes[number]
    start, stop = box[axis]
    if harm == "lost" and len(boxes) > 1:
        boxes.pop(number)
    elif harm == "doubled":
        boxes.append(box)
    elif harm == "longer":
        boxes[number] = (*box[:axis], (start, stop + 1), *box[axis + 1 :])
    else:
        boxes[number] = (*box[:axis], (start + by, stop + by), *box[axis + 1 :])
    with pytest.raises(NotABijectionError):
        prove(tiles_of(shape, boxes), [])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_linear_runs_are_the_elements_that_numpy_selects(grid: list[int], data: st.DataObject) -> None:
    box = []
    for size in grid:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    count = int(np.prod(grid))
    numbers = np.arange(count).reshape(grid)[tuple(slice(a, b) for a, b in box)].ravel()
    runs = list(linear_runs(Block("x", (count,), tuple(grid), tuple(box))))
    assert [at for start, length in runs for at in range(start, start + length)] == numbers.tolist()


@pytest.mark.parametrize(
    ("shape", "grid", "owners"),
    [
        ((6, 4), (6, 4), [0, 1]),
        ((6, 4), (2, 3, 4), [0, 0, 1]),
        ((6, 4), (6, 2, 2), [0, 1, 1]),
        ((6, 4), (3, 8), None),  # straddles the axes
        ((6, 4), (4, 6), None),
        ((6, 4), (6, 5), None),
        ((6, 4), (24,), None),
        ((6, 4), (6,), None),
        ((5,), (5, 1), [0, 0]),
        ((), (), []),
        ((), (1,), None),
    ],
)
def test_refinement(shape: tuple[int, ...], grid: tuple[int, ...], owners: list[int] | None) -> None:
    assert refinement(shape, grid) == owners


# ---- seeded faults

A, M = whole("h.a", (6, 4)), whole("m.a", (6, 4))
FAULTS: dict[str, tuple[list[Tile], list[Fill], str]] = {
    "a hole on the HF side": ([Tile(rows("h.a", 0, 5), whole("m.a", (5, 4)))], [], "24 elements, of which 20"),
    "a hole on the Megatron side": ([Tile(whole("h.a", (5, 4)), rows("m.a", 0, 5))], [], "24 elements, of which 20"),
    "an overlap on the HF side": (
        [Tile(rows("h.a", 0, 3), whole("m.a", (3, 4))), Tile(rows("h.a", 2, 5), whole("m.b", (3, 4)))],
        [],
        "Hugging Face elements are related twice",
    ),
    "an overlap on the Megatron side": (
        [Tile(whole("h.a", (3, 4)), rows("m.a", 0, 3)), Tile(whole("h.b", (3, 4)), rows("m.a", 2, 5))],
        [],
        "Megatron elements are related twice",
    ),
    "a source used twice": ([Tile(A, M), Tile(A, whole("m.b", (6, 4)))], [], "Hugging Face elements are related twice"),
    "a target written twice": ([Tile(A, M), Tile(whole("h.b", (6, 4)), M)], [], "Megatron elements are related twice"),
    "the same row twice": ([Tile(A, M), Tile(A, M)], [], "related twice"),
    "a scalar related twice": (
        [Tile(whole("h", ()), whole("m", ())), Tile(whole("h", ()), whole("n", ()))],
        [],
        "related twice",
    ),
    "one name with two shapes": (
        [
            Tile(rows("h.a", 0, 3), whole("m.a", (3, 4))),
            Tile(block("h.a", (6, 5), ((3, 6), (0, 5))), whole("m.b", (3, 5))),
        ],
        [],
        "is (6, 4) in one row and (6, 5) in another",
    ),
    "unequal extents": ([Tile(A, whole("m.a", (4, 6)))], [], "block of (6, 4) is related to a block of (4, 6)"),
    "equal volumes of other extents": ([Tile(A, whole("m.a", (24,)))], [], "block of (6, 4) is related"),
    "a grid that straddles axes": (
        [Tile(block("h.a", (6, 4), ((0, 3), (0, 8)), (3, 8)), whole("m.a", (3, 8)))],
        [],
        "does not refine",
    ),
    "a grid that is too small": (
        [Tile(block("h.a", (6, 4), ((0, 6), (0, 3)), (6, 3)), whole("m.a", (6, 3)))],
        [],
        "does not refine",
    ),
    "a box beyond its grid": ([Tile(rows("h.a", 3, 7), whole("m.a", (4, 4)))], [], "empty or outside its grid"),
    "a box before its grid": ([Tile(rows("h.a", -1, 3), whole("m.a", (4, 4)))], [], "empty or outside its grid"),
    "an empty box": ([Tile(A, M), Tile(rows("h.a", 3, 3), rows("m.a", 3, 3))], [], "empty or outside its grid"),
    "a box with too few axes": ([Tile(block("h.a", (6, 4), ((0, 6),)), whole("m.a", (6,)))], [], "outside its grid"),
    "padding over a token": (
        [Tile(rows("h.a", 0, 6), rows("m.a", 0, 6, 8))],
        [Fill(rows("m.a", 5, 8, 8))],
        "related twice",
    ),
    "padding that leaves a gap": (
        [Tile(rows("h.a", 0, 6), rows("m.a", 0, 6, 8))],
        [Fill(rows("m.a", 7, 8, 8))],
        "32 elements, of which 28",
    ),
    "a negative size": ([Tile(whole("h.a", (-3,)), whole("m.a", (-3,)))], [], "is no shape"),
    "two negative sizes": ([Tile(whole("h.a", (-3, -2)), whole("m.a", (-3, -2)))], [], "is no shape"),
    "two errors that cancel in volume": (  # rows 0-3 twice, rows 3-6 never: 24 elements all the same
        [Tile(rows("h.a", 0, 3), rows("m.a", 0, 3)), Tile(rows("h.a", 0, 3), rows("m.a", 3, 6))],
        [],
        "related twice",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused(name: str) -> None:
    tiles, fills, message = FAULTS[name]
    with pytest.raises(NotABijectionError, match=re.escape(message)) as refusal:
        prove(tiles, fills)
    assert refusal.value.exit_code == 4
    assert refusal.value.where


def test_many_experts_are_decided_quickly() -> None:
    """1024 slices of one tensor, half of them given in reverse, and one taken out."""
    shape = (1024, 8, 4)
    boxes = [((e, e + 1), (half, half + 4), (0, 4)) for e in reversed(range(1024)) for half in (0, 4)]
    tiles = [Tile(whole(f"h.{number}", (4, 4)), block("m", shape, box)) for number, box in enumerate(boxes)]
    assert prove(tiles, []).elements == 1024 * 32
    with pytest.raises(NotABijectionError, match="of which"):
        prove(tiles[:-1], [])
    tiles[7] = replace(tiles[7], mcore=tiles[8].mcore)
    with pytest.raises(NotABijectionError, match="related twice"):
        prove(tiles, [])
