"""What came of comparing bytes: one pair, and all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtpconvert.audit.findings import Finding
from mtpconvert.audit.pairs import Pair
from mtpconvert.errors import CheckpointError
from mtpconvert.tensors import Shape


@dataclass(slots=True)
class Outcome:
    """What came of one pair. ``first``: index of the first difference in the common order; ``differing``: how many
    elements. ``error``: the bytes could not be read. ``values``: for pairs of two dtypes."""

    pair: Pair
    equal: bool
    nbytes: int = 0
    first: Shape | None = None
    differing: int = 0
    total: int = 0
    error: CheckpointError | None = None
    values: Any = None


@dataclass(slots=True)
class Bits:
    """``equal``/``unequal``: names on the right; ``nbytes``: bytes of the right that were compared."""

    findings: list[Finding] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    equal: set[str] = field(default_factory=set)
    unequal: set[str] = field(default_factory=set)
    nbytes: int = 0
    copies: list[str] = field(default_factory=list)
    unchanged: set[str] = field(default_factory=set)  # by-name pairs found equal, copies of the right included
