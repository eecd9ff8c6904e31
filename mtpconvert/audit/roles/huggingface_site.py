"""What the modules of the Hugging Face half stand on: config keys with transformers' defaults, and placements by name.

Units: every length is a count of elements. Nothing here knows a family or a tensor name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

from mtpconvert.audit.roles.algebra import Placement, Role
from mtpconvert.audit.roles.vocabulary import minus_one
from mtpconvert.errors import ConfigError
from mtpconvert.tensors import Block, Box, Inventory, Shape

Default = int | bool | None
# For each axis of a tensor, the lengths it is read as: a reshape, the first varies slowest.
Axes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """A parsed ``config.json`` read with the defaults of its transformers config class.

    ``aliases`` maps the key that files carry to the other spelling that the class accepts (its ``attribute_map``).
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, Default]
    aliases: Mapping[str, str]

    def raw(self, key: str) -> Any:
        """The value as the file has it, or the class's default; raises ConfigError when two spellings disagree."""
        spellings = [name for name in (key, self.aliases.get(key)) if name is not None and name in self.config]
        values = [self.config[name] for name in spellings]
        if len(values) == 2 and values[0] != values[1]:
            raise ConfigError(
                f"{spellings[0]} is {values[0]} and {spellings[1]} is {values[1]}, yet both name the same count",
                where=f"config.json: {spellings[0]}, {spellings[1]}",
                next_step="keep one of the two keys",
            )
        return values[0] if values else self.defaults[key]

    def count(self, key: str) -> int:
        """A whole number of at least zero; raises ConfigError for anything else, null included."""
        value = self.raw(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"{key} is {value!r}, not a whole number of at least zero",
                where=f"config.json: {key}",
                next_step=f"write {key} as the model was built",
            )
        return value

    def optional(self, key: str) -> int | None:
        """As ``count``, where null has a meaning of its own."""
        return None if self.raw(key) is None else self.count(key)

    def flag(self, key: str) -> bool:
        """True or false; raises ConfigError for anything else but null, which transformers reads as false."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(
                f"{key} is {value!r}, neither true nor false",
                where=f"config.json: {key}",
                next_step=f"write {key} as true or false",
            )
        return bool(value)

    def on(self, part: bool | str) -> bool:
        """Whether a part that may be left out is there: fixed by the modelling code, or by a config key."""
        return self.flag(part) if isinstance(part, str) else part

    def listed(self, key: str, length: int) -> list[Any] | None:
        """A list of at least ``length`` entries (one per layer), or None for null or no key; ConfigError otherwise."""
        value = self.raw(key)
        if value is not None and (not isinstance(value, list) or len(value) < length):
            said = f"has {len(value)} entries" if isinstance(value, list) else f"is {value!r}"
            raise ConfigError(
                f"{key} {said}, fewer entries than the {length} layers",
                where=f"config.json: {key}",
                next_step=f"write {key} as a list with an entry per layer",
            )
        return value


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` elements along one axis that hold ``[start, start + length)`` of an axis ``of`` elements long.

    ``of`` None: the piece is the whole of that axis of the role.
    """

    role: str
    length: int
    start: int = 0
    of: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Where a module stands: its place among the roles, the prefix of its tensors, the config, and what is on disk.

    ``zero_centred``: its norms keep ``scale - 1``.
    """

    place: str
    prefix: str
    settings: Settings
    inventory: Inventory
    zero_centred: bool = False

    def of_model(self) -> Site:
        """The same tensors, holding roles of the model as a whole."""
        return replace(self, place="")

    def at(self, place: str, prefix: str) -> Site:
        """Another place of the same model."""
        return replace(self, place=place, prefix=prefix)

    def has(self, tensor: str) -> bool:
        return self.prefix + tensor in self.inventory

    def either(self, *spellings: str) -> str:
        """The first of several spellings of one tensor that is on disk; the first of all when none is."""
        return next((tensor for tensor in spellings if self.has(tensor)), spellings[0])

    def norm(self, tensor: str, role: str, *axes: int) -> Placement:
        """All of the vector ``tensor``, read as ``axes``, scales a norm, in the convention of this site's norms."""
        return self.whole(tensor, minus_one(role) if self.zero_centred else role, (axes,))

    def whole(self, tensor: str, role: str, axes: Axes, *, copy: bool = False) -> Placement:
        """All of ``tensor``, read as ``axes``, is all of ``role``."""
        _, grid, box = _read(axes)
        return self.cut(tensor, axes, box, Role(self.place, role, grid), box, copy=copy)

    def members(self, tensor: str, role: str, axes: Axes, count: int) -> Iterator[Placement]:
        """For each index below ``count``, all of the tensor so numbered is that entry of ``role``'s first axis.

        ``tensor`` has ``{}`` where the index stands.
        """
        shape, grid, box = _read(axes)
        whole_role, pattern = Role(self.place, role, (count, *grid)), self.prefix + tensor
        for index in range(count):  # most tensors of a model with experts come by here
            block = Block(pattern.format(index), shape, grid, box)
            yield Placement(whole_role, ((index, index + 1), *box), block)

    def split(self, tensor: str, axes: Axes, axis: int, pieces: list[Piece]) -> Iterator[Placement]:
        """``pieces``, one after the other, are cut from ``axis`` (counted in the reading ``axes``) of ``tensor``.

        Raises ConfigError when the pieces do not add up to the axis (the config contradicts itself).
        """
        _, grid, whole = _read(axes)
        stops = list(accumulate(piece.length for piece in pieces))
        self._filled(tensor, stops[-1], grid[axis])
        for piece, stop in zip(pieces, stops, strict=True):
            box = (*whole[:axis], (stop - piece.length, stop), *whole[axis + 1 :])
            part = (*whole[:axis], (piece.start, piece.start + piece.length), *whole[axis + 1 :])
            extent = piece.length if piece.of is None else piece.of
            yield self.cut(
                tensor, axes, box, Role(self.place, piece.role, (*grid[:axis], extent, *grid[axis + 1 :])), part
            )

    def heads(self, tensor: str, axes: Axes, runs: list[tuple[str, int, int]]) -> Iterator[Placement]:
        """Axis 0 of ``tensor`` is cut into ``runs`` of (role, heads, dims of each head), one after the other.

        A head's dims are neighbours; the role's axes are (head, dim, then the rest of ``axes`` without unit ones).
        """
        _, grid, whole = _read(axes)
        self._filled(tensor, sum(heads * dims for _, heads, dims in runs), grid[0])
        rest = tuple(extent for extent in grid[1:] if extent != 1)
        start = 0
        for name, heads, dims in runs:
            role = Role(self.place, name, (heads, dims, *rest))
            for head in range(heads):
                part = ((head, head + 1), (0, dims), *((0, extent) for extent in rest))
                yield self.cut(tensor, axes, ((start, start + dims), *whole[1:]), role, part)
                start += dims

    def cut(
        self, tensor: str, axes: Axes, box: Box, role: Role, part: Box, order: Shape | None = None, copy: bool = False
    ) -> Placement:  # fmt: skip
        """``box`` of ``tensor``, read as ``axes``, is ``part`` of ``role``.

        ``order``: the axes of the reading in the order of the role's, where the tensor is stored transposed; axes
        that ``box`` cuts to one index may be left out.
        """
        shape, grid, _ = _read(axes)
        perm = None
        if order is not None:
            kept = [axis for axis, (start, stop) in enumerate(box) if stop - start != 1]
            perm = tuple(kept.index(axis) for axis in order if axis in kept)
            perm = None if perm == tuple(range(len(kept))) else perm
        return Placement(role, part, Block(self.prefix + tensor, shape, grid, box), perm, copy)

    def _filled(self, tensor: str, found: int, axis: int) -> None:
        if found != axis:
            raise ConfigError(f"parts of {found} in all cannot fill an axis of {axis}", where=self.prefix + tensor)


@cache
def _read(axes: Axes) -> tuple[Shape, Shape, Box]:
    """The shape of a tensor that is read as ``axes``, its grid, and the box that is all of it."""
    grid = tuple(length for parts in axes for length in parts)
    return tuple(prod(parts) for parts in axes), grid, tuple((0, length) for length in grid)
