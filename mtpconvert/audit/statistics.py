"""What a tensor's numbers look like: streamed, so that a tensor of any size takes one window of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.values import is_float, widen
from mtpconvert.audit.windows import Buffer, Operand, Reader, windows
from mtpconvert.tensors import whole


@dataclass(frozen=True, slots=True)
class Statistics:
    """``finite`` numbers of ``count``; mean and deviation of those; whether all elements are one bit pattern."""

    count: int
    finite: int
    mean: float
    deviation: float
    constant: bool
    value: float

    @property
    def zero(self) -> bool:
        return self.constant and self.value == 0.0

    @property
    def ones(self) -> bool:
        return self.constant and self.value == 1.0


def statistics_of(side: Side, name: str, reader: Reader, buffer: Buffer) -> Statistics | None:
    """Statistics of one tensor; None for dtypes that are no floats, and for empty tensors."""
    import numpy as np

    spec = side.inventory[name]
    if not is_float(spec.dtype) or spec.dtype == "F8_E8M0" or not spec.numel:
        return None
    operand = Operand(side, whole(name, spec.shape))
    kind = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[operand.size]
    count = finite = 0
    total = squares = 0.0
    first: Any = None
    constant = True
    for window in windows(operand.extents, operand.size):
        length = reader.fill(operand, window, buffer)
        raw = buffer.array[:length].view(kind)
        first = raw[0] if first is None else first
        constant = constant and bool((raw == first).all())
        values = widen(raw, spec.dtype)
        good = values[np.isfinite(values)]
        count, finite = count + len(values), finite + len(good)
        total, squares = total + float(good.sum()), squares + float((good * good).sum())
    mean = total / finite if finite else math.nan
    deviation = math.sqrt(max(0.0, squares / finite - mean * mean)) if finite else math.nan
    value = float(widen(np.array([first], dtype=kind), spec.dtype)[0])
    return Statistics(count, finite, mean, deviation, constant, value)
