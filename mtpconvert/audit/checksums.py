"""CRC-32 of the records of a Megatron checkpoint, taken from the bytes as the comparison reads them.

A record is read by several pairs, in stretches, by two threads. The CRC of a whole follows from those of its stretches
(CRC-32 is linear over GF(2)); only what no pair has read is read here.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Record, Side
from mtpconvert.audit.windows import WINDOW, Buffer, Reader
from mtpconvert.errors import CheckpointError

_POLYNOMIAL = 0xEDB88320  # APPNOTE.TXT 4.4.7; bit 31 is the coefficient of x^0
_ONE = 1 << 31

WORKERS = 2


class Sums:
    """CRC-32 of stretches of files, as one thread reads them. A stretch grows while reads follow one another."""

    def __init__(self) -> None:
        self._stretches: dict[tuple[int, int], tuple[int, int]] = {}  # (file, stop) -> (start, CRC-32)

    def add(self, file: int, offset: int, view: memoryview) -> None:
        """``view`` was read from ``offset`` of ``file``."""
        start, crc = self._stretches.pop((file, offset), (offset, 0))
        self._stretches[file, offset + len(view)] = start, zlib.crc32(view, crc)

    def by_file(self) -> dict[int, list[tuple[int, int, int]]]:
        """File number -> (start, stop, CRC-32) of its stretches."""
        table: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (file, stop), (start, crc) in self._stretches.items():
            table[file].append((start, stop, crc))
        return table


def combined(first: int, second: int, length: int) -> int:
    """CRC-32 of two byte strings one after the other, from that of each and the ``length`` in bytes of the second."""
    return _product(_power(8 * length), first) ^ second


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2) modulo that of CRC-32."""
    total = 0
    while a:
        if a & _ONE:
            total ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return total


@lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
    """x to the ``exponent`` modulo the polynomial of CRC-32."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square = _product(square, square)
        exponent >>= 1
    return power


def check_records(side: Side, sums: Iterable[Sums]) -> list[Finding]:
    """Each record of the side against its stored CRC-32, with what ``sums`` know of them already.

    Tensors whose records cannot be read become ``broken``.
    """
    known: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for one in sums:
        for file, stretches in one.by_file().items():
            known[file] += stretches
    for stretches in known.values():
        stretches.sort()
    names = [name for name in side.inventory if name not in side.broken]

    def share(number: int) -> list[tuple[int, Finding]]:
        reader, buffer = Reader(side), Buffer()
        try:
            faults = ((at, _fault(side, names[at], known, reader, buffer)) for at in range(number, len(names), WORKERS))
            return [(at, fault) for at, fault in faults if fault is not None]
        finally:
            reader.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        by_place = dict(pair for part in pool.map(share, range(WORKERS)) for pair in part)
    found = [by_place[at] for at in sorted(by_place)]
    side.broken |= {fault.tensor for fault in found if fault.code == "chunk-unreadable" and fault.tensor}
    return found


def _fault(
    side: Side, name: str, known: dict[int, list[tuple[int, int, int]]], reader: Reader, buffer: Buffer
) -> Finding | None:
    wrong: list[Record] = []
    try:
        for record in side.records(name):
            if _crc32(record, known.get(record.file, []), reader, buffer) != record.crc32:
                wrong.append(record)
    except CheckpointError as error:
        text = f"{name}: {error.what} ({error.where})"
        return finding("chunk-unreadable", text, side=side.label, tensor=name)
    if not wrong:
        return None
    first = wrong[0]
    place = f"{side.files[first.file].name}, bytes {first.offset} to {first.offset + first.length}"
    text = f"{name}: {len(wrong)} of its records do not match the CRC-32 stored with them; {place}"
    return finding("crc-mismatch", text, side=side.label, tensor=name)


def _crc32(record: Record, stretches: list[tuple[int, int, int]], reader: Reader, buffer: Buffer) -> int:
    """Of the whole record: stretches that lie in it one after the other, and the gaps between them, read now."""
    crc, at, end = 0, record.offset, record.offset + record.length
    for start, stop, of_stretch in stretches[bisect_left(stretches, (at, at, 0)) :]:
        if start >= end:
            break
        if start < at or stop > end:
            continue  # read twice, in different pieces
        crc = combined(_read(record.file, at, start, crc, reader, buffer), of_stretch, stop - start)
        at = stop
    return _read(record.file, at, end, crc, reader, buffer)


def _read(file: int, start: int, stop: int, crc: int, reader: Reader, buffer: Buffer) -> int:
    """``crc`` continued over the bytes ``[start, stop)`` of the file."""
    for at in range(start, stop, WINDOW):
        view = buffer.view[: min(WINDOW, stop - at)]
        reader.files.read_into(file, view, at)
        crc = zlib.crc32(view, crc)
    return crc
