"""safetensors headers, parsed by hand (format: 8 bytes length, JSON, tensors back to back from offset 0).

Source of the rules: the safetensors README, "Format", and safetensors/src/tensor.rs ``Metadata::validate``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.tensors import DTYPE_BITS, Inventory, TensorSpec

_LARGEST_HEADER = 100_000_000  # tensor.rs: MAX_HEADER_SIZE


@dataclass(slots=True)
class Header:
    """What one file says. ``starts``: absolute byte offset of each tensor. ``broken``: not wholly in the file.

    ``nbytes``: of all its tensors. A Header may stand for several files: it is not to be changed.
    """

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    nbytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Shards:
    """What the headers of all files of a side say, by file name. ``home``: the file of each tensor; ``twice``: (tensor,
    file, file) of those that stand in two. May stand for both sides: it is not to be changed."""

    headers: dict[str, Header]
    inventory: Inventory = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    twice: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for file, header in self.headers.items():
            self.twice += [(tensor, self.home[tensor], file) for tensor in header.specs.keys() & self.home.keys()]
            self.inventory.update(header.specs)
            self.home.update(dict.fromkeys(header.specs, file))

    @property
    def nbytes(self) -> int:
        if self.twice:
            return sum(spec.nbytes for spec in self.inventory.values())
        return sum(header.nbytes for header in self.headers.values())


@dataclass(slots=True)
class Seen:
    """What the files of one side said, for those of the other that say the same: not worked out again.

    ``headers``: flawless ones, by their bytes and their file's size. ``indexes``: by their bytes.
    """

    headers: dict[tuple[bytes, int], Header] = field(default_factory=dict)
    indexes: dict[bytes, Any] = field(default_factory=dict)
    shards: Shards | None = None

    def joined(self, headers: dict[str, Header]) -> Shards:
        """The headers of a side together: those of the side before where every one is the same."""
        before = {} if self.shards is None else self.shards.headers
        alike = headers.keys() == before.keys() and all(headers[name] is before[name] for name in headers)
        if self.shards is None or not alike:
            self.shards = Shards(headers)
        return self.shards


def read_header(path: Path, side: str, seen: Seen | None = None) -> Header:
    """The header of one file, and every way in which header and file disagree. Never raises for bad content."""
    seen = seen or Seen()
    header = Header()

    def fault(code: str, message: str, tensor: str | None = None, **detail: Any) -> None:
        header.findings.append(finding(code, f"{path.name}: {message}", side=side, tensor=tensor, **detail))

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":  # a header of so many bytes would be larger than any disk
                fault("file-unreadable", "a git-LFS pointer, not the weights; run 'git lfs pull'")
                return header
            if len(prefix) < 8 or length > min(size - 8, _LARGEST_HEADER):
                fault(
                    "file-unreadable", f"the header is said to take {length} bytes and the file has {size}; truncated?"
                )
                return header
            raw = file.read(length)
        if (raw, size) in seen.headers:
            return seen.headers[raw, size]
        table = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        fault("file-unreadable", f"no readable header ({error})")
        return header
    if not isinstance(table, dict):
        fault("file-unreadable", "the header is no JSON object")
        return header
    metadata = table.pop("__metadata__", None)
    header.metadata = metadata if isinstance(metadata, dict) else {}
    if raw.count(b'"data_offsets"') != len(table):
        for name in _repeated(raw):
            fault("name-duplicate", f"{name} stands twice in the header", name)
    _layout(header, table, 8 + length, size, fault)
    if not header.findings:
        seen.headers[raw, size] = header
    return header


def _repeated(raw: bytes) -> list[str]:
    """Names that occur twice at the top of a header; ``json`` alone would keep the last one silently."""
    levels: list[list[str]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        levels.append([key for key, _ in pairs])
        return dict(pairs)

    json.loads(raw, object_pairs_hook=keep)
    return [name for name, count in Counter(levels[-1]).items() if count > 1]


def _layout(header: Header, table: dict[str, Any], base: int, size: int, fault: Any) -> None:
    specs, starts = header.specs, header.starts
    position, nbytes, ordered = 0, 0, True
    for name, entry in table.items():
        try:
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            dtype = entry["dtype"]
            bits = prod(shape) * DTYPE_BITS[dtype]
            length, start = end - begin, base + begin
        except (KeyError, TypeError, ValueError) as error:
            fault("file-layout", f"the entry of {name} cannot be understood ({error!r})", name)
            continue
        specs[name] = TensorSpec(name, shape, dtype)
        starts[name] = start
        if length * 8 != bits:
            fault("file-layout", f"{name}: {length} bytes for {dtype} {list(shape)}, which takes {bits // 8}", name)
            header.broken.add(name)
        if begin != position or end < begin:
            ordered = False
        position = end
        nbytes += bits // 8
    header.nbytes = nbytes
    spans: list[tuple[int, int, str]] = []  # only for a header not seen to be whole; in most, each tensor begins where
    if not ordered or base + position > size:  # the one before it ends
        spans = sorted((*table[name]["data_offsets"], name) for name in specs)
        position = _in_order(header, spans, base, size, fault)
    expected = base + position
    if size < expected:
        first = next(name for begin, end, name in spans if base + end > size)
        count = len(header.broken)
        fault(
            "file-truncated",
            f"{size} bytes, {expected} expected; {count} tensors are cut off, the first is {first}",
            first,
        )
    elif size > expected:
        fault("file-trailing", f"{size - expected} bytes after the last tensor")


def _in_order(header: Header, spans: list[tuple[int, int, str]], base: int, size: int, fault: Any) -> int:
    """Where the last of ``spans`` (begin, end, name) ends; tensors that overlap, leave holes or are cut off."""
    position = 0
    for begin, end, name in spans:
        if base + end > size:
            header.broken.add(name)
        if begin != position:
            kind = (
                "overlaps the tensor before it"
                if begin < position
                else f"leaves a hole of {begin - position} bytes before it"
            )
            fault("file-layout", f"{name} {kind}", name)
        position = max(position, end)
    return position
