"""How the tables of this half are written, and how a row of a table becomes Placements on physical tensors.

A table is a list of Entries. An Entry has one or more layouts: the ways in which megatron-core may have written the
same parameters (Transformer Engine or local spec, fused or split in two), the canonical way first. A layout is one
or several Params, a Param is one tensor cut into roles.

A decoder layer has one of two homes (``transformer_block.py: TransformerBlock.sharded_state_dict``): keys
``decoder.layers.{i}.<param>``, or ``decoder.layers.<param>`` with an axis of all layers in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.tensors import Block, Box, Inventory, Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """The box ``box`` of a Param's grid holds the box ``part`` of the role ``name``, whose whole shape is ``shape``."""

    name: str
    shape: Shape
    box: Box
    part: Box


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor: its key below the layer, each of its axes as a tuple of factors, and who is where in that grid."""

    key: str
    axes: tuple[Shape, ...]
    cuts: tuple[Cut, ...]

    @property
    def shape(self) -> Shape:
        return tuple(prod(factors) for factors in self.axes)

    @property
    def grid(self) -> Shape:
        return tuple(extent for factors in self.axes for extent in factors)


Layout = tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """``required``: the facts say that it exists, so it is placed even if the inventory lacks it.

    Otherwise the facts are silent, and it is placed where it is found.
    """

    layouts: tuple[Layout, ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Home:
    """Where a layer's tensors may be: below ``prefix``, and at ``index`` of a leading axis of ``count`` if stacked."""

    prefix: str
    index: int | None = None
    count: int = 0


def full(shape: Shape) -> Box:
    return tuple((0, extent) for extent in shape)


def cut(name: str, shape: Shape, *box: slice, part: Box | None = None) -> Cut:
    """A Cut whose box is given as one slice per grid axis, both ends written out; ``part`` None: the whole role."""
    return Cut(name, shape, tuple((s.start, s.stop) for s in box), full(shape) if part is None else part)


def same(key: str, name: str, *axes: int | Shape) -> Param:
    """A tensor that is one role; an axis given as a tuple stands for as many axes of the role."""
    factors = tuple((axis,) if isinstance(axis, int) else axis for axis in axes)
    shape = tuple(extent for axis in factors for extent in axis)
    return Param(key, factors, (Cut(name, shape, full(shape), full(shape)),))


def spelled(name: str, shape: Shape, *keys: str, required: bool = True) -> Entry:
    """One role under any of several keys, the canonical one first."""
    return Entry(tuple((same(key, name, *shape),) for key in keys), required)


def where(flag: bool | None, param: Param) -> list[Entry]:
    """An entry that the arguments ask for (True), exclude (False), or say nothing about (None: where it is found)."""
    return [] if flag is False else [Entry(((param,),), required=flag is True)]


def place_all(
    place: str, entries: Iterable[Entry], homes: tuple[Home, ...], inventory: Inventory
) -> Iterator[Placement]:
    """Placements of one layer or of the model.

    Every layout of which at least one tensor is in the inventory is placed whole: two spellings of one parameter in
    one checkpoint become two holders of one role. If there is none, a required entry is placed in its canonical
    layout at the first home, and whoever compares with the inventory finds the tensor missing.
    """
    for entry in entries:
        found = [
            (home, layout)
            for home in homes
            for layout in entry.layouts
            if any(home.prefix + param.key in inventory for param in layout)
        ]
        if not found and entry.required:
            found = [(homes[0], entry.layouts[0])]
        for home, layout in found:
            for param in layout:
                yield from _placements(place, param, home)


def _placements(place: str, param: Param, home: Home) -> Iterator[Placement]:
    layers: Shape = () if home.index is None else (home.count,)
    this: Box = () if home.index is None else ((home.index, home.index + 1),)
    for piece in param.cuts:
        block = Block(home.prefix + param.key, (*layers, *param.shape), (*layers, *param.grid), (*this, *piece.box))
        yield Placement(Role(place, piece.name, piece.shape), piece.part, block)
