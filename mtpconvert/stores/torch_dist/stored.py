"""What ``.metadata`` says about keys: the physical side of a torch_dist checkpoint, before any name is translated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpconvert.tensors import Box, Shape


@dataclass(frozen=True, slots=True)
class Place:
    """A record: ``length`` bytes at byte ``offset`` of ``file``, a name inside the iteration folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor and the record that holds it."""

    offsets: Shape
    sizes: Shape
    place: Place

    @property
    def box(self) -> Box:
        return tuple((start, start + n) for start, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A key of ``.metadata`` that is a tensor; the chunks cover ``shape`` exactly once checked."""

    key: str
    dtype: str
    shape: Shape
    chunks: Sequence[StoredChunk]
