"""The header of one safetensors file, parsed and proven to tile the file's data exactly.

Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes
(safetensors 0.8.0, safetensors/src/tensor.rs: ``SafeTensors::read_metadata``, ``Metadata::validate``).

Everything that safetensors 0.8.0 refuses is refused here. Refused here although safetensors 0.8.0 reads it: a tensor
name or a ``__metadata__`` key that occurs twice, a tensor entry written as an array, unknown keys in an entry.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtpconvert.errors import CheckpointError, IncompleteError, some
from mtpconvert.garbage import no_gc
from mtpconvert.tensors import DTYPE_BITS, TensorSpec

MAX_HEADER_BYTES = 100_000_000  # safetensors 0.8.0, tensor.rs: MAX_HEADER_SIZE
_AGAIN = "download or save this file again"
_FIELDS = {"dtype", "shape", "data_offsets"}
_USIZE = 1 << 64
_FOREIGN = (  # first bytes -> what the file really is, and what to do
    (
        b"version https://git-lfs",
        "a git-LFS pointer, not the file it stands for",
        "run 'git lfs pull', or download the file",
    ),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", "save the checkpoint with safe_serialization=True"),
    (b"GGUF", "a GGUF file", "use the safetensors checkpoint that it was made from"),
    (b"<", "a web page or XML", "download the file again; the server answered with a page"),
)


@dataclass(frozen=True, slots=True)
class Header:
    """``raw``: length prefix and JSON as they lie on disk. ``specs`` in the order of their bytes, ``starts`` the file
    offset of each, ``end`` the size of the whole file. ``metadata``: the ``__metadata__`` object, if there is one."""

    raw: bytes
    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    end: int
    metadata: dict[str, str] | None


def read_header(path: Path) -> Header:
    """The header of the file ``path``, held against the file's size; reads no tensor bytes.

    Raises IncompleteError (no such file, truncated) or CheckpointError (everything else that is wrong).
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(40)
            length = int.from_bytes(head[:8], "little")
            if size < 8 or length > MAX_HEADER_BYTES or _is_foreign(head):
                raise _not_safetensors(head, size, length, where)
            file.seek(0)
            raw = file.read(8 + length)
    except FileNotFoundError:
        raise IncompleteError(f"{path.name} does not exist", where=where, next_step=_AGAIN) from None
    except OSError as error:
        raise damaged(f"{path.name} cannot be read: {error.strerror}", where) from None
    if len(raw) < 8 + length:
        raise IncompleteError(
            f"{path.name} is truncated inside its header: {size} bytes, the header alone is {8 + length}",
            where=where,
            next_step=_AGAIN,
        )
    header = parse_header(raw, where)
    if size < header.end:
        raise _truncated(header, size, path)
    if size > header.end:
        raise CheckpointError(
            f"{path.name} has {size - header.end} trailing bytes: {size} bytes, its header accounts for {header.end}",
            where=where,
            next_step="something was appended to it, or it lies over a longer file; " + _AGAIN,
        )
    return header


def parse_header(raw: bytes, where: str) -> Header:
    """The header in ``raw`` (length prefix included, nothing after the JSON); ``where`` names it in errors.

    Raises IncompleteError when ``raw`` is shorter than its length prefix says, CheckpointError for every other fault.
    """
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > MAX_HEADER_BYTES or _is_foreign(raw):
        raise _not_safetensors(raw[:40], len(raw), length, where)
    if len(raw) < 8 + length:
        raise IncompleteError(f"a header of {8 + length} bytes has only {len(raw)}", where=where, next_step=_AGAIN)
    if len(raw) > 8 + length:
        raise damaged(f"{len(raw) - 8 - length} bytes follow a header of {8 + length}", where)
    with no_gc():
        table = parse_json_object(raw[8:], where, "header")
        metadata = table.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        ):
            raise damaged("__metadata__ is not an object of strings", where)
        # one plain loop: with 46,183 tensors this is where the time goes
        placed: list[tuple[int, int, str, TensorSpec]] = []
        for name, entry in table.items():
            try:
                dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                bits = DTYPE_BITS[dtype]
                sound = len(entry) == 3 and type(shape) is list and type(begin) is int and type(end) is int
                for dim in shape:  # all of them before any product: list * int is a way to ask for much memory
                    if type(dim) is not int or not 0 <= dim < _USIZE:
                        raise _entry_fault(name, entry, where)
            except (TypeError, KeyError, ValueError):
                raise _entry_fault(name, entry, where) from None
            if not sound or prod(shape) * bits != (end - begin) * 8 or (begin == end and _overflows(shape, bits)):
                raise _entry_fault(name, entry, where)
            placed.append((begin, end, name, TensorSpec(name, tuple(shape), dtype)))
        placed.sort()  # by extent; empty tensors at one place by name
        at = 0
        for begin, end, _, spec in placed:
            if begin != at:
                raise _tiling_fault(spec, begin, at, where)
            at = end
        start = 8 + length
        if start + at >= 1 << 63:
            raise damaged(f"the header asks for a file of {start + at} bytes", where)
        specs = tuple([spec for _, _, _, spec in placed])
        return Header(raw, specs, tuple([start + begin for begin, _, _, _ in placed]), start + at, metadata)


