"""Weights that ``torch.save`` wrote, as bytes: EAGLE's pytorch_model.bin, medusa_lm_head.pt, Meta's consolidated.pth.

A file is a zip of stored entries: ``data.pkl`` (names, shapes, strides) and one entry ``data/<key>`` for each storage
(torch/serialization.py ``_save``). The pickle is read inertly (``pickles``), the storages not at all. A tensor that is
no plain box of numbers is refused by its name.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mtpconvert.audit.findings import finding
from mtpconvert.audit.readers.headers import Header, Seen
from mtpconvert.audit.readers.huggingface import check_index, check_shard_sets, config_of, side_files_of
from mtpconvert.audit.readers.opening import WEIGHTS
from mtpconvert.audit.readers.pickles import DTYPES, STORAGES, Inert, InertDtype, read_pickle
from mtpconvert.audit.readers.records import Stored
from mtpconvert.audit.readers.side import Piece, Record, Side, itemsize
from mtpconvert.errors import CheckpointError, some
from mtpconvert.tensors import TensorSpec

_PIECE = re.compile(r"consolidated\.\d+\.pth?")
_INDEX = "pytorch_model.bin.index.json"
_WRAPPED = ("state_dict", "model")  # where a training script keeps the state dict
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch/serialization.py: MAGIC_NUMBER, pickled
_LFS = b"version https://git-lfs"
_DTYPES = STORAGES | {"ComplexFloatStorage": "C64"}
del _DTYPES["UntypedStorage"]
_LARGEST = 1 << 28  # bytes of a data.pkl: some million tensors
_SAFETENSORS = "or save its tensors with safetensors.torch.save_file, which no reader has to trust"


class _BadError(ValueError):
    """What a file says cannot be."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where an entry's bytes begin in its file, how many they are, the CRC-32 that the zip claims for them."""

    start: int
    size: int
    crc32: int


def open_torch_files(root: Path, label: str, seen: Seen | None = None) -> Side:
    """Read every file's ``data.pkl`` and no weights. CheckpointError for what cannot be read as plain tensors."""
    files = sorted(path for path in root.iterdir() if WEIGHTS.fullmatch(path.name))
    headers: dict[str, Header] = {}
    tensors: dict[str, tuple[int, Stored]] = {}
    ignored: list[str] = []
    for number, path in enumerate(files):
        headers[path.name] = header = Header()
        try:
            with path.open("rb") as file:
                found, others = _read(file, path)
        except (OSError, _BadError) as error:
            text = f"{path.name}: no readable torch.save file ({error})"
            header.findings.append(finding("file-unreadable", text, side=label))
            continue
        ignored += others
        for name, stored in found.items():
            header.specs[name] = TensorSpec(name, stored.shape, stored.dtype)
            tensors[name] = number, stored
        header.nbytes = sum(spec.nbytes for spec in header.specs.values())
    shards = (seen or Seen()).joined(headers)
    if shards.twice and all(_PIECE.fullmatch(path.name) for path in files):
        raise CheckpointError(
            f"the {len(files)} consolidated files are pieces of a tensor-parallel model: each holds a part of "
            f"{shards.twice[0][0]}",
            where=str(root),
            next_step="join them with the model's own code, and save the result",
        )
    layout = f"torch.save, {len(files)} file{'' if len(files) == 1 else 's'}"
    side = Side(label, root, "huggingface", layout, shards.inventory, files, lambda name: ())
    side.home, side.bytes_total = shards.home, shards.nbytes
    side.locate, side.records = partial(_locate, side, tensors), partial(_records, tensors)
    side.findings = [fault for header in headers.values() for fault in header.findings]
    for tensor, one, other in shards.twice:
        text = f"{tensor} stands in {one} and in {other}"
        side.findings.append(finding("name-duplicate", text, side=label, tensor=tensor))
    if ignored:
        text = f"{len(ignored)} entries that are no tensors are not compared: {some(ignored)}"
        side.findings.append(finding("objects-ignored", text, side=label, count=len(ignored)))
    side.findings += check_shard_sets(list(headers), label)
    if (root / _INDEX).is_file():
        side.findings += check_index(root / _INDEX, headers, side, seen or Seen(), single=True)
    elif len(files) > 1:
        side.findings.append(finding("index-absent", f"{len(files)} weight files and no {_INDEX}", side=label))
    side.config = config_of(root, label, side.findings)
    side.side_files = side_files_of(root)
    return side


