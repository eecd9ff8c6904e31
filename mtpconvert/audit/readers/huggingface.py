"""A Hugging Face directory: shards, index, config, side files; index against headers against files, both ways."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.headers import Header, Seen, read_header
from mtpconvert.audit.readers.side import Piece, Side, itemsize, row_major
from mtpconvert.errors import CheckpointError, some

PARAMS = "params.json"
INDEX = "model.safetensors.index.json"
_OF_MANY = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?:safetensors|bin)$")
# Weights of other frameworks and formats, which lie in many repositories beside those under audit.
_NOT_SIDE_FILES = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data",
    ".npz", ".lock",
)  # fmt: skip


def open_huggingface(root: Path, label: str, seen: Seen | None = None) -> Side:
    """Read every header under ``root``. CheckpointError when there is no safetensors file at all.

    ``seen``: what the other side's files said; what those of this side say joins it.
    """
    names = sorted(path.name for path in root.glob("*.safetensors"))
    indexes = sorted(path.name for path in root.glob("*.safetensors.index.json"))
    if not names and not indexes:
        raise CheckpointError(
            "no safetensors file in this directory",
            where=str(root),
            next_step="give the directory that holds config.json and model*.safetensors",
        )
    findings: list[Finding] = []
    seen = seen or Seen()
    headers = {name: read_header(root / name, label, seen) for name in names}
    shards = seen.joined(headers)
    files = [root / name for name in names]
    side = Side(label, root, "huggingface", _layout(names), shards.inventory, files, lambda name: ())
    for header in headers.values():
        findings += header.findings
        side.broken |= header.broken
    for tensor, file, other in shards.twice:
        text = f"{tensor} stands in {file} and in {other}"
        findings.append(finding("name-duplicate", text, side=label, tensor=tensor))
    side.home = shards.home
    side.bytes_total = shards.nbytes
    starts = {name: (number, header.starts) for number, (name, header) in enumerate(headers.items())}
    side.locate = partial(_locate, side, starts)
    findings += check_shard_sets(names, label)
    for index in indexes:
        findings += check_index(root / index, headers, side, seen, single=len(indexes) == 1)
    if not indexes and len(names) > 1:
        findings.append(finding("index-absent", f"{len(names)} weight files and no {INDEX}", side=label))
    side.config = config_of(root, label, findings)
    side.side_files = side_files_of(root)
    side.findings = findings
    return side


def side_files_of(root: Path) -> dict[str, Path]:
    """What lies beside the weights, by its path below ``root``; hidden folders (.git, .cache) are nobody's."""
    paths = {path.relative_to(root): path for path in sorted(root.rglob("*"))}
    return {
        str(name): path
        for name, path in paths.items()
        if path.is_file()
        and not name.name.endswith(_NOT_SIDE_FILES)
        and not any(folder.startswith(".") for folder in name.parts[:-1])
    }


def _layout(names: list[str]) -> str:
    return f"safetensors, {len(names)} file{'' if len(names) == 1 else 's'}"


def _locate(side: Side, starts: dict[str, tuple[int, dict[str, int]]], name: str) -> list[Piece]:
    spec = side.inventory[name]
    file, offsets = starts[side.home[name]]
    box = tuple((0, extent) for extent in spec.shape)
    return [Piece(box, file, offsets[name], row_major(spec.shape, itemsize(spec.dtype)))]


def check_shard_sets(names: list[str], label: str) -> list[Finding]:
    """Files called x-00001-of-00003 come in threes."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _OF_MANY.match(name):
            sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    return [
        finding(
            "shard-set-incomplete",
            f"{stem}-*-of-{count:05d}: {len(have)} of {count} files are here"
            f"{'; another set stands beside it' if len(sets) > 1 else ''}",
            side=label,
        )
        for (stem, count), have in sets.items()
        if have != set(range(1, count + 1))
    ]


def check_index(
    path: Path, headers: dict[str, Header], side: Side, seen: Seen, *, single: bool
) -> list[Finding]:  # fmt: skip
    """``weight_map`` and ``total_size`` against what the headers hold; ``single``: no other index is there."""
    found: list[Finding] = []

    def fault(code: str, message: str, tensor: str | None = None) -> None:
        found.append(finding(code, f"{path.name}: {message}", side=side.label, tensor=tensor))

    try:
        raw = path.read_bytes()
        table = seen.indexes[raw] = seen.indexes.get(raw) or json.loads(raw)
        weight_map: dict[str, str] = table["weight_map"]
        if set(map(type, weight_map.values())) - {str}:
            raise TypeError("weight_map gives something else than file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fault("index-unreadable", f"no weight_map can be read ({error!r})")
        return found
    if weight_map == side.home and single:
        _total_size(table, side.bytes_total, fault)
        return found
    listed: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        listed.setdefault(name, []).append(tensor)
    for name, tensors in sorted(listed.items(), key=lambda pair: str(pair[0])):
        if name not in headers:
            fault(
                "index-missing-file",
                f"names {name}, which is not there; {len(tensors)} tensors live in it: {some(tensors)}",
            )
    for tensor, name in weight_map.items():
        if name in headers and tensor not in headers[name].specs and headers[name].specs:
            from difflib import get_close_matches

            near = get_close_matches(tensor, headers[name].specs, 1)
            elsewhere = side.home.get(tensor)
            hint = (
                f"it is in {elsewhere}"
                if elsewhere
                else f"nearest name there: {near[0]}"
                if near
                else "nothing like it there"
            )
            fault("index-ghost", f"lists {tensor} in {name}, whose header lacks it; {hint}", tensor)
    for tensor, home in side.home.items():
        if tensor not in weight_map and home in listed:
            fault("index-unlisted", f"{home} holds {tensor}, which the index does not list", tensor)
    for name in headers:
        if name not in listed and single:
            fault("file-stray", f"does not name {name} ({len(headers[name].specs)} tensors)")
    listed_bytes = sum(side.inventory[tensor].nbytes for tensor in weight_map if tensor in side.inventory)
    _total_size(table, listed_bytes, fault)
    return found


def _total_size(table: dict[str, Any], actual: int, fault: Any) -> None:
    metadata = table.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        fault("index-no-total-size", "has no metadata.total_size")
    elif not isinstance(total, int | float) or int(total) != actual:
        fault("index-total-size", f"total_size says {total}, the tensors listed take {actual} bytes")


def config_of(root: Path, label: str, findings: list[Finding]) -> dict[str, Any] | None:
    """config.json; params.json where a checkpoint in Meta's own form has that alone."""
    own = root / "config.json"
    return read_config(own if own.is_file() or not (root / PARAMS).is_file() else root / PARAMS, label, findings)


def read_config(path: Path, label: str, findings: list[Finding]) -> dict[str, Any] | None:
    """config.json (or params.json) as a dict, or None with a finding that says why not."""
    if not path.is_file():
        findings.append(finding("config-missing", f"no {path.name}", side=label))
        return None
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        findings.append(finding("config-unreadable", f"{path.name}: {error}", side=label))
        return None
    if not isinstance(config, dict):
        findings.append(finding("config-unreadable", f"{path.name} is no JSON object", side=label))
        return None
    return config
