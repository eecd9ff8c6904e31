"""A packed checkpoint as a Reader of bf16 tensors: what is asked for is decoded when it is read."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from mtpconvert.codecs import fp8_block, mxfp4
from mtpconvert.convert.packings import Packed, Packing
from mtpconvert.stores.base import Chunk
from mtpconvert.stores.safetensors.reader import SafetensorsReader
from mtpconvert.tensors import Inventory, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DECODED = -1  # number of the file that exists only while it is read
_KEPT = 8  # scales of so many tensors stay in memory


class DecodedReader:
    """Reader of ``raw`` through ``packing``: plain tensors as they are, packed ones as BF16 in a file of their own.

    Opening it reads nothing. ``read`` raises CheckpointError for a NaN among FP8 weights.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, raw: SafetensorsReader, packing: Packing) -> None:
        self.root, self._raw, self._packing = raw.root, raw, packing
        self._inventory = packing.decoded(raw.inventory())
        self._names: list[str] = []
        self._starts: list[int] = []
        at = 0
        for name, packed in packing.tensors.items():
            self._names.append(name)
            self._starts.append(at)
            at += packed.spec.nbytes
        self._start_of = dict(zip(self._names, self._starts, strict=True))
        self._scales: dict[str, NDArray[np.float32]] = {}
        self._lock = Lock()

    def check_scales(self) -> None:
        """Read every scale, 1 byte in 4,000 of a DeepSeek-V3. Raises CheckpointError for one that is not usable."""
        for packed in self._packing.tensors.values():
            self._check(packed)

    def inventory(self) -> Inventory:
        return self._inventory

    def chunks(self, name: str) -> tuple[Chunk]:
        if name not in self._start_of:
            return self._raw.chunks(name)
        shape = self._inventory[name].shape
        order = _stored_axes(self._packing, len(shape))
        strides, step = [0] * len(shape), 2
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        return (Chunk(tuple((0, dim) for dim in shape), DECODED, self._start_of[name], tuple(strides)),)

    def path(self, file: int) -> Path:
        return self.root if file == DECODED else self._raw.path(file)

    def read(self, file: int, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``: bytes of a real file, or bf16 of the one tensor that lies at ``offset``."""
        if file != DECODED:
            self._raw.read(file, buffer, offset)
            return
        number = bisect_right(self._starts, offset) - 1
        packed = self._packing.tensors[self._names[number]]
        first = offset - self._starts[number]
        if self._packing.kind == "mxfp4":
            self._read_mxfp4(packed, buffer, first)
        else:
            self._read_fp8(packed, buffer, first)

    def _read_fp8(self, packed: Packed, buffer: memoryview, first: int) -> None:
        """Matrix by matrix, whole rows; of one row only the columns that are asked for, from a block's start."""
        blocks = self._packing.blocks
        assert blocks is not None
        *_, rows, columns = packed.spec.shape
        begin, end = first // 2, (first + len(buffer)) // 2
        while begin < end:
            row, column = divmod(begin, columns)
            matrix, row = divmod(row, rows)
            last = min(rows, -(-(end - matrix * rows * columns) // columns))
            left = column // blocks.columns * blocks.columns if last - row == 1 else 0
            width = min(columns, end - (begin - column)) - left if last - row == 1 else columns
            codes = self._codes(packed, (matrix * rows + row) * columns + left, (last - row, width))
            scales = self._scales_of(packed).reshape(-1, *blocks.scale_shape((rows, columns)))[matrix]
            values = fp8_block.decode(codes, scales, blocks, row, left).reshape(-1)
            skip = column - left
            taken = min(values.size - skip, end - begin)
            at = begin * 2 - first
            buffer[at : at + taken * 2] = values[skip : skip + taken].view("u1").data
            begin += taken

    def _codes(self, packed: Packed, start: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
        import numpy as np

        codes = np.empty(shape, np.uint8)
        (chunk,) = self._raw.chunks(packed.codes.name)
        self._raw.read(chunk.file, codes.reshape(-1).data, chunk.offset + start)
        fp8_block.check_codes(packed.codes.name, codes, self._file_of(packed.codes.name))
        return codes

    def _read_mxfp4(self, packed: Packed, buffer: memoryview, first: int) -> None:
        import numpy as np

        size = mxfp4.GROUP * 2
        begin, end = first // size, -(-(first + len(buffer)) // size)
        parts = []
        for spec, width in ((packed.codes, 16), (packed.scales, 1)):
            raw = np.empty(((end - begin), width), np.uint8)
            (chunk,) = self._raw.chunks(spec.name)
            self._raw.read(chunk.file, raw.reshape(-1).data, chunk.offset + begin * width)
            parts.append(raw)
        values = mxfp4.decode(parts[0], parts[1][:, 0]).reshape(-1).view("u1")
        skip = first - begin * size
        buffer[:] = values[skip : skip + len(buffer)].data

    def _scales_of(self, packed: Packed) -> NDArray[np.float32]:
        name = packed.scales.name
        with self._lock:
            if (known := self._scales.pop(name, None)) is None:
                while len(self._scales) >= _KEPT:
                    self._scales.pop(next(iter(self._scales)))
                raw = self._whole(packed.scales)
                known = fp8_block.read_scales(memoryview(raw), packed.scales.dtype, packed.scales.shape)
            self._scales[name] = known  # last again: the first is the one used longest ago
            return known

    def _check(self, packed: Packed) -> None:
        import numpy as np

        name, where = packed.scales.name, self._file_of(packed.scales.name)
        if self._packing.kind == "mxfp4":
            mxfp4.check_scales(name, np.frombuffer(self._whole(packed.scales), np.uint8), where)
        else:
            fp8_block.check_scales(name, self._scales_of(packed), where)

    def _whole(self, spec: TensorSpec) -> bytearray:
        (chunk,) = self._raw.chunks(spec.name)
        content = bytearray(spec.nbytes)
        self._raw.read(chunk.file, memoryview(content), chunk.offset)
        return content

    def _file_of(self, name: str) -> str:
        return str(self._raw.path(self._raw.chunks(name)[0].file))


def _stored_axes(packing: Packing, rank: int) -> list[int]:
    """The tensor's axes in the order of its decoded bytes: MXFP4 keeps [.., out, in] for a tensor [.., in, out]."""
    axes = list(range(rank))
    return [*axes[:-2], axes[-1], axes[-2]] if packing.kind == "mxfp4" else axes
