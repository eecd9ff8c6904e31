"""Codes and scales as the bf16 they stand for, window by window, by the auditor's own arithmetic.

FP8: value of the e4m3 code (OCP 8-bit floating point, table 1) times its block's scale in float32, rounded to nearest
even to bf16. MXFP4: value of the e2m1 code times 2^(scale - 127) (OCP Microscaling 1.0, 5.3.3 and 5.4.1), exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mtpconvert.audit.packed import GROUP
from mtpconvert.audit.readers.side import Packed, Side
from mtpconvert.audit.segments import grid_groups
from mtpconvert.audit.values import to_bfloat16, widen
from mtpconvert.audit.windows import Buffer, Operand, Reader, windows
from mtpconvert.tensors import Block, Box, Shape

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(slots=True)
class Codes:
    """One window of a packed tensor. ``codes`` u8, as the window lies; ``scales`` float32, the box of scales that the
    window meets, whose corner is ``corner``; ``places``: for each axis of the scales the index, in the whole tensor of
    scales, of each element's scale, broadcastable to the window."""

    codes: Any
    scales: Any
    corner: Shape
    places: list[Any]

    def flat(self) -> Any:
        """For each element the position of its scale in ``scales.reshape(-1)``."""
        return self.flat_in(self.scales.shape, self.corner)

    def flat_in(self, shape: Shape, corner: Shape | None = None) -> Any:
        """The same in a box of scales of ``shape`` at ``corner``; None: in all scales of the tensor."""
        total: Any = 0
        for place, low, extent in zip(self.places, corner or (0,) * len(shape), shape, strict=True):
            total = total * extent + (place - low)
        return total


class Decoder:
    """Reads windows of packed tensors for one Reader, into its own buffer; not to be shared between threads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer, self._boxes = Buffer(), Buffer()

    def fill(self, operand: Operand, window: Box, buffer: Buffer) -> int:
        """Decode the window in C order into ``buffer`` as bf16; returns its length in bytes."""
        read = self.read(operand, window)
        count = int(read.codes.size)
        values = buffer.array[: 2 * count].view("<u2").reshape(read.codes.shape)
        values[...] = (mxfp4_words if packing(operand).scheme == "mxfp4" else fp8_words)(read)
        return 2 * count

    def read(self, operand: Operand, window: Box) -> Codes:
        """Codes and scales of the window. CheckpointError where bytes are missing."""
        packed, stored = packing(operand), operand.side.stored
        assert stored is not None
        index = indices(operand, window)
        if packed.scheme == "mxfp4":
            codes = self._nibbles(stored, packed, index, window)
            places = [index[0], index[2], index[1] // GROUP]
        else:
            raw = Operand(
                stored, Block(packed.codes, operand.view.shape, operand.view.grid, operand.view.box), operand.order
            )
            length = self._reader.fill(raw, window, self._buffer)
            codes = self._buffer.array[:length].reshape([stop - start for start, stop in window])
            places = [at // size for at, size in zip(index, packed.block, strict=True)]
        spec = stored.inventory[packed.scales]
        if len(spec.shape) != len(places):  # one factor for the whole tensor
            places = [0 * place for place in places[: len(spec.shape)]]
        box = tuple((int(place.min()), int(place.max()) + 1) for place in places)
        words = self._box(stored, packed.scales, box)
        scales = words if packed.scheme == "mxfp4" else scale_values(words, spec.dtype)
        return Codes(codes, scales, tuple(start for start, _ in box), places)

    def whole(self, stored: Side, name: str) -> Any:
        """All words of a stored tensor, for scales."""
        return self._box(stored, name, tuple((0, extent) for extent in stored.inventory[name].shape))

    def _nibbles(self, stored: Side, packed: Packed, index: list[Any], window: Box) -> Any:
        """e2m1 codes: two adjacent elements of a row share a byte, the first in its low half."""
        import numpy as np

        expert, column, row = index
        groups = column // GROUP
        box = tuple((int(at.min()), int(at.max()) + 1) for at in (expert, row, groups))
        read = self._box(stored, packed.codes, (*box, (0, GROUP // 2)))
        read = read.reshape(*read.shape[:2], -1)
        pairs = read[expert - box[0][0], row - box[1][0], column // 2 - box[2][0] * (GROUP // 2)]
        shape = [stop - start for start, stop in window]
        return np.broadcast_to(pairs >> (4 * (column % 2)).astype(np.uint8) & 15, shape)

    def _box(self, stored: Side, name: str, box: Box) -> Any:
        """A box of a stored tensor as an array of unsigned integers of its shape."""
        import numpy as np

        shape = stored.inventory[name].shape
        operand = Operand(stored, Block(name, shape, shape, box))
        kind = {1: "u1", 2: "<u2", 4: "<u4"}[operand.size]
        parts = []
        for window in windows(operand.extents, operand.size):
            length = self._reader.fill(operand, window, self._boxes)
            parts.append(self._boxes.array[:length].copy())
        return np.concatenate(parts).view(kind).reshape([stop - start for start, stop in box])


def packing(operand: Operand) -> Packed:
    return operand.side.packed[operand.tensor]


def indices(operand: Operand, window: Box) -> list[Any]:
    """For each axis of the operand's tensor the index of each element of the window, broadcastable to it."""
    import numpy as np

    view, rank = operand.view, len(window)
    place = {axis: at for at, axis in enumerate(operand.axes)}
    found: list[Any] = []
    for group in grid_groups(view.shape, view.grid):
        total: Any = np.zeros((1,) * rank, dtype=np.int64)
        for axis in group:
            start = view.box[axis][0]
            steps: Any = start
            if axis in place:
                at = place[axis]
                low, high = window[at]
                steps = np.arange(start + low, start + high).reshape([-1 if n == at else 1 for n in range(rank)])
            total = total * view.grid[axis] + steps
        found.append(total)
    return found


