"""What every store offers: whole, logical, canonically named tensors, and where their bytes lie.

A Reader never hands out tensor values: the executor moves bytes between the Chunks of a Reader and of a Writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtpconvert.tensors import Box, Inventory, Shape


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one logical tensor whose elements lie in one file.

    ``box``: one [start, stop) per axis of the logical tensor. ``file``: index for ``path()``. ``offset``: byte offset
    in that file of the box's first element. ``strides``: in bytes, one per axis of the logical tensor; C order
    except where a foreign checkpoint saved a transposed view.
    """

    box: Box
    file: int
    offset: int
    strides: Shape


class Reader(Protocol):
    kind: str  # for people: "Hugging Face safetensors", "Megatron torch_dist"
    root: Path

    def inventory(self) -> Inventory:
        """Every tensor under its logical, canonical name; shapes and dtypes of whole tensors."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Disjoint boxes that cover the tensor exactly."""

    def path(self, file: int) -> Path: ...

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` of the file, from any thread."""


class Writer(Protocol):
    """Target files under a temporary directory; whoever holds the Writer renames that directory at the end."""

    wants_crc: bool  # whether ``finish_chunk`` needs a CRC-32 of the chunk's bytes

    def create(self) -> None:
        """Create every file at its full size, headers included."""

    def chunks(self, name: str) -> Sequence[Chunk]:
        """Where the tensor's bytes go; every chunk is C-contiguous in its file."""

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        """Write ``content``, a part of one chunk. Any thread; the parts of one chunk come in order, by one thread."""

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        """A hint: these bytes are written and may go to the disk."""

    def finish_chunk(self, name: str, number: int, crc32: int) -> None:
        """Called once per chunk, after its bytes are written; ``number`` indexes ``chunks(name)``."""

    def commit(self) -> None:
        """Write what must come last (an index, ``.metadata``) and sync every file to disk."""

    def close(self) -> None:
        """Let go of the files: done by ``commit``, needed after a failure, or a full disk stays full."""
