"""A Writer that takes bf16 and writes block-scaled FP8: a band of blocks at a time, with the scales that were kept."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from mtpconvert.codecs import fp8_block
from mtpconvert.convert.packings import Packed, Packing
from mtpconvert.errors import NotRepresentableError
from mtpconvert.stores.base import Chunk, Reader
from mtpconvert.stores.safetensors.writer import SafetensorsWriter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class _Filling:
    """A tensor whose values arrive in order: the band that is being filled, and where it belongs."""

    packed: Packed
    scales: NDArray[np.float32]  # [matrix, block row, block column]
    new_scales: NDArray[np.float32]
    band: bytearray
    filled: int = 0
    row: int = 0  # first row of the band, counted over all matrices


@dataclass
class Requantised:
    """Blocks that kept their scale, and those that got a new one, by tensor."""

    kept: int = 0
    renewed: dict[str, int] = field(default_factory=dict)

    def notes(self) -> list[str]:
        total = sum(self.renewed.values())
        words = f"{self.kept:,} FP8 blocks came back with the scales that were kept"
        if total:
            words += f"; {total:,} in {len(self.renewed):,} tensors changed in Megatron and got new ones (amax / 448)"
        return [words]


class EncodingWriter:
    """Writer of bf16 tensors into ``raw``, whose layout has codes and scales for the tensors of ``packing``.

    ``kept``: a Reader of the scales that the weights had. A packed tensor lies in a file numbered below zero, one for
    each of ``raw``'s, at twice the offset of its codes; the executor writes it in order, by one thread.
    """

    wants_crc = False

    def __init__(self, raw: SafetensorsWriter, packing: Packing, kept: Reader) -> None:
        self._raw, self._packing, self._kept = raw, packing, kept
        self.requantised = Requantised()
        self._filling: dict[str, _Filling] = {}
        self._lock = Lock()
        self._places: dict[int, list[tuple[int, str]]] = {}  # file -> offset of codes, name; rising
        for name, packed in packing.tensors.items():
            (chunk,) = raw.chunks(packed.codes.name)
            self._places.setdefault(chunk.file, []).append((chunk.offset, name))
        for places in self._places.values():
            places.sort()

    def create(self) -> None:
        self._raw.create()

    def chunks(self, name: str) -> tuple[Chunk]:
        if name not in self._packing.tensors:
            return self._raw.chunks(name)
        packed = self._packing.tensors[name]
        (codes,) = self._raw.chunks(packed.codes.name)
        return (Chunk(codes.box, -1 - codes.file, codes.offset * 2, tuple(2 * step for step in codes.strides)),)

    def write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        """Raises NotRepresentableError for values that FP8 has no way to write, naming the tensor."""
        if file >= 0:
            self._raw.write(file, content, offset)
            return
        places = self._places[-1 - file]
        name = places[bisect_right(places, offset // 2, key=lambda place: place[0]) - 1][1]
        filling = self._filling_of(name)
        view, done = memoryview(content), 0
        while done < len(view):
            taken = min(len(view) - done, self._band_bytes(filling) - filling.filled)
            filling.band[filling.filled : filling.filled + taken] = view[done : done + taken]
            filling.filled += taken
            done += taken
            if filling.filled == self._band_bytes(filling):
                self._encode(filling)

    def write_back(self, file: int, offset: int, nbytes: int) -> None:
        if file >= 0:
            self._raw.write_back(file, offset, nbytes)
        else:
            self._raw.write_back(-1 - file, offset // 2, nbytes // 2)

    def finish_chunk(self, name: str, number: int, crc32: int) -> None:
        packed = self._packing.tensors.get(name)
        if packed is None:
            self._raw.finish_chunk(name, number, crc32)
            return
        filling = self._filling_of(name)
        (chunk,) = self._raw.chunks(packed.scales.name)
        self._raw.write(chunk.file, fp8_block.write_scales(filling.new_scales, packed.scales.dtype), chunk.offset)
        self._raw.finish_chunk(packed.codes.name, number, crc32)
        self._raw.finish_chunk(packed.scales.name, 0, 0)
        with self._lock:
            del self._filling[name]

    def commit(self) -> None:
        self._raw.commit()

    def close(self) -> None:
        self._raw.close()

    def _filling_of(self, name: str) -> _Filling:
        with self._lock:
            if name not in self._filling:
                self._filling[name] = self._begin(self._packing.tensors[name])
            return self._filling[name]

    def _begin(self, packed: Packed) -> _Filling:
        blocks = self._packing.blocks
        assert blocks is not None
        spec = packed.scales
        (chunk,) = self._kept.chunks(spec.name)
        content = bytearray(spec.nbytes)
        self._kept.read(chunk.file, memoryview(content), chunk.offset)
        scales = fp8_block.read_scales(memoryview(content), spec.dtype, spec.shape)
        fp8_block.check_scales(spec.name, scales, str(self._kept.path(chunk.file)))
        scales = scales.reshape(-1, *spec.shape[-2:])
        rows, columns = packed.spec.shape[-2:]
        return _Filling(packed, scales, scales.copy(), bytearray(min(blocks.rows, rows) * columns * 2))

    def _band_bytes(self, filling: _Filling) -> int:
        """Bytes of the band being filled: one row of blocks, the last of a matrix partial."""
        return self._band_rows(filling) * filling.packed.spec.shape[-1] * 2

    def _band_rows(self, filling: _Filling) -> int:
        assert self._packing.blocks is not None
        rows = filling.packed.spec.shape[-2]
        return min(self._packing.blocks.rows, rows - filling.row % rows)

    def _encode(self, filling: _Filling) -> None:
        import numpy as np

        blocks, packed = self._packing.blocks, filling.packed
        assert blocks is not None
        height, width = self._band_rows(filling), packed.spec.shape[-1]
        values = np.frombuffer(filling.band, "<u2", height * width).reshape(height, width)
        matrix, row = divmod(filling.row, packed.spec.shape[-2])
        band = row // blocks.rows
        try:
            codes, scales, renewed = fp8_block.encode(
                values, filling.scales[matrix, band : band + 1], blocks, packed.scales.dtype
            )
        except ValueError as error:
            raise NotRepresentableError(
                f"{packed.spec.name} cannot be written as FP8: {error} (rows from {filling.row} on)",
                where=str(self._raw.path(self._raw.chunks(packed.codes.name)[0].file)),
                next_step="write bf16 with --dtype bfloat16, or look at what training did to this tensor",
            ) from error
        filling.new_scales[matrix, band : band + 1] = scales
        (chunk,) = self._raw.chunks(packed.codes.name)
        self._raw.write(chunk.file, codes.reshape(-1).data, chunk.offset + filling.row * width)
        with self._lock:
            self.requantised.kept += scales.size - renewed
            if renewed:
                before = self.requantised.renewed.get(packed.spec.name, 0)
                self.requantised.renewed[packed.spec.name] = before + renewed
        filling.row += height
        filling.filled = 0
