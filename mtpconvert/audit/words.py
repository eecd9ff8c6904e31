"""A place in a tensor, in words: row and column, and what it means (head, expert, unit of which layer)."""

from __future__ import annotations

from mtpconvert.audit.compose import role_words
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.audit.roles.vocabulary import ROLES
from mtpconvert.tensors import Shape


def index_words(index: Shape, shape: Shape) -> str:
    """ "row 3, column 7" for a matrix, "element 5" for a vector, "[1, 2, 3]" above."""
    if len(shape) == 2:
        return f"row {index[0]}, column {index[1]}"
    if len(shape) == 1:
        return f"element {index[0]}"
    return f"index {list(index)}" if shape else "its only element"


def meaning(placements: list[Placement], index: Shape) -> tuple[Placement, Shape] | None:
    """The placement of a tensor that names the element at ``index``, and the element's index in its role."""
    for placement in placements:
        block = placement.block
        flat = 0
        for value, extent in zip(index, block.shape, strict=True):
            flat = flat * extent + value
        grid: list[int] = []
        for extent in reversed(block.grid):
            grid.append(flat % extent)
            flat //= extent
        grid.reverse()
        if all(start <= at < stop for at, (start, stop) in zip(grid, block.box, strict=True)):
            return placement, _in_role(placement, tuple(grid))
    return None


def _in_role(placement: Placement, grid: Shape) -> Shape:
    box = placement.block.box
    local = [at - start for at, (start, stop) in zip(grid, box, strict=True) if stop - start != 1]
    if placement.perm is not None:
        local = [local[at] for at in placement.perm]
    rest = iter(local)
    return tuple(start if stop - start == 1 else start + next(rest) for start, stop in placement.part)


def role_place(placement: Placement, index: Shape) -> str:
    """ "attn.k of MTP layer 0, kv_head 1, dim 3, column 5"."""
    axes = ROLES.get(placement.role.name, ((), ""))[0]
    where = ", ".join(f"{axis} {value}" for axis, value in zip(axes, index, strict=False))
    return f"{role_words(placement.role)}{', ' + where if where else ''}"
