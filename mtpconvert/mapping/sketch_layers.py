"""``[layers]`` of a drafted mapping: which selector gives exactly these layers, out of this config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

_USUAL = ("first_k_dense_replace", "num_dense_layers")  # before any other key that happens to hold the number


def selectors(
    classes: Sequence[tuple[str, Sequence[int]]], config: Mapping[str, Any], count: int
) -> dict[str, tuple[str, str]]:
    """Name -> (class label, selector as TOML): one name for each class, or for each run of its layers."""
    found: dict[str, tuple[str, str]] = {}
    for label, numbers in classes:
        selector = _selector(list(numbers), config, count)
        if selector is not None:
            found[label] = (label, selector)
            continue
        for at, run in enumerate(_runs(numbers)):
            found[f"{label}_{at}"] = (label, _range(run, config, count))
    return found


def _selector(numbers: list[int], config: Mapping[str, Any], count: int) -> str | None:
    if len(_runs(numbers)) == 1:
        return _range(numbers, config, count)
    for key, value in config.items():
        if isinstance(value, list) and len(value) >= count:  # entries of MTP layers may stand behind the trunk's
            kinds = {value[number] for number in numbers if isinstance(value[number], str)}
            if len(kinds) == 1 and numbers == [i for i in range(count) if value[i] in kinds]:
                return f"'where({key} == \"{kinds.pop()}\")'"
    step, first = numbers[1] - numbers[0], numbers[0]
    if numbers == [i for i in range(count) if (i - first) % step == 0]:
        return f'"every({step}, {first})"'
    return None


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Stretches of consecutive numbers."""
    runs = [[numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _range(run: Sequence[int], config: Mapping[str, Any], count: int) -> str:
    first, last = (_bound(value, config, count) for value in (run[0], run[-1] + 1))
    return f'["{first}", "{last}"]'


def _bound(value: int, config: Mapping[str, Any], count: int) -> str:
    if value == 0:
        return "0"
    if value == count:
        return "num_hidden_layers"
    return next((key for key in _USUAL if config.get(key) == value), str(value))
