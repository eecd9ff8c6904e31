"""Convert, audit and prove Megatron-Core <-> Hugging Face checkpoints, multi-token prediction (MTP) included.

``mtpconvert.audit(left, right)`` audits two checkpoints; the package is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from mtpconvert.audit.report_model import Report
    from mtpconvert.audit.waivers import Waiver

    # At run time the package mtpconvert.audit, which is callable; type checkers know packages as not callable.
    def audit(
        left: str | PathLike[str],
        right: str | PathLike[str],
        *,
        level: str = "bits",
        trained: bool = False,
        waivers: Sequence[Waiver] = (),
    ) -> Report: ...


__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "audit":
        import mtpconvert.audit as package

        return package
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
