"""What an audit says: findings, the MTP ledger, what was compared. Every format is written from this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mtpconvert
from mtpconvert.audit.findings import Finding, Severity

SCHEMA_VERSION = 1


@dataclass(slots=True)
class SideSummary:
    path: str
    kind: str
    layout: str
    tensors: int
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "kind": self.kind,
            "dialect": self.layout,
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }


@dataclass(slots=True)
class LayerLedger:
    """One MTP layer: tensors expected, present on each side, equal (None where bytes were not read), bytes."""

    layer: int
    prefix: str
    expected: int
    left: int
    right: int
    equal: int | None
    left_bytes: int
    right_bytes: int
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer, "prefix": self.prefix, "expected": self.expected, "left": self.left,
            "right": self.right, "equal": self.equal, "left_bytes": self.left_bytes,
            "right_bytes": self.right_bytes, "sentence": self.sentence,
        }  # fmt: skip


@dataclass(slots=True)
class MtpLedger:
    """``declared`` by each side's config (None: no key says a number); ``kinds``: what drafts, by side (``drafts``;
    None: nothing does); ``sentences`` are for a person at night."""

    declared: int | None = None
    declared_right: int | None = None
    left: dict[str, int] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    layers: list[LayerLedger] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    kinds: dict[str, str | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "declared": self.declared, "declared_right": self.declared_right, "kinds": self.kinds,
            "left": self.left, "right": self.right,
            "ledger": [layer.as_json() for layer in self.layers], "sentences": self.sentences,
        }  # fmt: skip


@dataclass(slots=True)
class TensorState:
    """One tensor for the map of the model: ``state`` is "equal", "differs", "missing", "unexpected" or "unread"."""

    name: str
    state: str
    mtp: bool
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Report:
    left: SideSummary
    right: SideSummary
    level: str
    trained: bool
    mtp: MtpLedger
    tensors: int
    nbytes: int
    findings: list[Finding]
    states: Callable[[], list[TensorState]] = list  # worked out when a map is drawn
    copies: list[str] = field(default_factory=list)
    passthrough: dict[str, int] = field(default_factory=lambda: {"tensors": 0, "bytes": 0})  # of another part, as kept

    def failing(self, fail_on: str = "error") -> list[Finding]:
        least = Severity[fail_on.upper()]
        return [f for f in self.findings if f.severity >= least and f.waived_by is None]

    def verdict(self, fail_on: str = "error") -> str:
        return "fail" if self.failing(fail_on) else "pass"

    def as_json(self, fail_on: str = "error") -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": mtpconvert.__version__,
            "left": self.left.as_json(),
            "right": self.right.as_json(),
            "mtp": self.mtp.as_json(),
            "checked": {
                "tensors": self.tensors,
                "bytes": self.nbytes,
                "passthrough": self.passthrough,
                "level": self.level,
                "trained": self.trained,
            },
            "findings": [finding.as_json() for finding in self.findings],
            "verdict": self.verdict(fail_on),
        }
