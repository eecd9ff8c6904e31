"""How Megatron tensors are cut into chunks: as Megatron itself does, experts one by one, gate and up apart."""

from __future__ import annotations

from math import prod

from mtpconvert.mapping.plan import Plan
from mtpconvert.mapping.prove import linear_runs, refinement
from mtpconvert.tensors import Block, Box

FILE_BYTES = 4 << 30  # aimed at for one .distcp file of a large model


def chunk_boxes(plan: Plan) -> dict[str, list[Box]]:
    """Boxes of every Megatron tensor of an hf2mcore plan: one for each tile that is one stretch of the tensor.

    A tensor whose tiles interleave (query, key and value rows), or that has padding, is one chunk.
    """
    whole = {fill.mcore.tensor for fill in plan.fills}
    boxes: dict[str, list[Box]] = {name: [] for name in plan.mcore}
    for tile in plan.tiles:
        name = tile.mcore.tensor
        box = None if name in whole else _box(tile.mcore)
        if box is None:
            whole.add(name)
        else:
            boxes[name].append(box)
    for name in whole:
        boxes[name] = [tuple((0, size) for size in plan.mcore[name].shape)]
    return boxes


def _box(block: Block) -> Box | None:
    """The block as a box of its tensor's own axes, or None where it is not one contiguous stretch of the tensor."""
    runs = list(linear_runs(block)) if block.volume < prod(block.shape) else [(0, block.volume)]
    owners = refinement(block.shape, block.grid)
    if len(runs) > 1 or owners is None:
        return None
    box = []
    for axis in range(len(block.shape)):
        low = high = 0
        for position, owner in enumerate(owners):
            if owner == axis:
                start, stop = block.box[position]
                low, high = low * block.grid[position] + start, high * block.grid[position] + stop - 1
        box.append((low, high + 1))
    return tuple(box)


def file_count(nbytes: int) -> int:
    """How many .distcp files: at least two, so that two threads write, and readers read, apart."""
    return max(2, -(-nbytes // FILE_BYTES))
