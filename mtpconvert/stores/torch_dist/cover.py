"""Whether boxes cover a shape exactly: every element once. Integer arithmetic, no numbers read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from mtpconvert.tensors import Box, Shape


def first_flaw(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """None when ``boxes`` cover ``shape`` exactly once, else the first hole, overlap or excess in words.

    Empty boxes are allowed anywhere inside the shape; an empty shape needs no box.
    """
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=False)):
            return f"{show(box)} does not lie inside {list(shape)}"
    filled = [box for box in boxes if all(a < b for a, b in box)]
    return None if 0 in shape else _flaw(shape, filled, ())


def _flaw(shape: Shape, boxes: Sequence[Box], done: Box) -> str | None:
    """As ``first_flaw``, over the axes from ``len(done)`` on; ``done`` is the slab that all ``boxes`` span."""
    axis = len(done)
    if axis == len(shape):
        if len(boxes) == 1:
            return None
        return f"nothing holds {show(done)}" if not boxes else f"{len(boxes)} chunks hold {show(done)}"
    if len(boxes) == 1 and all(boxes[0][rest] == (0, shape[rest]) for rest in range(axis, len(shape))):
        return None  # by far the most frequent case: a chunk that is whole on the axes that are left
    groups: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        groups[box[axis]].append(box)
    cuts = sorted({0, shape[axis], *(edge for interval in groups for edge in interval)})
    slabs = list(pairwise(cuts))
    if set(groups) != set(slabs):  # intervals that straddle or miss each other: look at every slab alone
        groups = {slab: [box for box in boxes if box[axis][0] <= slab[0] and slab[1] <= box[axis][1]] for slab in slabs}
    for slab in slabs:
        flaw = _flaw(shape, groups[slab], (*done, slab))
        if flaw is not None:
            return flaw
    return None


def show(box: Box) -> str:
    """``[0:2, 4:8]``."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"
