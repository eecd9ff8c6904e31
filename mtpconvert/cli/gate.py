"""The audit at the end of a conversion, while the result still has its temporary name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpconvert.errors import AuditFailedError, some

if TYPE_CHECKING:
    from mtpconvert.audit.findings import Finding


@dataclass(frozen=True)
class Request:
    """What an option asked for, and the findings that must follow from it: accepted, and shown as such."""

    reason: str
    follows: Callable[[Finding], bool]


def _lost_mtp(found: Finding) -> bool:
    """Whatever is wrong with the MTP of the source, and that the result has none."""
    if found.side == "left":
        return bool(found.detail.get("mtp"))
    return found.code in ("mtp-layer-missing", "mtp-tensor-missing") or found.detail.get("key") == "mtp_num_layers"


DROP_MTP = Request("DROPPED BY REQUEST (--mtp drop)", _lost_mtp)
# The source's copies: the result has none. Tied embeddings that differ never come here, the converter refuses them.
USE_TRUNK = Request(
    "the trunk's values by request (--mtp-copies use-trunk)",
    lambda found: found.code == "copy-differs" and found.side == "left" and bool(found.detail.get("mtp")),
)
ALL_ROWS = Request(
    "all of Megatron's rows by request (--vocab-size from-megatron)",
    lambda found: found.code == "argument-mismatch" and found.detail.get("key") == "vocab_size",
)

_SHOWN = "mtpconvert audit SOURCE RESULT shows all; nothing stands under the final name"
_UNKNOWN = (
    "a mapping of one's own has no roles in the auditor, which shares nothing with mappings: --audit none leaves the"
    " audit out, and then nothing says that the numbers are in their right places"
)


def gate(level: str, requests: Sequence[Request] = ()) -> Callable[[Path, Path], Any] | None:
    """A gate for ``--audit LEVEL``: raises AuditFailedError when the audit does not pass. None for "none".

    What follows from ``requests`` is waived, finding by finding, and stays in the report.
    """
    if level == "none":
        return None

    def check(source: Path, result: Path) -> Any:
        from mtpconvert.audit.api import audit
        from mtpconvert.audit.waivers import Waiver, apply_waivers

        report = audit(source, result, level=level)
        waivers = [
            Waiver(found.code, found.tensor, request.reason, key=found.detail.get("key"))
            for request in requests
            for found in report.failing("error")
            if request.follows(found)
        ]
        apply_waivers(report.findings, waivers, date.today())
        if failing := report.failing("error"):
            raise AuditFailedError(
                f"the audit found {len(failing)} errors in the result:"
                f" {some([f'{finding.code}: {finding.message}' for finding in failing], 3)}",
                next_step=_UNKNOWN if any(found.code == "architecture-unknown" for found in failing) else _SHOWN,
            )
        return report

    return check
