"""Fill a window of the target from source files: long runs straight into it, short ones through numpy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace

from mtpconvert.convert.pieces import Piece

WINDOW = 1 << 20  # bytes; 256 KiB to 1 MiB a thread measured alike (docs/performance.md)
LONG_RUN = 1 << 14  # from here on one system call a run costs less than it moves
SLAB = 4 << 20  # source bytes held at once to gather short runs from

Read = Callable[[int, memoryview, int], None]  # fill the buffer from an offset of a source file: ``Reader.read``


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory that starts at a page: reading page-aligned file data into a bytearray is up to 4 times slower."""
    return memoryview(mmap.mmap(-1, size))


class Gatherer:
    """Copies pieces into a window; one for each thread, with its own scratch memory."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._slab: memoryview | None = None

    def gather(self, piece: Piece, window: memoryview, start: int) -> None:
        """Copy ``piece``, whose target bytes all lie in ``window``, whose first byte is target byte ``start``."""
        if not piece.dims:
            begin = piece.target - start
            self._read(piece.file, window[begin : begin + piece.run], piece.source)
            return
        if piece.run < LONG_RUN and piece.source_span <= SLAB:
            self._gather_strided(piece, window, start)
            return
        # Cut along the dim with the longest source step: it splits the source best, and ends at single runs.
        widest = max(range(len(piece.dims)), key=lambda index: piece.dims[index][1])
        count, step, goal = piece.dims[widest]
        rest = (*piece.dims[:widest], *piece.dims[widest + 1 :])
        rest_span = replace(piece, dims=rest).source_span
        at_once = 1 if piece.run >= LONG_RUN or rest_span > SLAB else (SLAB - rest_span) // step + 1
        for first in range(0, count, at_once):
            taken = min(at_once, count - first)
            dims = rest if taken == 1 else (*piece.dims[:widest], (taken, step, goal), *piece.dims[widest + 1 :])
            part = replace(piece, source=piece.source + first * step, target=piece.target + first * goal, dims=dims)
            self.gather(part, window, start)

    def _gather_strided(self, piece: Piece, window: memoryview, start: int) -> None:
        import numpy as np

        if self._slab is None:
            self._slab = aligned_buffer(SLAB)
        slab = self._slab[: piece.source_span]
        self._read(piece.file, slab, piece.source)
        begin = piece.target - start
        unit = next(size for size in (8, 4, 2, 1) if _divides(size, piece, begin))
        kind = np.dtype(f"u{unit}")
        shape = (*(count for count, _, _ in piece.dims), piece.run // unit)
        source_steps = (*(step for _, step, _ in piece.dims), unit)
        target_steps = (*(goal for _, _, goal in piece.dims), unit)
        source = np.ndarray(shape, kind, slab, 0, source_steps)
        target = np.ndarray(shape, kind, window, begin, target_steps)
        target[...] = source


def _divides(size: int, piece: Piece, begin: int) -> bool:
    steps = [piece.run, begin, *(step for dim in piece.dims for step in dim[1:])]
    return all(step % size == 0 for step in steps)
