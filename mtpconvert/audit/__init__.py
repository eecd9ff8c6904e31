"""The auditor. ``mtpconvert.audit(left, right)`` is the library call: this package is itself callable.

It shares no code and no mapping file with the converter (docs/architecture.md, tests/audit/test_border.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import ModuleType

from mtpconvert.audit.findings import Finding, Severity
from mtpconvert.audit.report_model import Report
from mtpconvert.audit.waivers import Waiver, load_waivers

__all__ = ["Finding", "Report", "Severity", "Waiver", "load_waivers"]


class _CallablePackage(ModuleType):
    """``import mtpconvert; mtpconvert.audit(left, right)``, and ``from mtpconvert.audit import Report`` as ever."""

    def __call__(
        self,
        left: str | PathLike[str],
        right: str | PathLike[str],
        *,
        level: str = "bits",
        trained: bool = False,
        waivers: Sequence[Waiver] = (),
    ) -> Report:
        """Say whether the checkpoint ``right`` is what ``left`` became; either is Hugging Face or Megatron.

        Prints and changes nothing. ``report.verdict()`` is "pass" or "fail", ``report.findings`` says why. ``level``:
        "headers" or "bits". ``trained``: a training lies between the two. ``waivers``: see ``load_waivers``.
        Raises CheckpointError where a side cannot be read at all.
        """
        from mtpconvert.audit.api import audit

        return audit(Path(left), Path(right), level=level, trained=trained, waivers=list(waivers))


sys.modules[__name__].__class__ = _CallablePackage
