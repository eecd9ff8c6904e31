"""The audit at the end of a conversion, while the result still has its temporary name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtpconvert.errors import AuditFailedError, some


def gate(level: str) -> Callable[[Path, Path], Any] | None:
    """A gate for ``--audit LEVEL``: raises AuditFailedError when the audit does not pass. None for "none"."""
    if level == "none":
        return None

    def check(source: Path, result: Path) -> Any:
        from mtpconvert.audit.api import audit

        report = audit(source, result, level=level)
        if failing := report.failing("error"):
            raise AuditFailedError(
                f"the audit found {len(failing)} errors in the result:"
                f" {some([f'{finding.code}: {finding.message}' for finding in failing], 3)}",
                next_step="mtpconvert audit SOURCE RESULT shows all; nothing stands under the final name",
            )
        return report

    return check