def _locate(side: Side, tensors: dict[str, tuple[int, Stored]], name: str) -> list[Piece]:
    file, stored = tensors[name]
    strides = tuple(stride * itemsize(stored.dtype) for stride in stored.strides)
    return [Piece(tuple((0, extent) for extent in stored.shape), file, stored.offset, strides)]


def _records(tensors: dict[str, tuple[int, Stored]], name: str) -> list[Record]:
    file, stored = tensors[name]
    return [Record(file, stored.entry_offset, stored.entry_length, stored.crc32)]


def _read(file: BinaryIO, path: Path) -> tuple[dict[str, Stored], list[str]]:
    """Tensors by name, and the names of what is none. _BadError where the file is damaged, CheckpointError for a file
    or a tensor of a kind that is not read."""
    start = file.read(max(len(_LEGACY), len(_LFS)))
    if start.startswith(_LEGACY):
        raise CheckpointError(
            f"{path.name} is a pickle of the form that torch.save wrote before torch 1.6, whose numbers are part of "
            "the pickle",
            where=str(path),
            next_step="where you trust it, load it with torch.load and torch.save it again with a new torch, "
            f"{_SAFETENSORS}",
        )
    if start.startswith(_LFS):
        raise _BadError("a git-LFS pointer, not the weights; run 'git lfs pull'")
    try:
        entries = _entries(file)
        raw = _bytes(file, entries, "data.pkl")
        if "byteorder" in entries and _bytes(file, entries, "byteorder") != b"little":
            raise _BadError("its numbers are big-endian")
    except (zipfile.BadZipFile, struct.error, ValueError, EOFError, NotImplementedError, OverflowError) as error:
        raise _BadError(str(error) or type(error).__name__) from error
    _check_memo(raw)
    graph = read_pickle(raw, str(path))
    wrapped = [key for key in _WRAPPED if isinstance(graph, dict) and isinstance(graph.get(key), dict)]
    if wrapped and not any(_tensor(value) for value in graph.values()):
        others = [str(key) for key in graph if key != wrapped[0]]
        graph = graph[wrapped[0]]
    else:
        others = []
    if not isinstance(graph, dict) or not any(_tensor(value) for value in graph.values()):
        raise CheckpointError(
            f"{path.name} holds {_what(graph)}, and no dict of tensors by name",
            where=str(path),
            next_step=f"torch.save the model's state_dict(), {_SAFETENSORS}",
        )
    found: dict[str, Stored] = {}
    for key, value in graph.items():
        if isinstance(key, str) and (node := _tensor(value)) is not None:
            found[key] = _stored(node, entries, key, path)
        else:
            others.append(str(key))
    return found, others


def _entries(file: BinaryIO) -> dict[str, _Entry]:
    """Entries by their path below the archive's one folder. Each must lie in the file, uncompressed."""
    size = file.seek(0, 2)
    entries: dict[str, _Entry] = {}
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    roots = {info.filename.removesuffix("data.pkl") for info in listed if info.filename.endswith("/data.pkl")}
    if len(roots) != 1:
        raise _BadError(f"{len(roots)} entries called data.pkl")
    root = roots.pop()
    for info in listed:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise _BadError(f"{info.filename[:80]!r} is compressed or encrypted, which torch.save never does")
        file.seek(info.header_offset)
        local = file.read(30)
        if local[:4] != b"PK\x03\x04" or len(local) < 30:
            raise _BadError(f"no entry begins where {info.filename[:80]!r} should")
        name_length, extra_length = struct.unpack("<HH", local[26:30])
        begin = info.header_offset + 30 + name_length + extra_length
        if begin + info.file_size > size:
            raise _BadError(f"{info.filename[:80]!r} ends {begin + info.file_size - size} bytes after the file")
        name = info.filename.removeprefix(root)
        if name in entries:
            raise _BadError(f"two entries are called {name[:80]!r}")
        entries[name] = _Entry(begin, info.file_size, info.CRC)
    return entries


