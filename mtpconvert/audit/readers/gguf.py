"""GGUF files as bytes: names, ggml types, where each tensor lies, metadata. Nothing is dequantised.

Source: ggml/docs/gguf.md, versions 2 and 3 ("File Structure", "Standardized tensor names"); block sizes: ggml.c
``type_traits``. The elements of a packed type are taken as rows of bytes, U8 [rows, bytes of a row].
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Piece, Side, itemsize, row_major
from mtpconvert.tensors import Shape, TensorSpec

_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# ggml type -> (name, elements of a block, bytes of a block)
PACKED = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class _BadError(ValueError):
    """What a file says cannot be."""


def open_gguf(root: Path, label: str) -> Side:
    """All .gguf files of a folder (a split model), or one file. ``arguments``: layers and MTP layers under the names
    that Megatron has for them; ``config``: {"metadata": key -> value, "types": tensor -> ggml type}."""
    paths = [root] if root.is_file() else sorted(root.glob("*.gguf"))
    side = Side(
        label, root, "gguf", f"GGUF, {len(paths)} file{'' if len(paths) == 1 else 's'}", {}, paths, lambda n: ()
    )
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    starts: dict[str, tuple[int, int]] = {}
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                said = _read(file, path.stat().st_size, partial(_fault, side, path))
        except (OSError, _BadError, struct.error, UnicodeDecodeError) as error:
            _fault(side, path, "file-unreadable", f"no readable GGUF header ({error})")
            continue
        metadata = said["metadata"] | metadata
        for name, (spec, kind, start) in said["tensors"].items():
            if name in side.inventory:
                _fault(side, path, "name-duplicate", f"{name} stands in another file too", name)
            side.inventory[name], types[name], starts[name] = spec, kind, (number, start)
        side.broken |= said["broken"]
    side.home = {name: paths[number].name for name, (number, _) in starts.items()}
    side.bytes_total = sum(spec.nbytes for spec in side.inventory.values())
    side.locate = partial(_locate, side, starts)
    side.config = {"metadata": metadata, "types": types}
    side.arguments = _layers(metadata, side.inventory)
    return side


def _fault(side: Side, path: Path, code: str, message: str, tensor: str | None = None) -> None:
    side.findings.append(finding(code, f"{path.name}: {message}", side=side.label, tensor=tensor))


def _locate(side: Side, starts: dict[str, tuple[int, int]], name: str) -> list[Piece]:
    spec, (file, start) = side.inventory[name], starts[name]
    return [Piece(tuple((0, n) for n in spec.shape), file, start, row_major(spec.shape, itemsize(spec.dtype)))]


def _layers(metadata: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``block_count`` counts the MTP layers too (llama.cpp, src/models: ``n_layer - nextn_predict_layers``)."""
    architecture = str(metadata.get("general.architecture", ""))
    blocks = metadata.get(f"{architecture}.block_count")
    mtp = metadata.get(f"{architecture}.nextn_predict_layers")
    found = {"block_count": blocks} if isinstance(blocks, int) else {}
    if isinstance(mtp, int):
        found["num_nextn_predict_layers"] = mtp
    undeclared = not isinstance(mtp, int) and any(".nextn." in name for name in names)
    if isinstance(blocks, int) and not undeclared:
        found["num_layers"] = blocks - (mtp if isinstance(mtp, int) else 0)
    return found


