"""config.json: read it, and change single fields of it without touching any other byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"[\s,:]*")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder. Raises ConfigError naming the file."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no config.json", where=str(folder), next_step="every model needs one beside its weights"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json cannot be read: {error}", where=str(file)) from error
    if not isinstance(config, dict):
        raise ConfigError("config.json holds no JSON object", where=str(file))
    return config


def with_values(text: str, changes: Mapping[str, Any]) -> str:
    """``text`` of a config.json with the value of each dotted key replaced; everything else stays byte for byte.

    A key that is not there is added as the first of its object. Raises ConfigError for a parent that is no object.
    """
    for key, value in changes.items():
        text = _with_value(text, key.split("."), json.dumps(value))
    return text


def _with_value(text: str, path: list[str], value: str) -> str:
    start = _open(text, 0)
    for depth, part in enumerate(path):
        last = depth + 1 == len(path)
        found = _find(text, start, part)
        if found is None:
            if not last:
                raise ConfigError(f"config.json has no object '{'.'.join(path[: depth + 1])}'", where=".".join(path))
            indent = _SPACE.match(text, start)
            assert indent is not None  # the pattern matches the empty string
            comma = "" if text[indent.end()] == "}" else ","
            return f"{text[:start]}{indent[0]}{json.dumps(part)}: {value}{comma}{text[start:]}"
        begin, end = found
        if last:
            return text[:begin] + value + text[end:]
        start = _open(text, begin)
    raise AssertionError("a dotted key has at least one part")


def _open(text: str, position: int) -> int:
    """The position behind the next ``{``."""
    return text.index("{", position) + 1


def _find(text: str, position: int, key: str) -> tuple[int, int] | None:
    """Start and end of the value of ``key`` in the object that begins at ``position``."""
    decoder = json.JSONDecoder()
    while True:
        space = _SPACE.match(text, position)
        assert space is not None
        position = space.end()
        name = _STRING.match(text, position)
        if name is None:
            return None
        space = _SPACE.match(text, name.end())
        assert space is not None
        _, end = decoder.raw_decode(text, space.end())
        if json.loads(name[0]) == key:
            return space.end(), end
        position = end