def scale_values(words: Any, dtype: str) -> Any:
    """Bit patterns of scales as float32; an e8m0 is 2^(code - 127), its 255 NaN."""
    import numpy as np

    if dtype == "F8_E8M0":
        powers = np.ldexp(np.float64(1), words.astype(np.int64) - 127)
        return np.where(words == 255, np.nan, powers).astype(np.float32)
    return widen(words, dtype).astype(np.float32)


@cache
def e4m3_values() -> Any:
    """The float32 of each of the 256 codes."""
    import numpy as np

    return widen(np.arange(256, dtype=np.uint8), "F8_E4M3").astype(np.float32)


def fp8_words(read: Codes) -> Any:
    """bf16 bit patterns of a window of FP8."""
    import numpy as np

    values, flat, scales = e4m3_values(), read.flat(), read.scales.reshape(-1)
    if len(scales) * 256 <= read.codes.size:  # every code under every scale once, and each element looked up
        with np.errstate(all="ignore"):
            table = rounded(scales[:, None] * values)
        return np.take(table.reshape(-1), flat * 256 + read.codes)
    with np.errstate(all="ignore"):
        return rounded(np.take(values, read.codes) * np.take(scales, flat))


def rounded(values: Any) -> Any:
    """float32 as bf16 bit patterns, to nearest even."""
    import numpy as np

    return to_bfloat16(values.view(np.uint32))


@cache
def _mxfp4_table() -> Any:
    """bf16 bit patterns by scale * 16 + code."""
    import numpy as np

    values = np.array([sign * value for sign in (1.0, -1.0) for value in _E2M1])
    with np.errstate(all="ignore"):
        table = np.ldexp(values[None, :], np.arange(256)[:, None] - 127).astype(np.float32)
    table[255] = np.nan
    return rounded(table).reshape(-1)


def mxfp4_words(read: Codes) -> Any:
    """bf16 bit patterns of a window of MXFP4."""
    import numpy as np

    scales = np.take(read.scales.reshape(-1), read.flat()).astype(np.int64)
    return np.take(_mxfp4_table(), scales * 16 + read.codes)
