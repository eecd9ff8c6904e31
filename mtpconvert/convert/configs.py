"""config.json: read it, and change single fields of it without touching any other byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpconvert.errors import ConfigError

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,:]*")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder. Raises ConfigError naming the file."""
    return read_json(folder / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises ConfigError naming the file."""
    try:
        config = json.loads(file.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {file.name}", where=str(file.parent), next_step="every model needs one beside its weights"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file.name} cannot be read: {error}", where=str(file), next_step="correct the file, or fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file.name} holds no JSON object", where=str(file), next_step="fetch the file again")
    return config


def change_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of the config.json of ``folder`` in place; line ends and every other byte stay."""
    file = folder / "config.json"
    file.write_bytes(with_values(file.read_bytes().decode("utf-8"), changes).encode("utf-8"))


def with_values(text: str, changes: Mapping[str, Any]) -> str:
    """``text`` of a config.json with the value of each dotted key replaced, or the key removed where the new value is
    None; everything else stays byte for byte.

    A key that is not there is added as the first of its object. Raises ConfigError for a parent that is no object.
    """
    for key, value in changes.items():
        path = key.split(".")
        text = _without(text, path) if value is None else _with_value(text, path, json.dumps(value))
    return text


def _object_of(text: str, path: list[str]) -> int:
    """Where the object begins that the last key of ``path`` stands in."""
    begin = text.index("{")
    for depth, part in enumerate(path[:-1]):
        found = _find(text, begin + 1, part)
        if found is None or text[found[1]] != "{":
            raise ConfigError(f"config.json has no object '{'.'.join(path[: depth + 1])}'", where=".".join(path))
        begin = found[1]
    return begin


def _without(text: str, path: list[str]) -> str:
    """``text`` without every entry of that key, each with the comma that it no longer needs."""
    begin = _object_of(text, path)
    while (found := _find(text, begin + 1, path[-1])) is not None:
        start, _, end = found
        after = _SPACE.match(text, end)
        assert after is not None  # the pattern matches the empty string
        if text[after.end()] == ",":
            text = text[:start] + text[_skip(text, after.end()) :]
        else:
            text = text[:start].rstrip(" \t\r\n,") + text[end:]
    return text


def _with_value(text: str, path: list[str], value: str) -> str:
    begin = _object_of(text, path)
    found = _find(text, begin + 1, path[-1])
    if found is not None:
        return text[: found[1]] + value + text[found[2] :]
    space = _SPACE.match(text, begin + 1)
    assert space is not None  # the pattern matches the empty string
    comma = "" if text[space.end()] == "}" else ","
    return f"{text[: begin + 1]}{space[0]}{json.dumps(path[-1])}: {value}{comma}{text[begin + 1 :]}"


def _find(text: str, position: int, key: str) -> tuple[int, int, int] | None:
    """Where ``key`` of the object that begins at ``position`` starts, and start and end of its value; of the last one,
    as json reads an object that has the key twice."""
    decoder = json.JSONDecoder()
    found = None
    while True:
        position = _skip(text, position)
        name = _STRING.match(text, position)
        if name is None:
            return found
        begin = _skip(text, name.end())
        _, position = decoder.raw_decode(text, begin)
        if json.loads(name[0]) == key:
            found = name.start(), begin, position


def _skip(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()