def parse_json_object(raw: bytes, where: str, what: str) -> dict[str, Any]:
    """The JSON object in ``raw``, strictly: UTF-8, no key twice at any depth, no lone surrogates, no ``-0``, no NaN.

    ``what`` ("header", "index") and ``where`` name it in the CheckpointError.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise damaged(f"the {what} names {some(_repeated(pairs))} twice", where)
        return table

    def integer(text: str) -> int:
        if text == "-0":
            raise ValueError("-0 is no integer")
        return int(text)

    def constant(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    try:
        text = raw.decode("utf-8")
        if "\\u" in text:  # an escape is the only way to a lone surrogate, which no UTF-8 text can hold
            json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
        parse_int = integer if "-0" in text else None  # None: the fast way
        table = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise damaged(f"the {what} is not valid JSON: {error}", where) from None
    if not isinstance(table, dict):
        raise damaged(f"the {what} is not a JSON object", where)
    return table


def damaged(what: str, where: str) -> CheckpointError:
    """The refusal of a file that no right writer makes."""
    return CheckpointError(what, where=where, next_step=_AGAIN)


def _repeated(pairs: list[tuple[str, Any]]) -> list[str]:
    counts = Counter(name for name, _ in pairs)
    return [name for name, count in counts.items() if count > 1]


def _overflows(shape: list[int], bits: int) -> bool:
    """Whether safetensors' left-to-right product in 64 bits overflows although a later 0 makes the tensor empty."""
    product = 1
    for dim in shape:
        product *= dim
        if product >= _USIZE:
            return True
    return product * bits >= _USIZE


def _is_foreign(head: bytes) -> bool:
    """Whether ``head`` begins like another kind of file and its JSON not like JSON (a length can look like a magic)."""
    return head[8:9] not in (b"{", b" ", b"\t", b"\n", b"\r") and head.startswith(
        tuple(start for start, _, _ in _FOREIGN)
    )


def _not_safetensors(head: bytes, size: int, length: int, where: str) -> CheckpointError:
    name = Path(where).name
    for start, kind, next_step in _FOREIGN:
        if head.startswith(start):
            return CheckpointError(f"{name} is {kind}", where=where, next_step=next_step)
    if size < 8:
        return IncompleteError(
            f"{name} is truncated: {size} bytes, a safetensors file has at least 8",
            where=where,
            next_step=_AGAIN,
        )
    return damaged(
        f"{name} is no safetensors file: its first 8 bytes ask for a header of {length} bytes, the format allows "
        f"{MAX_HEADER_BYTES}",
        where,
    )


def _truncated(header: Header, size: int, path: Path) -> IncompleteError:
    lost = [
        spec.name
        for spec, start in zip(header.specs, header.starts, strict=True)
        if start + spec.nbytes > size
    ]  # fmt: skip
    return IncompleteError(
        f"{path.name} is truncated: {header.end} bytes expected, {size} found; {len(lost)} of {len(header.specs)} "
        f"tensors affected, the first is {lost[0]}",
        where=str(path),
        next_step=_AGAIN,
    )


def _entry_fault(name: str, entry: Any, where: str) -> CheckpointError:
    """What exactly is wrong with the header entry of one tensor."""
    if not isinstance(entry, dict):
        return damaged(f"tensor {name}: its header entry is not an object", where)
    if set(entry) != _FIELDS:
        missing, unknown = sorted(_FIELDS - set(entry)), sorted(set(entry) - _FIELDS)
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"has unknown {some(unknown)}"] * bool(unknown)
        return damaged(f"tensor {name}: its header entry {' and '.join(parts)}", where)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return damaged(f"tensor {name}: unknown dtype {reprlib.repr(dtype)}", where)
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(number) is int and 0 <= number < _USIZE for number in value):
            shown = reprlib.repr(value)
            return damaged(f"tensor {name}: {what} {shown} is no list of integers >= 0", where)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return damaged(f"tensor {name}: data_offsets {offsets} are not a begin and an end", where)
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        return damaged(f"tensor {name}: {dtype} {shape} does not fill whole bytes ({bits} bits)", where)
    if bits == (offsets[1] - offsets[0]) * 8:
        return damaged(f"tensor {name}: the product of its shape {shape} overflows 64 bits", where)
    return damaged(
        f"tensor {name}: {dtype} {shape} is {bits // 8} bytes, its data_offsets {offsets} hold "
        f"{offsets[1] - offsets[0]}",
        where,
    )


def _tiling_fault(spec: TensorSpec, begin: int, expected: int, where: str) -> CheckpointError:
    if begin > expected:
        fault = f"a hole of {begin - expected} bytes lies before tensor {spec.name}"
    else:
        fault = f"tensor {spec.name} overlaps the tensor before it by {expected - begin} bytes"
    return damaged(f"{fault} (it begins at {begin} of the data, {expected} is next)", where)
