"""Why a packed tensor and a plain one differ: which other scales would give every differing number exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mtpconvert.audit.compare import Bench, elements
from mtpconvert.audit.dequantise import Decoder, e4m3_values, packing, rounded, scale_values
from mtpconvert.audit.readers.side import Packed
from mtpconvert.audit.values import widen
from mtpconvert.audit.windows import Operand, windows
from mtpconvert.tensors import DTYPE_BITS, Shape

_IN_MEMORY = 24 << 20  # bytes of scales that are looked at as a whole
_SAMPLE = 256  # differing elements that sort the hypotheses; the one that is left is tried on all
_SIBLINGS = 2000  # other scale tensors of the layer that are tried


@dataclass(slots=True)
class _Differing:
    """Elements of one window that differ: FP8 codes, positions of their scales in the whole, the plain side's bits."""

    codes: Any
    scales: Any
    plain: Any


def scale_cause(bench: Bench, one: Operand, two: Operand) -> str | None:
    """The cause for one pair of which exactly one operand is FP8 with scales; None if no other scales fit."""
    import numpy as np

    if (one.tensor in one.side.packed) == (two.tensor in two.side.packed):
        return None
    coded = one if one.tensor in one.side.packed else two
    packed, stored = packing(coded)
    if packed.scheme != "fp8" or stored.inventory[packed.scales].nbytes > _IN_MEMORY:
        return None
    spec, decoder = stored.inventory[packed.scales], Decoder(bench.readers[coded.side.label])
    words = decoder.whole(stored, packed.scales)
    first = next(_differing(bench, decoder, one, two, spec.shape), None)
    if first is None:
        return None
    sample = _Differing(first.codes[:_SAMPLE], first.scales[:_SAMPLE], first.plain[:_SAMPLE])
    if len(first.codes) > 1:
        values = scale_values(words, spec.dtype)
        for cause, other in _other_scales(decoder, coded, values):
            if _explains(other, sample) and all(
                _explains(other, rest) for rest in _differing(bench, decoder, one, two, spec.shape)
            ):
                return cause
        if coded is two and all(_nearest(values, rest) for rest in _differing(bench, decoder, one, two, spec.shape)):
            return "rounded to F8_E4M3, each to the nearest number under its scale"
    under = {int(at) for rest in _differing(bench, decoder, one, two, spec.shape) for at in np.unique(rest.scales)}
    if len(under) == 1 and prod(spec.shape) > 1 and len(first.codes) > 1:
        return _one_scale(bench, decoder, one, two, words, spec.dtype, packed, under.pop())
    return None


def _differing(bench: Bench, decoder: Decoder, one: Operand, two: Operand, shape: Shape) -> Iterator[_Differing]:
    """Window by window, where there are any."""
    import numpy as np

    coded, plain, buffer = (one, two, bench.two) if one.tensor in one.side.packed else (two, one, bench.one)
    for window in windows(one.extents, one.size):
        count = prod(stop - start for start, stop in window)
        bench.read(one, window, bench.one)
        bench.read(two, window, bench.two)
        at = np.flatnonzero(elements(bench.one, count, one.size) != elements(bench.two, count, two.size))
        if not len(at):
            continue
        found = elements(buffer, count, plain.size)[at].copy()
        read = decoder.read(coded, window)
        places = np.broadcast_to(read.flat_in(shape), read.codes.shape).reshape(-1)
        yield _Differing(read.codes.reshape(-1)[at].copy(), places[at], found)


def _explains(scales: Any, differing: _Differing) -> bool:
    """Whether the codes under these scales (of the shape of the real ones) are the plain side's numbers."""
    import numpy as np

    with np.errstate(all="ignore"):
        values = np.take(e4m3_values(), differing.codes) * np.take(scales.reshape(-1), differing.scales)
    return bool((rounded(values) == differing.plain).all())


def _nearest(scales: Any, differing: _Differing) -> bool:
    """Whether each code is the nearest to its plain number under its scale (ties: either; too large: the last)."""
    import numpy as np

    grid = np.unique(np.abs(e4m3_values()[:0x7F])).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = widen(differing.plain, "BF16") / np.take(scales.reshape(-1), differing.scales)
    found = np.take(e4m3_values(), differing.codes).astype(np.float64)
    size = np.abs(exact)
    above = np.searchsorted(grid, size).clip(1, len(grid) - 1)
    best = np.minimum(np.abs(size - grid[above - 1]), np.abs(size - grid[above]))
    return bool((np.abs(exact - found) <= best + 2.0**-20 * size).all())


def _other_scales(decoder: Decoder, coded: Operand, values: Any) -> Iterator[tuple[str, Any]]:
    import numpy as np

    yield "plain cast: the codes' values without their scales", np.ones_like(values)
    yield "scales rounded to bfloat16 first", widen(rounded(values), "BF16").astype(np.float32)
    if values.ndim >= 2 and values.size > 1:
        for axis, name in ((-1, "column"), (-2, "row")):
            for step, word in ((1, "next"), (-1, "previous")):
                moved = np.roll(values, -step, axis)
                edge = [slice(None)] * values.ndim
                edge[axis] = slice(-1, None) if step == 1 else slice(0, 1)
                moved[tuple(edge)] = np.nan  # no neighbour there
                yield f"scales of a neighbour block (of the {word} block {name})", moved
        turned = values.swapaxes(-1, -2)
        yield "transposed scales", turned.reshape(values.shape)
        yield "transposed scales", values.reshape(turned.shape).swapaxes(-1, -2)
        for axis, name in ((-1, "columns"), (-2, "rows")):
            yield f"scales in reverse order along block {name}", np.flip(values, axis)
    packed, stored = packing(coded)
    layer = packed.name[: packed.name.find(".", packed.name.find("layers.") + 7) + 1]
    tried = 0
    for other in coded.side.packed.values():
        spec = stored.inventory[other.scales]
        if other.scales == packed.scales or not other.name.startswith(layer) or spec.shape != values.shape:
            continue
        tried += 1
        if tried > _SIBLINGS:
            return
        yield (
            f"scales of another tensor ({other.scales})",
            scale_values(decoder.whole(stored, other.scales), spec.dtype),
        )


def _one_scale(
    bench: Bench, decoder: Decoder, one: Operand, two: Operand, words: Any, dtype: str, packed: Packed, at: int
) -> str:  # fmt: skip
    """All differences lie in one block: its scale, and the bit of it that explains them, if one does."""
    import numpy as np

    place = [int(index) for index in np.unravel_index(at, words.shape)]
    for bit in range(DTYPE_BITS[dtype]):
        other = words.copy()
        other.reshape(-1)[at] ^= np.array(1 << bit, words.dtype)
        values = scale_values(other, dtype)
        if all(_explains(values, rest) for rest in _differing(bench, decoder, one, two, words.shape)):
            return f"one bit flipped in one scale, {packed.scales} at {place}"
    return f"all in one block, whose scale is {packed.scales} at {place}"
