"""Two blocks of equal extents, read side by side in windows of bounded size.

A window is a stretch of the common index space, a contiguous C-ordered array once read. Contiguous runs go
straight into its buffer; short runs are read as one span and picked apart with numpy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from mtpconvert.audit.readers.side import Side, itemsize
from mtpconvert.audit.segments import Segment, segments_of
from mtpconvert.errors import IncompleteError
from mtpconvert.tensors import DTYPE_BITS, Block, Box, Shape

WINDOW = 2 << 20
_SPAN = 1 << 20
_OPEN_FILES = 48  # per side and thread, well below the usual limit of 1,024
_SHORT = 8192  # runs below this many bytes are read as a span


Note = Callable[[int, int, memoryview], None]


class Files:
    """Open descriptors of one side, by file number; closed together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._open: dict[int, int] = {}

    def descriptor(self, file: int) -> int:
        if file not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = os.open(self.paths[file], os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return self._open[file]

    def read_into(self, file: int, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset``. IncompleteError where the file ends before."""
        descriptor = self.descriptor(file)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count <= 0:
                raise IncompleteError(
                    f"the file ends {len(view) - done} bytes early",
                    where=f"{self.paths[file]}, byte {offset + done}",
                    next_step="copy the file again from its origin",
                )
            done += count

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class Operand:
    """One side of a comparison: a block of one tensor of one Side, its extents in the common order.

    ``less_one``: each number is read less one, for comparison with what a zero-centred norm keeps.
    """

    def __init__(
        self, side: Side, block: Block, order: tuple[int, ...] | None = None, *, less_one: bool = False
    ) -> None:
        self.side, self.block, self.order, self.less_one = side, block, order, less_one
        spec = side.inventory[block.tensor]
        if DTYPE_BITS[spec.dtype] < 8:  # packed: only whole tensors, as bytes
            block = Block(block.tensor, (spec.nbytes,), (spec.nbytes,), ((0, spec.nbytes),))
        axes = [at for at, (start, stop) in enumerate(block.box) if stop - start != 1]
        self.axes = axes if order is None else [axes[at] for at in order]
        self.view = block
        self.extents: Shape = tuple(block.box[at][1] - block.box[at][0] for at in self.axes)
        self.dtype = spec.dtype
        self.size = itemsize(spec.dtype)
        self._segments: list[tuple[Box, int, int, Shape]] | None = None

    @property
    def tensor(self) -> str:
        return self.block.tensor

    def segments(self) -> list[tuple[Box, int, int, Shape]]:
        """(box, file, offset, strides) over the common axes. CheckpointError if the record cannot be found."""
        if self._segments is None:
            pieces = self.side.locate(self.tensor)
            if DTYPE_BITS[self.dtype] < 8:
                pieces = [type(p)(((0, self.view.shape[0]),), p.file, p.offset, (1,)) for p in pieces]
            self._segments = [self._common(segment) for segment in segments_of(self.view, pieces)]
        return self._segments

    def _common(self, segment: Segment) -> tuple[Box, int, int, Shape]:
        return (
            tuple(segment.box[at] for at in self.axes),
            segment.file,
            segment.offset,
            tuple(segment.strides[at] for at in self.axes),
        )

    def tensor_index(self, common: Shape) -> Shape:
        """Index into the real tensor of the element at ``common`` in the shared order."""
        grid = [start for start, _ in self.view.box]
        for at, value in zip(self.axes, common, strict=True):
            grid[at] += value
        flat = 0
        for value, extent in zip(grid, self.view.grid, strict=True):
            flat = flat * extent + value
        index: list[int] = []
        for extent in reversed(self.view.shape):
            index.append(flat % extent)
            flat //= extent
        return tuple(reversed(index))


def windows(extents: Shape, size: int, limit: int = WINDOW) -> Iterator[Box]:
    """Boxes that tile ``extents``, each contiguous in C order and of at most ``limit`` bytes (or one element)."""
    if 0 in extents:
        return
    axis, inner = len(extents), size
    while axis and inner * extents[axis - 1] <= limit:
        axis -= 1
        inner *= extents[axis]
    if axis == 0:
        yield tuple((0, extent) for extent in extents)
        return
    step = max(1, limit // inner)
    tail = tuple((0, extent) for extent in extents[axis:])
    outer = extents[: axis - 1]
    for number in range(prod(outer)):
        head: list[tuple[int, int]] = []
        for extent in reversed(outer):
            head.append((number % extent, number % extent + 1))
            number //= extent
        for start in range(0, extents[axis - 1], step):
            yield (*reversed(head), (start, min(start + step, extents[axis - 1])), *tail)


class Buffer:
    """Page-aligned memory for one window (reading into an unaligned bytearray ran at a quarter of the speed)."""

    def __init__(self, length: int = WINDOW) -> None:
        import numpy as np

        self.map = mmap.mmap(-1, max(length, WINDOW))
        self.view = memoryview(self.map)
        self.array: Any = np.frombuffer(self.map, dtype=np.uint8)
        self.address = self.array.ctypes.data


class Reader:
    """Reads windows of operands of one side into a Buffer; not to be shared between threads.

    ``note`` hears of each stretch of a file that was read without a gap: file number, offset, the bytes.
    """

    def __init__(self, side: Side, note: Note | None = None) -> None:
        self.files = Files(side.files)
        self._scratch = Buffer(_SPAN)
        self._note = note
        self._decoder: Any = None

    def _read(self, file: int, view: memoryview, offset: int) -> None:
        self.files.read_into(file, view, offset)
        if self._note is not None:
            self._note(file, offset, view)

    def fill(self, operand: Operand, window: Box, buffer: Buffer) -> int:
        """Read the window in C order; returns its length in bytes. Packed tensors come decoded."""
        length = self._fill(operand, window, buffer)
        if operand.less_one:
            from mtpconvert.audit.less_one import subtract_one

            subtract_one(buffer.array[:length], operand.dtype)
        return length

    def _fill(self, operand: Operand, window: Box, buffer: Buffer) -> int:
        if operand.tensor in operand.side.packed:
            if self._decoder is None:
                from mtpconvert.audit.dequantise import Decoder

                self._decoder = Decoder(self)
            return int(self._decoder.fill(operand, window, buffer))
        extents = tuple(stop - start for start, stop in window)
        total = prod(extents) * operand.size
        target = [operand.size] * len(extents)
        for at in range(len(extents) - 2, -1, -1):
            target[at] = target[at + 1] * extents[at + 1]
        for box, file, offset, strides in operand.segments():
            meet = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(window, box, strict=True)]
            if any(start >= stop for start, stop in meet):
                continue
            source = offset + sum((m[0] - b[0]) * s for m, b, s in zip(meet, box, strides, strict=True))
            goal = sum((m[0] - w[0]) * t for m, w, t in zip(meet, window, target, strict=True))
            self._copy(file, source, strides, [b - a for a, b in meet], goal, target, operand.size, buffer)
        return total

    def _copy(
        self, file: int, source: int, strides: Sequence[int], counts: Sequence[int], goal: int,
        target: Sequence[int], size: int, buffer: Buffer,
    ) -> None:  # fmt: skip
        """Copy a strided box of a file to a strided box of the buffer, by the longest runs that both agree on."""
        while counts and counts[0] == 1:
            strides, counts, target = strides[1:], counts[1:], target[1:]
        axis, run = len(counts), size
        while axis and (counts[axis - 1] == 1 or strides[axis - 1] == target[axis - 1] == run):
            axis -= 1
            run *= counts[axis]
        if axis == 0:
            self._read(file, buffer.view[goal : goal + run], source)
            return
        outer = counts[:axis]
        span = sum((n - 1) * s for n, s in zip(outer, strides, strict=False)) + run
        if run < _SHORT and span <= _SPAN:
            self._pick(file, source, span, outer, strides, run, goal, target, buffer)
            return
        for step in range(outer[0]):
            inner = source + step * strides[0], strides[1:], counts[1:], goal + step * target[0], target[1:]
            self._copy(file, *inner, size, buffer)

    def _pick(
        self, file: int, source: int, span: int, outer: Sequence[int], strides: Sequence[int], run: int,
        goal: int, target: Sequence[int], buffer: Buffer,
    ) -> None:  # fmt: skip
        import numpy as np

        read_all = self._read if span == prod(outer) * run else self.files.read_into
        read_all(file, self._scratch.view[:span], source)
        axes = len(outer)
        shape = (*outer, run)
        read = np.lib.stride_tricks.as_strided(self._scratch.array, shape, (*strides[:axes], 1))
        write = np.lib.stride_tricks.as_strided(buffer.array[goal:], shape, (*target[:axes], 1))
        write[...] = read

    def close(self) -> None:
        self.files.close()
