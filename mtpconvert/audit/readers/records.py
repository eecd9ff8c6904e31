"""A ``.distcp`` file is a row of ``torch.save`` archives, uncompressed zips; the tensor's bytes are one entry of each.

Position, storage offset, size and stride are taken from the zip directory and from the archive's ``data.pkl``
(torch/serialization.py ``_save``; torch/distributed/checkpoint/filesystem.py ``_write_item``).
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mtpconvert.audit.readers.pickles import DTYPES, STORAGES, Inert, InertDtype, read_pickle
from mtpconvert.audit.readers.side import itemsize
from mtpconvert.errors import CheckpointError


class Window(io.RawIOBase):
    """Bytes ``[start, start + length)`` of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of an archive: dtype, shape and element strides, where its first element lies, its entry's CRC."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    entry_offset: int
    entry_length: int
    crc32: int


def read_archive(path: Path, start: int, length: int) -> tuple[Any, dict[int, Stored]]:
    """The unpickled object of the archive at ``[start, start + length)`` and its tensors, by ``id`` of the placeholder.

    CheckpointError names the file and position when there is no archive, or a tensor in it is out of bounds.
    """
    where = f"{path}, bytes {start} to {start + length}"
    try:
        with path.open("rb") as file, zipfile.ZipFile(Window(file, start, length)) as archive:
            entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
            graph = read_pickle(archive.read(entries["data.pkl"]), where)
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise CheckpointError("the archive is big-endian", where=where)
            tensors = {id(node): _stored(node, entries, file, start) for node in _tensors(graph)}
    except (
        OSError,
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        struct.error,
        NotImplementedError,
    ) as error:
        raise CheckpointError(
            f"no readable torch archive ({error!r})", where=where, next_step="copy the file again"
        ) from error
    return graph, tensors


def _tensors(node: Any) -> list[Inert]:
    """Every placeholder of a tensor, in dicts and lists to any depth."""
    if isinstance(node, Inert):
        if node.origin[1].startswith("_rebuild_parameter"):
            return _tensors(node.__dict__["arguments"][0])
        return [node] if node.origin[1].startswith("_rebuild_tensor_v") else []
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [found for child in children for found in _tensors(child)]


def _stored(node: Inert, entries: dict[str, zipfile.ZipInfo], file: BinaryIO, start: int) -> Stored:
    storage, storage_offset, shape, strides = node.__dict__["arguments"][:4]
    _, kind, key, _, _ = storage.__dict__["arguments"]
    dtype = STORAGES.get(kind.__name__, "U8")
    named = [value for value in node.__dict__["arguments"][4:] if isinstance(value, InertDtype)]
    if named:  # _rebuild_tensor_v3: an untyped storage and the dtype as an argument of its own
        dtype = DTYPES[named[0]]
    entry = entries[f"data/{key}"]
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("a compressed record", where=entry.filename, next_step="save it again with torch.save")
    file.seek(start + entry.header_offset)
    local = file.read(30)
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    begin = start + entry.header_offset + 30 + name_length + extra_length
    size = itemsize(dtype)
    last = storage_offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * size > entry.file_size:
        raise CheckpointError("a tensor reaches past the end of its record", where=entry.filename)
    return Stored(dtype, tuple(shape), tuple(strides), begin + storage_offset * size, begin, entry.file_size, entry.CRC)
