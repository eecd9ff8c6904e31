"""What stands beside the weights: tokenizer, code, generation config; and what config.json says about the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import COUNT_KEYS
from mtpconvert.audit.packed import schemes
from mtpconvert.audit.readers.side import Side

_BLOCK = 1 << 20
# Written by whoever saved last, or judged by a check of its own.
_NOT_COMPARED = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures_version"}
_NOT_FILES = {"config.json"}


def check_side_files(left: Side, right: Side) -> list[Finding]:
    """HF against HF: every side file of the left is on the right, byte for byte; auto_map targets exist."""
    found: list[Finding] = []
    for name, path in left.side_files.items():
        if name in _NOT_FILES:
            continue
        other = right.side_files.get(name)
        if other is None:
            found.append(finding("side-file-missing", f"{name} is not on the right", tensor=None, file=name))
        elif not _equal_files(path, other):
            found.append(finding("side-file-changed", f"{name} has other bytes on the right", tensor=None, file=name))
    if left.config is not None and right.config is not None:
        found += _config_changes(left.config, right.config, _schemes_that_may_differ(left, right))
    return found


def check_remote_code(side: Side) -> list[Finding]:
    """Files that ``auto_map`` points to; never imported."""
    mapped = (side.config or {}).get("auto_map")
    values = mapped.values() if isinstance(mapped, dict) else ()
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    modules = {
        str(value).split("--")[-1].rsplit(".", 1)[0] for value in flat if isinstance(value, str) and "--" not in value
    }
    return [
        finding("remote-code-missing", f"config.json: auto_map names {module}.py, which is not there", side=side.label)
        for module in sorted(modules)
        if f"{module.replace('.', '/')}.py" not in side.side_files
    ]


def _equal_files(one: Path, two: Path) -> bool:
    if one.stat().st_size != two.stat().st_size:
        return False
    with one.open("rb") as first, two.open("rb") as second:
        while block := first.read(_BLOCK):
            if block != second.read(_BLOCK):
                return False
    return True


def _schemes_that_may_differ(left: Side, right: Side) -> tuple[str, ...]:
    """A side that holds plain numbers where the other holds codes has no quantization_config: nothing is wrong."""
    one, two = ([path for path, _ in schemes(side.config or {})] for side in (left, right))
    return tuple(f"{path}." for path in one + two) if (left.stored or right.stored) and not (one and two) else ()


def _config_changes(before: dict[str, Any], after: dict[str, Any], apart: tuple[str, ...]) -> list[Finding]:
    one, two = _flat(before), _flat(after)
    missing = object()
    changed = [key for key in sorted(one.keys() | two.keys()) if one.get(key, missing) != two.get(key, missing)]
    changed = [key for key in changed if not key.startswith(apart)]
    kept = [key for key in changed if key.rsplit(".", 1)[-1] not in (*COUNT_KEYS, *_NOT_COMPARED)]
    return [
        finding(
            "config-changed",
            f"config.json: {key} was {one.get(key, '(absent)')!r} and is {two.get(key, '(absent)')!r}",
            key=key,
        )
        for key in kept
    ]


def _flat(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[path + key] = value
    return flat
