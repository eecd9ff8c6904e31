"""Recorded inventories as text, a line a tensor pattern, sections by model; no torch, so any machine can read them.

A line is ``model.layers.{0-2}.mlp.experts.{0,2-3}.up_proj.weight BF16 [20, 36]``: the tensors whose names have these
numbers, each of that shape. ``## title`` begins a section, other lines with ``#`` are for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from tests.support.tiny_families import Shape

FOLDER = Path(__file__).parents[2] / "fixtures" / "inventories" / "families"
Held = dict[str, tuple[str, Shape]]  # name -> dtype, shape
_NUMBERS = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_BRACES = re.compile(r"\{([\d,-]+)\}")


def lines(held: Mapping[str, tuple[str, Shape]]) -> list[str]:
    """``held`` as lines, in the order of names with their numbers taken as numbers."""
    groups: dict[tuple[str, str, Shape], set[tuple[frozenset[int], ...]]] = {}
    for name, (dtype, shape) in held.items():
        numbers = tuple(frozenset([int(number)]) for number in _NUMBERS.findall(name))
        groups.setdefault((_NUMBERS.sub("{}", name), dtype, shape), set()).add(numbers)
    found = []
    for (template, dtype, shape), members in groups.items():
        for at in reversed(range(template.count("{}"))):  # experts first, then layers
            members = _merged(members, at)
        for numbers in members:
            first = template.format(*(min(values) for values in numbers))
            text = template.format(*map(_range, numbers))
            found.append((_natural(first), f"{text} {dtype} {json.dumps(list(shape))}"))
    return [line for _, line in sorted(found)]


def _merged(members: set[tuple[frozenset[int], ...]], at: int) -> set[tuple[frozenset[int], ...]]:
    """Members that differ in the number ``at`` alone become one."""
    united: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
    for numbers in members:
        rest = (*numbers[:at], *numbers[at + 1 :])
        united[rest] = united.get(rest, frozenset()) | numbers[at]
    return {(*rest[:at], values, *rest[at:]) for rest, values in united.items()}


def _range(values: frozenset[int]) -> str:
    """``3``, ``{0-2}``, ``{0,2-3}``."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return words[0] if len(values) == 1 else "{" + ",".join(words) + "}"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def expanded(recorded: Iterable[str]) -> Held:
    """The tensors of these lines. ValueError for a tensor that two of them name."""
    held: Held = {}
    for line in recorded:
        pattern, dtype, shape = line.split(" ", 2)
        for numbers in product(*(_values(text) for text in _BRACES.findall(pattern))):
            name = _BRACES.sub("{}", pattern).format(*numbers)
            if name in held:
                raise ValueError(f"{name} is named twice")
            held[name] = (dtype, tuple(json.loads(shape)))
    return held


def _values(text: str) -> list[int]:
    values: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        values += range(int(first), int(last or first) + 1)
    return values


def sections(file: Path) -> dict[str, Held]:
    """Title -> tensors of each section of a recorded file."""
    found: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            own = found[line.removeprefix("## ")] = []
        elif line and not line.startswith("#"):
            own.append(line)
    return {title: expanded(own) for title, own in found.items()}
