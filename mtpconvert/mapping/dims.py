"""The closed integer grammar of mapping files, evaluated over the keys of one config.json.

expr := term (("*" | "+" | "/" | "-") term)*      left to right, without precedence; "/" must be exact
term := integer | symbol | config key (dotted where nested)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconvert.errors import ConfigError, MappingError

_TOKEN = re.compile(r"\s*(?:(?P<integer>\d+)|(?P<name>[A-Za-z_][\w.]*)|(?P<operator>[*+/-]))\s*")


@dataclass
class Scope:
    """Where names are looked up: symbols first, then the config, then the mapping's ``[defaults]``.

    ``used_defaults`` collects every default that was needed, for the command line to print. ``undefined``: symbols that
    this config gives no value, and why; that matters only where one is needed.
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    used_defaults: dict[str, Any] = field(default_factory=dict)
    undefined: dict[str, ConfigError] = field(default_factory=dict)
    _evaluating: list[str] = field(default_factory=list, repr=False)  # defaults at hand, to notice a circle of them

    def value(self, key: str) -> Any:
        """The config's value under a dotted key, or the default, or None where there is neither.

        Raises MappingError where a default is computed from itself.
        """
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None or key not in self.defaults:
            return found
        default = self.defaults[key]
        if isinstance(default, str) and default.startswith("="):
            if key in self._evaluating:
                raise MappingError(
                    f"the default of '{key}' is computed from itself: {' -> '.join([*self._evaluating, key])}",
                    next_step="correct [defaults] of the mapping file",
                )
            self._evaluating.append(key)
            try:
                default = evaluate(default[1:], self)
            finally:
                self._evaluating.pop()
        self.used_defaults[key] = default
        return default

    def integer(self, name: str) -> int:
        if name in self.symbols:
            return self.symbols[name]
        if name in self.undefined:
            raise self.undefined[name]
        value = self.value(name)
        if value is None:
            raise ConfigError(
                f"'{name}' is neither a symbol of the mapping nor a key of config.json",
                next_step="add the key to config.json, or the symbol to [dims] or [defaults] of the mapping file",
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"'{name}' is {value!r} where an integer is needed",
                where=f"config.json: {name}",
                next_step=f"correct {name} in config.json",
            )
        return value

    def truth(self, key: str) -> bool:
        """Whether a config key is set: not missing, null, false, 0 or empty. Decides ``when`` and ``unless``.

        Missing is also what has a default that other missing keys give.
        """
        try:
            return bool(self.symbols[key] if key in self.symbols else self.value(key))
        except ConfigError:
            return False


def evaluate(expression: str, scope: Scope, **extra: int) -> int:
    """The value of ``expression``; ``extra`` adds symbols (the layer index ``i``) for this call only.

    Raises MappingError for a malformed expression, ConfigError for a missing key or an inexact division.
    """
    terms = _tokens(expression)
    result = _term(terms[0], scope, extra)
    for operator, term in zip(terms[1::2], terms[2::2], strict=True):
        value = _term(term, scope, extra)
        if operator == "*":
            result *= value
        elif operator == "+":
            result += value
        elif operator == "-":
            result -= value
        else:
            if value == 0 or result % value:
                raise ConfigError(
                    f"'{expression}' divides {result} by {value}, which is not exact",
                    next_step="check these sizes in config.json",
                )
            result //= value
    return result


def check_expression(expression: str) -> None:
    """Raise MappingError unless ``expression`` follows the grammar; needs no config."""
    _tokens(expression)


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        wants_operator = len(tokens) % 2 == 1
        if match is None or (match.lastgroup == "operator") != wants_operator:
            break
        tokens.append(match.group(match.lastgroup or 0))
        position = match.end()
    if position < len(expression) or len(tokens) % 2 == 0:
        raise MappingError(f"'{expression}' is no expression: terms joined by * + / - are")
    return tokens


def _term(token: str, scope: Scope, extra: Mapping[str, int]) -> int:
    if token.isdigit():
        return int(token)
    return extra[token] if token in extra else scope.integer(token)
