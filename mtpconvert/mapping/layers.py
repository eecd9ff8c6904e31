"""``[layers]``: named sets of layer numbers, from ranges, config lists and set operations.

name = ["0", "first_k_dense_replace"]      half-open range of two expressions
name = 'where(layer_types == "full_attention")', "where(moe_layer_freq == 1)"
name = "every(n, offset)"                  i with (i - offset) divisible by n
name = "every_from(n, offset)"             the first ``offset`` layers, and every n-th after the last of them
name = "in(mlp_only_layers)"               numbers listed in the config
name = "a minus b", "a and b"              of earlier names or of the forms above
name = 'where(...) else b'                 b where the config does not have the list that ``where`` asks for
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from mtpconvert.errors import ConfigError, MappingError
from mtpconvert.mapping.dims import Scope, check_expression, evaluate

MOST_LAYERS = 10_000  # a config with a slip in a count would fill the memory

Selector = str | tuple[str, str]

_WHERE = re.compile(r'where\(\s*([\w.]+)\s*==\s*(?:"([^"]*)"|(\d+))\s*\)')
_EVERY = re.compile(r"every\(([^,()]+),([^,()]+)\)")
_EVERY_FROM = re.compile(r"every_from\(([^,()]+),([^,()]+)\)")
_IN = re.compile(r"in\(\s*([\w.]+)\s*\)")
_SET_OPERATION = re.compile(r"^(.*\S)\s+(minus|and)\s+(\S.*)$")


def select_layers(selectors: Mapping[str, Selector], scope: Scope) -> dict[str, Sequence[int]]:
    """Layer numbers of every name, ascending. Trunk-wide forms range over ``num_hidden_layers``."""
    chosen: dict[str, Sequence[int]] = {}
    for name, selector in selectors.items():
        if isinstance(selector, tuple):
            chosen[name] = _bounded(range(evaluate(selector[0], scope), evaluate(selector[1], scope)))
        else:
            chosen[name] = sorted(_select(selector, scope, chosen))
    return chosen


def _bounded(layers: range) -> range:
    if len(layers) > MOST_LAYERS:
        raise ConfigError(
            f"config.json describes a model of {len(layers):,} layers", next_step="check its counts of layers"
        )
    return layers


def check_selector(text: str, earlier: Collection[str]) -> None:
    """Raise MappingError unless ``text`` is one of the forms above over the names ``earlier``; needs no config."""
    text = text.strip()
    if text in earlier or _WHERE.fullmatch(text) or _IN.fullmatch(text):
        return
    first, otherwise, rest = text.partition(" else ")
    if otherwise and _WHERE.fullmatch(first.strip()):
        check_selector(rest, earlier)
    elif operation := _SET_OPERATION.match(text):
        check_selector(operation[1], earlier)
        check_selector(operation[3], earlier)
    elif match := _EVERY.fullmatch(text) or _EVERY_FROM.fullmatch(text):
        check_expression(match[1])
        check_expression(match[2])
    else:
        raise MappingError(f"'{text}' selects no layers: it is neither an earlier name nor a known form")


def asked_of_lists(selector: Selector) -> Iterator[tuple[str, str | int]]:
    """(config key, value) of every ``where`` in a selector."""
    if isinstance(selector, str):
        for match in _WHERE.finditer(selector):
            yield match[1], _wanted(match)


def _wanted(match: re.Match[str]) -> str | int:
    return match[2] if match[3] is None else int(match[3])


def _select(text: str, scope: Scope, chosen: Mapping[str, Sequence[int]]) -> set[int]:
    text = text.strip()
    if text in chosen:
        return set(chosen[text])
    first, otherwise, rest = text.partition(" else ")
    if otherwise and (match := _WHERE.fullmatch(first.strip())):
        return _select(first if scope.value(match[1]) is not None else rest, scope, chosen)
    if operation := _SET_OPERATION.match(text):
        left, right = _select(operation[1], scope, chosen), _select(operation[3], scope, chosen)
        return left - right if operation[2] == "minus" else left & right
    if match := _WHERE.fullmatch(text):
        kinds = _config_list(match[1], scope)[: scope.integer("num_hidden_layers")]
        return {i for i, kind in enumerate(kinds) if kind == _wanted(match)}
    if match := _EVERY.fullmatch(text):
        step, offset = evaluate(match[1], scope), evaluate(match[2], scope)
        if step < 1:
            raise ConfigError(f"'{text}' steps by {step}")
        return {i for i in _bounded(range(scope.integer("num_hidden_layers"))) if (i - offset) % step == 0}
    if match := _EVERY_FROM.fullmatch(text):
        step, offset = evaluate(match[1], scope), evaluate(match[2], scope)
        if step < 1:
            raise ConfigError(f"'{text}' steps by {step}")
        return {i for i in _bounded(range(scope.integer("num_hidden_layers"))) if max(i + 1 - offset, 0) % step == 0}
    if match := _IN.fullmatch(text):
        trunk = _bounded(range(scope.integer("num_hidden_layers")))
        return {number for number in _numbers(match[1], scope) if number in trunk}
    raise MappingError(f"'{text}' selects no layers: it is neither an earlier name nor a known form")


def _numbers(key: str, scope: Scope) -> list[int]:
    """A list of layer numbers. Raises ConfigError for an entry that is none."""
    numbers: list[int] = []
    for at, number in enumerate(_config_list(key, scope)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(
                f"{key}[{at}] is {number!r}, no number of a layer",
                where=f"config.json: {key}",
                next_step="list the numbers of layers there, counted from 0",
            )
        numbers.append(number)
    return numbers


def _config_list(key: str, scope: Scope) -> list[object]:
    value = scope.value(key)
    if isinstance(value, str):  # a letter for each layer
        return list(value)
    if not isinstance(value, list):
        raise ConfigError(f"'{key}' is {value!r} where a list is needed", where=f"config.json: {key}")
    return value
