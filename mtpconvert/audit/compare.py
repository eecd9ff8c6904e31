"""Every byte of every pair, in bounded memory: two threads, windows of 2 MiB, ``memcmp``; NaN and -0.0 are bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

from mtpconvert.audit.checksums import WORKERS, Sums
from mtpconvert.audit.outcomes import Outcome
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.readers.side import Side
from mtpconvert.audit.windows import WINDOW, Buffer, Operand, Reader, windows
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import Box, Shape


class Bench:
    """Buffers and open files of one thread. ``sums``: of the sides whose records have a CRC-32, by label."""

    def __init__(self, left: Side, right: Side, sums: dict[str, Sums] | None = None) -> None:
        notes = {label: of_side.add for label, of_side in (sums or {}).items()}
        self.readers = {side.label: Reader(side, notes.get(side.label)) for side in (left, right)}
        self.one, self.two = Buffer(), Buffer()

    def operands(self, pair: Pair, left: Side, right: Side) -> tuple[Operand, Operand]:
        first = right if pair.copy == "right" else left
        second = left if pair.copy == "left" else right
        return (
            Operand(first, pair.left, pair.left_order, less_one=pair.less_one == "right"),
            Operand(second, pair.right, pair.right_order, less_one=pair.less_one == "left"),
        )

    def read(self, operand: Operand, window: Box, buffer: Buffer) -> int:
        return self.readers[operand.side.label].fill(operand, window, buffer)

    def arrays(self, one: Operand, two: Operand) -> Iterator[tuple[Box, Any, Any]]:
        """Both operands window by window as arrays of unsigned integers as wide as their elements."""
        limit = WINDOW * min(one.size, two.size) // max(one.size, two.size)
        for window in windows(one.extents, min(one.size, two.size), limit):
            count = prod(stop - start for start, stop in window)
            self.read(one, window, self.one)
            self.read(two, window, self.two)
            yield window, elements(self.one, count, one.size), elements(self.two, count, two.size)

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


def elements(buffer: Buffer, count: int, size: int) -> Any:
    return buffer.array[: count * size].view({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[size])


_memcmp = ctypes.CDLL(None).memcmp if hasattr(ctypes.CDLL(None), "memcmp") else None
if _memcmp is not None:
    _memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _memcmp.restype = ctypes.c_int


def same(one: Buffer, two: Buffer, length: int) -> bool:
    """Whether the first ``length`` bytes are equal."""
    if _memcmp is not None:
        return bool(_memcmp(one.address, two.address, length) == 0)
    return one.view[:length].tobytes() == two.view[:length].tobytes()


def is_equal(bench: Bench, one: Operand, two: Operand) -> bool:
    """Early exit: only says yes or no. False for unequal extents or element sizes."""
    if one.extents != two.extents or one.size != two.size:
        return False
    for window in windows(one.extents, one.size):
        length = bench.read(one, window, bench.one)
        bench.read(two, window, bench.two)
        if not same(bench.one, bench.two, length):
            return False
    return True


def compare_pair(bench: Bench, pair: Pair, left: Side, right: Side) -> Outcome:
    """Compare one pair to its end. CheckpointError while reading becomes the Outcome's ``error``."""
    import numpy as np

    outcome = Outcome(pair, True)
    try:
        one, two = bench.operands(pair, left, right)
        outcome.total = prod(one.extents)
        outcome.nbytes = outcome.total * two.size
        if one.dtype != two.dtype:
            from mtpconvert.audit.values import compare_values

            outcome.values = compare_values(bench, one, two)
            outcome.equal = False
            return outcome
        for window in windows(one.extents, one.size):
            length = bench.read(one, window, bench.one)
            bench.read(two, window, bench.two)
            if same(bench.one, bench.two, length):
                continue
            count = length // one.size
            differs = elements(bench.one, count, one.size) != elements(bench.two, count, one.size)
            if pair.less_one == "left":
                from mtpconvert.audit.less_one import is_one_more

                differs &= ~is_one_more(bench, one, two, window)
                if not differs.any():
                    continue
            if outcome.first is None:
                outcome.first = place_in(window, int(np.argmax(differs)))
            outcome.differing += int(np.count_nonzero(differs))
            outcome.equal = False
    except CheckpointError as error:
        outcome.equal, outcome.error = False, error
    return outcome


def place_in(window: Box, flat: int) -> Shape:
    index: list[int] = []
    for start, stop in reversed(window):
        index.append(start + flat % (stop - start))
        flat //= stop - start
    return tuple(reversed(index))


def compare_pairs(pairs: list[Pair], left: Side, right: Side) -> tuple[list[Outcome], dict[str, list[Sums]]]:
    """Outcomes in the order of ``pairs``; by label of a side, the sums of the stretches that each thread has read.

    The largest are compared first, so that no thread is left alone with a large one at the end.
    """
    local = threading.local()
    benches: list[Bench] = []
    sums: dict[str, list[Sums]] = {side.label: [] for side in (left, right)}

    def work(pair: Pair) -> Outcome:
        if not hasattr(local, "bench"):
            mine = {side.label: Sums() for side in (left, right) if not side.is_huggingface}
            for label, of_side in mine.items():
                sums[label].append(of_side)
            local.bench = Bench(left, right, mine)
            benches.append(local.bench)
        return compare_pair(local.bench, pair, left, right)

    with ThreadPoolExecutor(WORKERS) as pool:
        order = sorted(range(len(pairs)), key=lambda at: -_elements_in(pairs[at]))
        by_place = dict(zip(order, pool.map(work, (pairs[at] for at in order)), strict=True))
    for bench in benches:
        bench.close()
    return [by_place[at] for at in range(len(pairs))], sums


def _elements_in(pair: Pair) -> int:
    return prod(stop - start for start, stop in pair.right.box)
