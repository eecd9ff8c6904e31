"""From keys to tensors: stacked layers taken apart, halves and experts put together, names made canonical."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtpconvert.errors import CheckpointError, IncompleteError
from mtpconvert.stores.torch_dist import dialects
from mtpconvert.stores.torch_dist.stored import StoredTensor
from mtpconvert.tensors import Box, Shape, TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or one layer of it, and where it lies in the logical tensor.

    ``layer``: index on the stored tensor's first axis, dropped; None when the axis is not there. ``expert``: index on
    an axis that the logical tensor has in front. ``row``: where the piece begins on the next axis.
    """

    key: str
    layer: int | None = None
    expert: int | None = None
    row: int = 0

    def box(self, inner: Box) -> Box:
        """``inner``, a box of the piece itself, as a box of the logical tensor."""
        if self.row:
            (start, stop), *rest = inner
            inner = ((start + self.row, stop + self.row), *rest)
        return inner if self.expert is None else ((self.expert, self.expert + 1), *inner)


@dataclass(frozen=True, slots=True)
class Logical:
    """A logical tensor under its canonical name and the pieces that cover it."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Assembly:
    tensors: dict[str, Logical]
    notes: tuple[str, ...]
    stacked: bool


def assemble(tensors: Iterable[StoredTensor], arguments: Mapping[str, object]) -> Assembly:
    """All model tensors of a checkpoint as logical, canonically named ones.

    Raises NotRepresentableError (a hybrid model), CheckpointError (two tensors of one name, mixed dialects, layers or
    halves that do not fit each other), IncompleteError (an expert or a half that is not there).
    """
    stored = {tensor.key: tensor for tensor in tensors}
    prefix, bare = dialects.stripped(stored)
    dialects.refuse_hybrid(bare.values(), arguments)
    layered, stacked = _unstack(stored, bare)
    joined, singletons = _join(layered)
    renamed = dialects.canonical_names(joined)
    found: dict[str, Logical] = {}
    for name, (shape, dtype, pieces) in joined.items():
        canonical = renamed[name]
        if canonical in found:
            raise CheckpointError(
                f"{pieces[0].key} and {found[canonical].pieces[0].key} are both {canonical}",
                where=canonical,
                next_step="keep one of the two",
            )
        found[canonical] = Logical(TensorSpec(canonical, shape, dtype), tuple(pieces))
    changed = sum(name != canonical for name, canonical in renamed.items())
    notes = (
        f"prefix {prefix!r} taken off every name" if prefix else "",
        f"{stacked} layers stored under one key each" if stacked else "",
        "experts and gate and up halves stored under keys of their own" if singletons else "",
        f"{changed} names are those of another layer spec or version, and were translated" if changed else "",
    )
    return Assembly(found, tuple(note for note in notes if note), stacked > 0)


_Part = tuple[Shape, str, Piece]  # shape and dtype of the piece


def _unstack(stored: Mapping[str, StoredTensor], bare: Mapping[str, str]) -> tuple[dict[str, _Part], int]:
    """Per-layer names -> parts, and the number of stacked layers (0: none)."""
    counts: dict[int, str] = {}
    parts: dict[str, _Part] = {}
    for key, name in bare.items():
        tensor, inner = stored[key], dialects.unstacked(name)
        if inner is None:
            _put(parts, name, (tensor.shape, tensor.dtype, Piece(key)))
            continue
        if not tensor.shape or not tensor.shape[0]:
            raise CheckpointError(f"{key} stacks layers, but has shape {list(tensor.shape)}", where=key)
        counts.setdefault(tensor.shape[0], key)
        for layer in range(tensor.shape[0]):
            part = (tensor.shape[1:], tensor.dtype, Piece(key, layer=layer))
            _put(parts, f"decoder.layers.{layer}.{inner}", part)
    if len(counts) > 1:
        (first, one), (second, other), *_ = counts.items()
        raise CheckpointError(
            f"{one} stacks {first} layers, {other} {second}", where=other, next_step="save the checkpoint again"
        )
    return parts, next(iter(counts), 0)


def _put(parts: dict[str, _Part], name: str, part: _Part) -> None:
    if name in parts:
        raise CheckpointError(
            f"{part[2].key} and {parts[name][2].key} both hold {name}", where=name, next_step="keep one of the two"
        )
    parts[name] = part


def _join(parts: Mapping[str, _Part]) -> tuple[dict[str, tuple[Shape, str, list[Piece]]], bool]:
    """Names of whole tensors -> (shape, dtype, pieces): ``singleton_local_shards`` keys joined."""
    groups: dict[str, dict[tuple[int | None, str | None], _Part]] = defaultdict(dict)
    for name, part in parts.items():
        whole, expert, half = dialects.singleton(name)
        groups[whole][expert, half] = part
    joined = {}
    for whole, members in groups.items():
        if set(members) == {(None, None)}:
            shape, dtype, piece = members[None, None]
            joined[whole] = (shape, dtype, [piece])
        else:
            joined[whole] = _joined(whole, members)
    return joined, any(len(pieces) > 1 for _, _, pieces in joined.values())


def _joined(whole: str, members: Mapping[tuple[int | None, str | None], _Part]) -> tuple[Shape, str, list[Piece]]:
    experts = {expert for expert, _ in members}
    halves = ("w", "v") if any(half for _, half in members) else (None,)
    numbered = range(1 + max(expert or 0 for expert in experts))
    wanted = [(expert, half) for expert in ((None,) if experts == {None} else numbered) for half in halves]
    for expert, half in wanted:
        if (expert, half) not in members:
            raise IncompleteError(
                f"{whole} is stored in pieces, and {_label(expert, half)} is missing",
                where=whole,
                next_step="copy the checkpoint again",
            )
    (inner, dtype, _), *others = (members[one] for one in wanted)
    odd = next((part[2].key for part in others if part[:2] != (inner, dtype)), None)
    if odd is not None or len(members) != len(wanted) or (halves[0] and not inner):
        raise CheckpointError(f"the pieces of {whole} differ in shape or dtype", where=odd or whole)
    rows = inner[0] * len(halves) if halves[0] else None
    shape = inner if rows is None else (rows, *inner[1:])
    pieces = [
        Piece(members[expert, half][2].key, members[expert, half][2].layer, expert, inner[0] if half == "v" else 0)
        for expert, half in wanted
    ]
    return (shape if experts == {None} else (len(numbered), *shape)), dtype, pieces


def _label(expert: int | None, half: str | None) -> str:
    part = {"w": "its gate half (_w)", "v": "its up half (_v)", None: "it"}[half]
    return part if expert is None else f"expert {expert}" + (f", {part}" if half else "")
