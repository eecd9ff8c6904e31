"""What is wrong with an artefact, as values: a stable code, a severity, a place. Never raised, always collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from mtpconvert.audit.codes import CODES


class Severity(IntEnum):
    """``NOTE`` never fails an audit; ``--fail-on`` chooses between the other two."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(slots=True)
class Finding:
    """``side`` is "left", "right" or "both"; ``tensor`` the name on that side (on the right, for "both").

    ``detail`` holds what a machine may want: ``count``, ``index``, ``role``, ``cause``, ``mtp``, ``other``
    (the tensor on the other side), ``statistic``, ``file``, ``modules`` (all that are concerned, by name). The message
    says it in words.
    """

    code: str
    message: str
    side: str = "right"
    tensor: str | None = None
    severity: Severity = Severity.ERROR
    waived_by: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": self.severity.label,
            "side": self.side,
            "tensor": self.tensor,
            "message": self.message,
            "waived_by": self.waived_by,
            **({"detail": self.detail} if self.detail else {}),
        }


def finding(code: str, message: str, *, side: str = "right", tensor: str | None = None, **detail: Any) -> Finding:
    """A Finding of a documented code, with that code's severity. KeyError if the code is not in ``codes.CODES``."""
    severity = Severity[CODES[code].severity.upper()]
    kept = {key: value for key, value in detail.items() if value is not None}
    return Finding(code, message, side, tensor, severity, None, kept)
