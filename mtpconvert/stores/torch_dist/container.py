"""The zip containers that ``torch.save`` writes, found inside a larger file and read by small preads.

A ``.distcp`` file is a row of such containers, each at a recorded (offset, length); ``common.pt`` is one alone. All
offsets inside a container count from its own start. Only stored (uncompressed) entries are accepted, as torch writes
no others. Layout: PKWARE APPNOTE 6.3.9, sections 4.3.6 to 4.3.16, 4.5.3.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from mtpconvert.errors import CheckpointError, IncompleteError

_HEAD, _TAIL = 2048, 4096  # bytes read at once at either end; torch's own overhead is about 1,600 bytes
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_FULL = 0xFFFFFFFF


def pread_all(fd: int, count: int, at: int, where: str) -> bytes:
    """``count`` bytes at byte ``at``. Raises IncompleteError when the file is shorter, CheckpointError on EIO."""
    parts = []
    while count:
        try:
            part = os.pread(fd, min(count, 1 << 30), at)
        except OSError as problem:
            raise CheckpointError(f"{where} cannot be read: {problem.strerror}", where=where) from problem
        if not part:
            raise IncompleteError(
                f"{where}: the file ends {count} bytes too early", where=where, next_step="copy the file again"
            )
        parts.append(part)
        at, count = at + len(part), count - len(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file of a container: where its local header and its length are, and the CRC-32 it claims."""

    name: str
    header: int  # from the container's start
    size: int
    crc32: int


class Container:
    """The container of ``length`` bytes at byte ``base`` of ``fd``. ``where`` names it in messages.

    Raises CheckpointError when it is no zip of stored entries, IncompleteError when the file is too short.
    """

    def __init__(self, fd: int, base: int, length: int, where: str) -> None:
        self._fd, self._base, self._length, self._where = fd, base, length, where
        if length <= _HEAD + _TAIL:
            self._windows = [(0, pread_all(fd, length, base, where))]
        else:
            self._windows = [(length - _TAIL, pread_all(fd, _TAIL, base + length - _TAIL, where))]
        self.entries = {entry.name: entry for entry in self._central_directory()}
        names = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise self._broken("it has no data.pkl, so torch.save did not write it")
        self._prefix = names[0].removesuffix("data.pkl")

    def entry(self, name: str) -> Entry:
        """The entry that torch calls ``name`` ("data.pkl", "data/0"), whatever the archive's folder is called."""
        found = self.entries.get(self._prefix + name)
        if found is None:
            raise self._broken(f"it has no {name}")
        return found

    def has(self, name: str) -> bool:
        return self._prefix + name in self.entries

    def position(self, entry: Entry) -> int:
        """Byte of the file at which the entry's data begin."""
        local = self._read(entry.header, 30)
        if not local.startswith(_LOCAL):
            raise self._broken(f"no entry begins where {entry.name} should")
        name_length, extra_length = struct.unpack_from("<HH", local, 26)
        if self._read(entry.header + 30, name_length) != entry.name.encode():
            raise self._broken(f"another entry begins where {entry.name} should")
        start: int = entry.header + 30 + name_length + extra_length
        if start + entry.size > self._length:
            raise self._broken(f"{entry.name} does not end inside it")
        return self._base + start

    def read(self, name: str) -> bytes:
        """All bytes of a small entry."""
        entry = self.entry(name)
        return self._read(self.position(entry) - self._base, entry.size)

    def _read(self, at: int, count: int) -> bytes:
        if at < 0 or at + count > self._length:
            raise self._broken("an offset points outside it")
        for start, window in self._windows:
            if start <= at and at + count <= start + len(window):
                return window[at - start : at - start + count]
        if at < _HEAD and len(self._windows) == 1:
            self._windows.append((0, pread_all(self._fd, min(_HEAD, self._length), self._base, self._where)))
            return self._read(at, count)
        return pread_all(self._fd, count, self._base + at, self._where)

    def _central_directory(self) -> list[Entry]:
        start, tail = self._windows[0]
        end = tail.rfind(_END)
        if end < 0 or len(tail) - end < 22:
            raise self._broken("it does not end as a zip container does")
        count, size, offset = struct.unpack_from("<HII", tail, end + 10)
        if tail[end - 20 : end - 16] == _LOCATOR64 and end >= 20:
            (end64,) = struct.unpack_from("<Q", tail, end - 12)
            record = self._read(end64, 56)
            if not record.startswith(_END64):
                raise self._broken("its zip64 end record is not where the locator says")
            count, size, offset = struct.unpack_from("<QQQ", record, 32)
        if offset + size > start + end or count * 46 > size:
            raise self._broken("its central directory lies outside it")
        directory = self._read(offset, size)
        entries, at = [], 0
        for _ in range(count):
            entry, at = self._central_entry(directory, at)
            entries.append(entry)
        if len({entry.name for entry in entries}) != count:
            raise self._broken("two of its entries have the same name")
        return entries

    def _central_entry(self, directory: bytes, at: int) -> tuple[Entry, int]:
        if directory[at : at + 4] != _CENTRAL or len(directory) < at + 46:
            raise self._broken("its central directory is damaged")
        flags, method, crc32, packed, size, name_length, extra_length, comment_length, header = struct.unpack_from(
            "<HH4xIIIHHH8xI", directory, at + 8
        )
        name = directory[at + 46 : at + 46 + name_length].decode("utf-8", "replace")
        extra_at = at + 46 + name_length
        size, packed, header = self._zip64(directory[extra_at : extra_at + extra_length], size, packed, header)
        if method != 0 or packed != size or flags & 1:
            raise self._broken(f"{name} in it is compressed or encrypted, which torch.save never does")
        return Entry(name, header, size, crc32), extra_at + extra_length + comment_length

    def _zip64(self, extra: bytes, *values: int) -> list[int]:
        """``values`` with those that are 0xFFFFFFFF taken, in order, from the zip64 extra field."""
        if _FULL not in values:
            return list(values)
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            if kind == 1 and at + 4 + length <= len(extra):
                longs = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
                return [next(longs, value) if value == _FULL else value for value in values]
            at += 4 + length
        return list(values)

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where} is not a torch.save container: {why}",
            where=self._where,
            next_step="copy the file again, or use another checkpoint",
        )
