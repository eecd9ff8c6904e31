"""An audit's Report in the formats people and machines read; each module has ``render(report, fail_on) -> str``."""

from __future__ import annotations

from importlib import import_module

from mtpconvert.audit.report_model import Report

FORMATS = ("text", "json", "junit", "sarif", "markdown", "html")


def render(report: Report, format_name: str, fail_on: str = "error") -> str:
    """The report in one of ``FORMATS``. KeyError for any other name."""
    if format_name not in FORMATS:
        raise KeyError(format_name)
    module = import_module(f"mtpconvert.audit.report.{format_name}")
    return str(module.render(report, fail_on))