def _read(file: BinaryIO, size: int, fault: Any) -> dict[str, Any]:
    """Header and table of one file. _BadError, struct.error for what is no GGUF."""
    if file.read(4) != b"GGUF":
        raise _BadError("it does not begin with GGUF")
    version, count, pairs = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise _BadError(f"version {version}; 2 and 3 are read, little-endian")
    if count > size or pairs > size:
        raise _BadError(f"{count} tensors and {pairs} keys in {size} bytes")
    metadata = {_string(file, size): _value(file, size) for _ in range(pairs)}
    table = [_tensor(file, size) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _BadError(f"general.alignment is {alignment!r}")
    base = -(-file.tell() // alignment) * alignment
    tensors: dict[str, tuple[TensorSpec, str, int]] = {}
    broken: set[str] = set()
    end = base
    for name, shape, dtype, kind, offset in sorted(table, key=lambda entry: entry[4]):
        spec = TensorSpec(name, shape, dtype)
        start = base + offset
        if name in tensors:
            fault("name-duplicate", f"{name} stands twice in the table", name)
        if start < end:
            fault("file-layout", f"{name} begins {end - start} bytes before the tensor in front of it ends", name)
        if start + spec.nbytes > size:
            fault("file-truncated", f"{name} ends {start + spec.nbytes - size} bytes after the file", name)
            broken.add(name)
        tensors[name] = (spec, kind, start)
        end = start + spec.nbytes
    if size - end >= alignment and not broken:
        fault("file-trailing", f"{size - end} bytes after the last tensor")
    return {"metadata": metadata, "tensors": tensors, "broken": broken}


def _string(file: BinaryIO, size: int) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size:
        raise _BadError(f"a string of {length} bytes")
    return file.read(length).decode("utf-8", errors="surrogateescape")


def _value(file: BinaryIO, size: int) -> Any:
    (kind,) = struct.unpack("<I", file.read(4))
    return _of_kind(file, kind, size, 0)


def _of_kind(file: BinaryIO, kind: int, size: int, depth: int) -> Any:
    if kind == _STRING:
        return _string(file, size)
    if kind in _NUMBERS:
        return struct.unpack(_NUMBERS[kind], file.read(struct.calcsize(_NUMBERS[kind])))[0]
    if kind != _ARRAY or depth > 4:
        raise _BadError(f"a value of type {kind}")
    inner, count = struct.unpack("<IQ", file.read(12))
    if count > size:
        raise _BadError(f"a list of {count} values")
    if inner in _NUMBERS:
        form = _NUMBERS[inner]
        return struct.unpack(f"<{count}{form[1]}", file.read(count * struct.calcsize(form)))
    return [_of_kind(file, inner, size, depth + 1) for _ in range(count)]


def _tensor(file: BinaryIO, size: int) -> tuple[str, Shape, str, str, int]:
    """Name, shape (slowest axis first), dtype, ggml type, offset."""
    name = _string(file, size)
    (axes,) = struct.unpack("<I", file.read(4))
    if axes > 8:
        raise _BadError(f"{name} has {axes} axes")
    extents = struct.unpack(f"<{axes}Q", file.read(8 * axes))
    kind, offset = struct.unpack("<IQ", file.read(12))
    shape = tuple(reversed(extents))
    if kind in _PLAIN:
        return name, shape, _PLAIN[kind], _PLAIN[kind], offset
    if kind not in PACKED:
        raise _BadError(f"{name} has ggml type {kind}, which is not known here")
    word, elements, nbytes = PACKED[kind]
    if not shape or shape[-1] % elements:
        raise _BadError(f"{name}: rows of {shape[-1:]} elements in blocks of {elements}")
    return name, (*shape[:-1], shape[-1] // elements * nbytes), "U8", word, offset


def check_gguf(left: Side, right: Side) -> list[Finding]:
    """Types that changed, and metadata: what is neither a name nor a byte of a tensor."""
    if left.kind != "gguf" or right.kind != "gguf":
        return []
    one, two = left.config or {}, right.config or {}
    found = [
        finding("narrowed" if _bits(kind) > _bits(two["types"][name]) else "dtype-changed",
                f"{name}: {kind} on the left, {two['types'][name]} on the right; the values were not compared",
                side="both", tensor=name)
        for name, kind in one["types"].items()
        if name in two["types"] and two["types"][name] != kind
    ]  # fmt: skip
    missing = object()
    before, after = one["metadata"], two["metadata"]
    for key in sorted(before.keys() | after.keys()):
        if before.get(key, missing) != after.get(key, missing):
            shown = " and ".join(_shown(side.get(key, "(absent)")) for side in (before, after))
            found.append(finding("config-changed", f"metadata: {key} differs: {shown}", key=key))
    return found


def _bits(kind: str) -> float:
    plain = {"F64": 64.0, "F32": 32.0, "F16": 16.0, "BF16": 16.0, "I8": 8.0, "I16": 16.0, "I32": 32.0, "I64": 64.0}
    packed = {name: 8 * nbytes / elements for name, elements, nbytes in PACKED.values()}
    return (plain | packed)[kind]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
