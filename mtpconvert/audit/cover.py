"""Each half of the description is an exact cover of its side, or an element that nobody names would go unaudited."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.pairs import fits
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.segments import grid_groups
from mtpconvert.tensors import Block, Box, Shape


def other_part(side: Side) -> set[str]:
    """Names of a Hugging Face side that belong to another model than the language model: vision."""
    if not side.is_huggingface:
        return set()
    from mtpconvert.audit.roles.huggingface import other_prefixes

    prefixes = other_prefixes(side.config or {})
    return {name for name in side.inventory if name.startswith(prefixes)} if prefixes else set()


def check_cover(side: Side, placements: list[Placement]) -> tuple[list[Placement], list[Finding]]:
    """The placements that can be used, and a finding for every tensor that they do not name exactly once.

    A tensor with a fault is left out as a whole: half a cover would compare numbers under a wrong meaning.
    """
    first: dict[str, Placement] = {}  # by tensor; most have one placement
    several: dict[str, list[Placement]] = {}
    parts: list[str] = []  # tensors that a placement holds less than all of
    findings: list[Finding] = []
    bad: set[str] = set()
    inventory = side.inventory
    box: Box | None = None  # the last one seen to be all of its grid: neighbouring experts share both
    grid: Shape | None = None
    for placement in placements:
        block = placement.block
        name = block.tensor
        if name in first:
            several.setdefault(name, [first[name]]).append(placement)
        else:
            first[name] = placement
        if block.box is not box or block.grid is not grid:
            if block.box == tuple([(0, extent) for extent in block.grid]):
                box, grid = block.box, block.grid
            else:
                parts.append(name)
        why = fits(placement, inventory)
        if why is not None and name not in bad:
            bad.add(name)
            if name in inventory:
                text = f"{name}: the description of {placement.role.name} {why}"
                findings.append(finding("role-overlap", text, side=side.label, tensor=name, role=placement.role.name))
    for name in sorted(inventory.keys() - first.keys() - other_part(side)):
        text = f"{name}: no meaning is known for it, so it was not compared"
        findings.append(finding("role-unknown", text, side=side.label, tensor=name))
    for name in dict.fromkeys([*parts, *several]):
        if name in bad:
            continue
        why = cover_fault([holder.block for holder in several.get(name, [first[name]])], inventory[name].shape)
        if why is not None:
            bad.add(name)
            findings.append(finding("role-overlap", f"{name}: {why}", side=side.label, tensor=name))
    if not bad:
        return placements, findings
    return [placement for placement in placements if placement.block.tensor not in bad], findings


def cover_fault(blocks: Iterable[Block], shape: tuple[int, ...]) -> str | None:
    """None if the blocks are disjoint and fill ``shape``; else what is wrong, with the first element concerned."""
    blocks = list(blocks)
    if _cut_along_one_axis(blocks, shape):
        return None
    import numpy as np

    total = prod(shape)
    starts: list[Any] = []
    lengths: list[Any] = []
    for block in blocks:
        try:
            grid_groups(block.shape, block.grid)
        except ValueError as error:
            return str(error)
        at, length = _runs(block)
        starts.append(at)
        lengths.append(np.full(len(at), length, dtype=np.int64))
    begin, run = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(begin, kind="stable")
    begin, run = begin[order], run[order]
    end = begin + run
    expected = np.concatenate([[0], end[:-1]])
    wrong = np.flatnonzero(begin != expected)
    if len(wrong):
        place = int(min(begin[wrong[0]], expected[wrong[0]]))
        kind = "described twice" if begin[wrong[0]] < expected[wrong[0]] else "not described"
        return f"element {place} of {total} is {kind}"
    if int(end[-1]) != total:
        return f"element {int(end[-1])} of {total} is not described"
    return None


def _cut_along_one_axis(blocks: list[Block], shape: tuple[int, ...]) -> bool:
    """Whether they are slices of one grid along one axis, one after the other: most covers, decided without numpy."""
    first = blocks[0]
    if any(block.grid != first.grid or block.shape != shape for block in blocks):
        return False
    cuts = [axis for axis, (interval, extent) in enumerate(zip(first.box, first.grid, strict=True))
            if interval != (0, extent)]  # fmt: skip
    if len(cuts) != (len(blocks) > 1):
        return False
    if cuts:
        cut, at = cuts[0], 0
        for start, stop in sorted(block.box[cut] for block in blocks):
            if start != at or stop <= start:
                return False
            at = stop
        others = {(block.box[:cut], block.box[cut + 1 :]) for block in blocks}
        if at != first.grid[cut] or len(others) > 1:
            return False
    try:
        grid_groups(shape, first.grid)
    except ValueError:
        return False
    return True


def _runs(block: Block) -> tuple[Any, int]:
    """Row-major positions where contiguous runs of the block begin, and the length of each."""
    import numpy as np

    axis, length = len(block.grid), 1
    while axis:
        start, stop = block.box[axis - 1]
        length *= stop - start
        axis -= 1
        if stop - start != block.grid[axis]:
            break
    stride = prod(block.grid[axis:])
    at = np.zeros(1, dtype=np.int64)
    for number in range(axis - 1, -1, -1):
        start, stop = block.box[number]
        at = (np.arange(start, stop, dtype=np.int64)[:, None] * stride + at[None, :]).reshape(-1)
        stride *= block.grid[number]
    if axis < len(block.grid):
        at = at + block.box[axis][0] * prod(block.grid[axis + 1 :])
    return at, length
