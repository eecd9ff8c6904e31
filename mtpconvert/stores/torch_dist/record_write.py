"""The container around one tensor's bytes, laid out before the bytes are there.

``lay_out`` fixes where everything goes; ``header`` and ``trailer`` give the bytes around the payload once its CRC-32
is known. Four entries are enough for every torch reader: ``data.pkl``, ``byteorder``, ``version``, ``data/0``
(torch/serialization.py:_save writes three more). zip64 fields appear where, and only where, a value needs them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mtpconvert.stores.torch_dist.pickle_write import dumps, tensor_pickle
from mtpconvert.tensors import DTYPE_BITS, Shape

ALIGN = 64  # of the payload in its file, as torch aligns storages
_FULL = 0xFFFFFFFF
_DATA = b"archive/data/0"
_DATE = 0x21  # 1980-01-01, the earliest that zip knows: equal checkpoints get equal bytes
_PADDING = 0x4246  # "FB", the extra field with which torch itself pads


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """A record from byte ``base`` to ``end`` of a file; the tensor's ``nbytes`` bytes begin at ``data``."""

    base: int
    data: int
    end: int
    nbytes: int
    dtype: str
    shape: Shape

    def header(self, crc32: int) -> bytes:
        """Bytes from ``base`` to ``data``."""
        first, _ = _small_entries(self.dtype, self.shape)
        padding = self.data - self.base - len(first) - 30 - len(_DATA) - len(_zip64_sizes(self.nbytes))
        return first + _local(_DATA, self.nbytes, crc32, _pad(padding))

    def trailer(self, crc32: int) -> bytes:
        """Bytes from the end of the payload to ``end``."""
        first, directory = _small_entries(self.dtype, self.shape)
        entry = _central(_DATA, self.nbytes, crc32, len(first))
        return directory + entry + _end(4, len(directory) + len(entry), self.data + self.nbytes - self.base)


def lay_out(base: int, dtype: str, shape: Shape) -> RecordLayout:
    """The record of a C-contiguous tensor at byte ``base`` of its file. Raises NotRepresentableError (dtype)."""
    first, directory = _small_entries(dtype, shape)
    nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
    bare = base + len(first) + 30 + len(_DATA) + len(_zip64_sizes(nbytes))
    padding = -bare % ALIGN
    data = bare + padding + (ALIGN if 0 < padding < 4 else 0)  # an extra field has a header of four bytes
    entry = 46 + len(_DATA) + len(_zip64_sizes(nbytes))
    end = data + nbytes + len(directory) + entry + len(_end(4, 0, data + nbytes - base))
    return RecordLayout(base, data, end, nbytes, dtype, shape)


def object_container(value: object) -> bytes:
    """What ``torch.save(value)`` would be for plain values: a whole container."""
    local, directory = _entries({b"archive/data.pkl": dumps(value), **_MARKS})
    return local + directory + _end(3, len(directory), len(local))


_MARKS = {b"archive/byteorder": b"little", b"archive/version": b"3\n"}


@lru_cache(maxsize=4096)
def _small_entries(dtype: str, shape: Shape) -> tuple[bytes, bytes]:
    return _entries({b"archive/data.pkl": tensor_pickle(dtype, shape), **_MARKS})


def _entries(files: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """Small files one after another, and their part of the central directory."""
    local, directory = bytearray(), bytearray()
    for name, content in files.items():
        crc32 = zlib.crc32(content)
        directory += _central(name, len(content), crc32, len(local))
        local += _local(name, len(content), crc32, b"") + content
    return bytes(local), bytes(directory)


def _zip64_sizes(size: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, size, size) if size >= _FULL else b""


def _pad(count: int) -> bytes:
    return struct.pack("<HH", _PADDING, count - 4) + bytes(count - 4) if count else b""


def _local(name: bytes, size: int, crc32: int, padding: bytes) -> bytes:
    extra = _zip64_sizes(size) + padding
    short = min(size, _FULL)
    version = 45 if size >= _FULL else 10
    fixed = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", version, 0x800, 0, 0, _DATE, crc32, short, short, len(name), len(extra)
    )
    return fixed + name + extra


def _central(name: bytes, size: int, crc32: int, header: int) -> bytes:
    extra = _zip64_sizes(size)
    short = min(size, _FULL)
    version = 45 if size >= _FULL else 10
    fixed = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", version, version, 0x800, 0, 0, _DATE,
        crc32, short, short, len(name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return fixed + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    """End of central directory; preceded by its zip64 form when the directory begins at 4 GiB or later."""
    long = b""
    if offset >= _FULL:
        long = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
        long += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    return long + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, min(offset, _FULL), 0)
