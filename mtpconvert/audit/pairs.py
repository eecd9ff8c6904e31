"""What is to be compared: pairs of blocks that must hold equal elements, and which meaning they have, if known."""

from __future__ import annotations

from dataclasses import dataclass

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.tensors import Block, Box, Inventory, Shape


@dataclass(frozen=True, slots=True)
class Pair:
    """``left`` and ``right`` hold the same elements; ``left_order``/``right_order`` permute their extents (unit axes
    dropped) into the common order. ``role`` and ``part``: the meaning, where a description knows it.
    ``copy``: both are of one side, and the second repeats the first. ``less_one``: the block that holds the scales of
    a norm less one, where the other holds the scales themselves ("left" or "right")."""

    left: Block
    right: Block
    role: Role | None = None
    part: Box | None = None
    left_order: tuple[int, ...] | None = None
    right_order: tuple[int, ...] | None = None
    copy: str = ""  # "left" or "right" when both blocks are of that side
    less_one: str = ""


def extents_of(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box if stop - start != 1)


def narrowed(placement: Placement, part: Box) -> Block:
    """The block of ``placement`` cut down to ``part`` of its role (which lies inside ``placement.part``)."""
    block = placement.block
    if part == placement.part:
        return block
    axes = [at for at, (start, stop) in enumerate(block.box) if stop - start != 1]
    order = placement.perm if placement.perm is not None else tuple(range(len(axes)))
    wide = [at for at, (start, stop) in enumerate(placement.part) if stop - start != 1]
    box = list(block.box)
    for number, role_axis in enumerate(wide):
        at = axes[order[number]]
        base = block.box[at][0] - placement.part[role_axis][0]
        box[at] = (base + part[role_axis][0], base + part[role_axis][1])
    return Block(block.tensor, block.shape, block.grid, tuple(box))


def order_within(placement: Placement, part: Box) -> tuple[int, ...] | None:
    """``placement.perm`` restricted to the axes that are still longer than one in ``part``."""
    if placement.perm is None:
        return None
    wide = [at for at, (start, stop) in enumerate(placement.part) if stop - start != 1]
    kept = [placement.perm[n] for n, at in enumerate(wide) if part[at][1] - part[at][0] != 1]
    return tuple(sorted(kept).index(value) for value in kept)


def meet(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes of one role, None if empty."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def fits(placement: Placement, inventory: Inventory) -> str | None:
    """Why the placement contradicts its own tensor, or None. Its extents must be those of its part."""
    block, part = placement.block, placement.part
    spec, box = inventory.get(block.tensor), block.box
    if spec is None:
        return "names a tensor that is not there"
    if spec.shape != block.shape:
        return f"expects shape {list(block.shape)}, the tensor has {list(spec.shape)}"
    if placement.perm is None and len(part) == len(placement.role.shape):
        lead = len(part) - len(box)  # the usual cases, quickly: the same intervals, or after the expert's axis
        if part == box or (lead == 1 and part[1:] == box and part[0][1] - part[0][0] == 1):
            return None
    extents = extents_of(box)
    if placement.perm is not None:
        if sorted(placement.perm) != list(range(len(extents))):
            return f"permutes {len(extents)} axes by {placement.perm}"
        extents = tuple(extents[at] for at in placement.perm)
    if extents != extents_of(part):
        return f"puts {list(extents)} elements where {placement.role.name} has {list(extents_of(part))}"
    if len(part) != len(placement.role.shape):
        return f"gives {len(part)} axes to {placement.role.name}, which has {len(placement.role.shape)}"
    return None
