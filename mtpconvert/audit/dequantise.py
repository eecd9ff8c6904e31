"""Codes and scales as the bf16 they stand for, window by window, by the auditor's own arithmetic.

FP8: value of the e4m3 code (OCP 8-bit floating point, table 1) times its block's scale in float32, rounded to nearest
even to bf16. MXFP4: ``mxfp4``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from mtpconvert.audit.mxfp4 import Experts
from mtpconvert.audit.readers.side import Packed, Side
from mtpconvert.audit.segments import grid_groups
from mtpconvert.audit.values import to_bfloat16, widen
from mtpconvert.audit.windows import Buffer, Operand, Reader, windows
from mtpconvert.tensors import Block, Box, Shape

_CHUNK = 1 << 15  # elements decoded at once: what is in between stays in the processor's cache


@dataclass(slots=True)
class Codes:
    """One window of FP8. ``codes`` u8, as the window lies; ``scales`` float32, the box of scales that the
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

    def parts(self, out: Any) -> Iterator[tuple[Codes, Any]]:
        """The window in stretches along its first axis that is longer than one, and the same stretches of ``out``."""
        axis = next((at for at, extent in enumerate(self.codes.shape) if extent > 1), None)
        if axis is None:
            yield self, out
            return
        step = max(1, _CHUNK * self.codes.shape[axis] // self.codes.size)
        for start in range(0, self.codes.shape[axis], step):
            cut = (*((slice(None),) * axis), slice(start, start + step))
            places = [place[cut] if place.shape[axis] > 1 else place for place in self.places]
            yield Codes(self.codes[cut], self.scales, self.corner, places), out[cut]


class Decoder:
    """Reads windows of packed tensors for one Reader, into its own buffer; not to be shared between threads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer, self._boxes = Buffer(), Buffer()
        self._experts = Experts(self._box)

    def fill(self, operand: Operand, window: Box, buffer: Buffer) -> int:
        """Decode the window in C order into ``buffer`` as bf16; returns its length in bytes."""
        shape = tuple(stop - start for start, stop in window)
        count = prod(shape)
        values = buffer.array[: 2 * count].view("<u2").reshape(shape)
        packed, stored = packing(operand)
        if packed.scheme == "mxfp4":
            values[...] = self._experts.words(stored, packed, indices(operand, window), shape)
        else:
            fp8_words(self.read(operand, window), values)
        return 2 * count

    def read(self, operand: Operand, window: Box) -> Codes:
        """Codes and scales of a window of FP8. CheckpointError where bytes are missing."""
        packed, stored = packing(operand)
        raw = Block(packed.codes, operand.view.shape, operand.view.grid, operand.view.box)
        length = self._reader.fill(Operand(stored, raw, operand.order), window, self._buffer)
        codes = self._buffer.array[:length].reshape([stop - start for start, stop in window])
        places = [at // size for at, size in zip(indices(operand, window), packed.block, strict=True)]
        spec = stored.inventory[packed.scales]
        if len(spec.shape) != len(places):  # one factor for the whole tensor
            places = [0 * place for place in places[: len(spec.shape)]]
        box = tuple((int(place.min()), int(place.max()) + 1) for place in places)
        scales = scale_values(self._box(stored, packed.scales, box), spec.dtype)
        return Codes(codes, scales, tuple(start for start, _ in box), places)

    def whole(self, stored: Side, name: str) -> Any:
        """All words of a stored tensor, for scales."""
        return self._box(stored, name, tuple((0, extent) for extent in stored.inventory[name].shape))

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


def packing(operand: Operand) -> tuple[Packed, Side]:
    """What a decoded operand is packed as, and the side as it is stored."""
    stored = operand.side.stored
    assert stored is not None
    return operand.side.packed[operand.tensor], stored


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


def fp8_words(read: Codes, out: Any) -> None:
    """Write the bf16 bit patterns of a window of FP8 to ``out``, an array of its shape."""
    import numpy as np

    values, scales = e4m3_values(), read.scales.reshape(-1)
    with np.errstate(all="ignore"):
        if len(scales) * 256 <= read.codes.size:  # every code under every scale once, and each element looked up
            table = rounded(scales[:, None] * values).reshape(-1)
            for part, words in read.parts(out):
                places = part.flat() * 256 + part.codes
                np.take(table, places, out=words, mode="clip")  # clip: written straight to ``out``
        else:
            for part, words in read.parts(out):
                words[...] = rounded(np.take(values, part.codes) * np.take(scales, part.flat()))


def rounded(values: Any) -> Any:
    """float32 as bf16 bit patterns, to nearest even."""
    import numpy as np

    return to_bfloat16(values.view(np.uint32))
