"""MXFP4 experts as the bf16 they stand for: e2m1 codes times 2^(scale - 127) (OCP Microscaling 1.0, 5.3.3 and 5.4.1).

Two elements that follow one another share a byte, the first in its low half. On disk an expert is [rows, columns / 2],
the tensor it stands for [columns, rows] (transformers 5.24.0, integrations/mxfp4.py ``convert_moe_packed_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mtpconvert.audit.packed import GROUP
from mtpconvert.audit.readers.side import Packed, Side
from mtpconvert.tensors import Box, Shape

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = GROUP // 2  # of the codes under one scale
_KEPT = 32 << 20  # bytes of an expert's codes that are kept while its windows are asked for
_CHUNK = 1 << 15  # bytes of codes decoded at once: what is in between stays in the processor's cache

ReadBox = Callable[[Side, str, Box], Any]


@cache
def byte_values() -> Any:
    """By scale * 256 + byte: the bf16 bit patterns of both its elements, the first in the low half."""
    import numpy as np

    from mtpconvert.audit.dequantise import rounded

    values = np.array([sign * value for sign in (1.0, -1.0) for value in _E2M1])
    with np.errstate(all="ignore"):
        table = np.ldexp(values[None, :], np.arange(256)[:, None] - 127).astype(np.float32)
    table[255] = np.nan
    words = rounded(table).astype("<u4")
    return (words[:, None, :] | words[:, :, None] << 16).reshape(-1)


class Experts:
    """Decodes windows; remembers the expert it read last. ``read``: a box of a stored tensor."""

    def __init__(self, read: ReadBox) -> None:
        self._read = read
        self._last: tuple[Any, Any, Any] = ((), None, None)

    def words(self, stored: Side, packed: Packed, index: list[Any], shape: Shape) -> Any:
        """bf16 bit patterns of the elements with these indices (experts, columns, rows), as an array of ``shape``."""
        import numpy as np

        experts, columns, rows = (at.reshape(-1) for at in index)
        first, last = int(columns.min()) // 2, int(columns.max()) // 2 + 1
        found = np.empty((len(experts), len(rows), len(columns)), "<u2")
        for number, expert in enumerate(experts):
            self._decode(stored, packed, int(expert), rows, (first, last), columns - 2 * first, found[number])
        own = [[n for n, extent in enumerate(at.shape) if extent > 1] for at in (index[0], index[2], index[1])]
        axes = [n for group in own for n in group]
        return found.reshape([shape[n] for n in axes]).transpose(np.argsort(axes)).reshape(shape)

    def _decode(
        self, stored: Side, packed: Packed, expert: int, rows: Any, span: tuple[int, int], columns: Any, found: Any
    ) -> None:
        """Fill ``found`` [rows, columns]; ``columns`` count from the first element of byte ``span[0]`` of a row."""
        import numpy as np

        low, high = int(rows.min()), int(rows.max()) + 1
        codes, scales, corner = self._expert(stored, packed, expert, (low, high), span)
        groups = np.arange(*span) // _BYTES - corner[1]
        first = span[0] - corner[1] * _BYTES
        run = slice(int(columns[0]), int(columns[-1]) + 1) if (np.diff(columns) == 1).all() else columns
        for start in range(0, len(rows), step := max(1, _CHUNK // (span[1] - span[0]))):
            at = rows[start : start + step] - corner[0]
            places = np.take(scales[at], groups, axis=1).astype(np.intp) * 256
            places += codes[at, first : first + span[1] - span[0]]
            found[start : start + step] = np.take(byte_values(), places).view("<u2")[:, run]

    def _expert(
        self, stored: Side, packed: Packed, expert: int, rows: tuple[int, int], span: tuple[int, int]
    ) -> tuple[Any, Any, tuple[int, int]]:
        """Codes [rows, bytes] and scales [rows, groups] that hold what is asked for, and where they begin."""
        _, count, groups, _ = stored.inventory[packed.codes].shape
        if count * groups * _BYTES > _KEPT:
            box = (rows, (span[0] // _BYTES, -(-span[1] // _BYTES)))
            return (*self._boxes(stored, packed, expert, box), (box[0][0], box[1][0]))
        key = (id(stored), packed.codes, expert)
        if self._last[0] != key:
            self._last = (key, *self._boxes(stored, packed, expert, ((0, count), (0, groups))))
        return self._last[1], self._last[2], (0, 0)

    def _boxes(self, stored: Side, packed: Packed, expert: int, box: Box) -> tuple[Any, Any]:
        one: Box = ((expert, expert + 1), *box)
        codes = self._read(stored, packed.codes, (*one, (0, _BYTES)))
        scales = self._read(stored, packed.scales, one)
        return codes.reshape(codes.shape[1], -1), scales[0]
