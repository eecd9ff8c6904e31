"""Symbols and defaults of a drafted mapping: those of all mappings whose rows it takes, without clashes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mtpconvert.mapping.sketch import Known

_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass
class Symbols:
    """``dims``: drafted symbol -> expression. ``defaults``: config key -> (value, source)."""

    dims: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, tuple[Any, str]] = field(default_factory=dict)
    _names: dict[tuple[int, str], str] = field(default_factory=dict)

    def expression(self, text: str, known: Known) -> str:
        """``text`` of a row of ``known`` in the drafted symbols, which take up what it needs."""
        return _NAME.sub(lambda match: self._name(match[0], known), text)

    def _name(self, name: str, known: Known) -> str:
        """The drafted name of a symbol, or of a config key, whose default is taken over."""
        mapping = known.mapping
        if name not in mapping.dims:
            if name in mapping.defaults and name not in self.defaults:
                value = mapping.defaults[name]
                self.defaults[name] = (value, mapping.default_sources.get(name, mapping.architecture))
                if isinstance(value, str) and value.startswith("="):
                    self.expression(value[1:], known)
            return name
        if (id(known), name) not in self._names:
            expression = self.expression(mapping.dims[name], known)
            self._names[id(known), name] = self._free(name, expression)
        return self._names[id(known), name]

    def _free(self, name: str, expression: str) -> str:
        """``name``, or with a number where another mapping uses it for something else."""
        number, chosen = 1, name
        while self.dims.get(chosen, expression) != expression:
            number += 1
            chosen = f"{name}{number}"
        self.dims[chosen] = expression
        return chosen