def _bytes(file: BinaryIO, entries: dict[str, _Entry], name: str) -> bytes:
    entry = entries[name]
    if entry.size > _LARGEST:
        raise _BadError(f"a {name} of {entry.size} bytes")
    file.seek(entry.start)
    return file.read(entry.size)


def _check_memo(raw: bytes) -> None:
    """CPython makes room up to the largest index that a PUT names: a few bytes could ask for gigabytes."""
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            put = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int)
            if put and not 0 <= int(argument or 0) <= max(len(raw), 255):
                raise _BadError("a memo index beyond its length")
    except ValueError as error:
        raise _BadError(f"data.pkl: {error}") from error


def _tensor(value: Any) -> Inert | None:
    """The placeholder of a tensor, taken out of its Parameter; any kind of tensor that torch rebuilds."""
    while isinstance(value, Inert) and value.origin[1].startswith("_rebuild_parameter"):
        value = next(iter(value.__dict__["arguments"]), None)
    named = isinstance(value, Inert) and value.origin[0] == "torch._utils" and value.origin[1].startswith("_rebuild_")
    return value if named else None


def _what(value: Any) -> str:
    if isinstance(value, Inert):
        return f"an object of {'.'.join(filter(None, value.origin)) or 'an unknown class'}"
    return f"a {type(value).__name__}" + (
        f" of {some([str(key) for key in value])}" if isinstance(value, dict) and value else ""
    )


def _stored(node: Inert, entries: dict[str, _Entry], name: str, path: Path) -> Stored:
    """Where the tensor lies. CheckpointError names it where it is not a box of plain numbers within its storage."""

    def refused(why: str) -> CheckpointError:
        return CheckpointError(
            f"{name[:200]} {why}", where=str(path), next_step=f"save a plain contiguous tensor, {_SAFETENSORS}"
        )

    if node.origin[1] not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        raise refused(f"is no plain tensor ({node.origin[1]})")
    try:
        storage, offset, shape, strides, *rest = node.__dict__["arguments"]
        _, kind, key, _, _ = storage.__dict__["arguments"]
        origin = kind.origin[1]
    except (ValueError, AttributeError, KeyError, TypeError):
        raise refused("is not described as torch.save does") from None
    named = [value for value in rest if isinstance(value, InertDtype)]
    dtype = DTYPES[named[0]] if node.origin[1].endswith("v3") and named else _DTYPES.get(origin)
    if dtype is None:
        raise refused(f"is of {origin}, which is not read")
    numbers = (offset, *_numbers(shape), *_numbers(strides))
    odd = any(type(number) is not int or number < 0 for number in numbers)
    if odd or len(shape) != len(strides) or len(shape) > 64:
        raise refused("is not described as torch.save does")
    entry = entries.get(f"data/{key}") if isinstance(key, str) else None
    if entry is None:
        raise refused(f"lies in the storage {key!r}, which the file does not have")
    size = itemsize(dtype)
    if prod(shape) * size > entry.size:
        raise refused(f"has {prod(shape)} elements over a storage of {entry.size} bytes: an expanded view, or not true")
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * size > entry.size:
        raise refused(f"reaches element {last} of a storage of {entry.size} bytes")
    return Stored(dtype, shape, strides, entry.start + offset * size, entry.start, entry.size, entry.crc32)


def _numbers(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, tuple) else (None,)
