"""An audit's Report in the formats people and machines read; each module has ``render(report, fail_on) -> str``."""

from __future__ import annotations

from collections.abc import Callable

from mtpconvert.audit.report_model import Report

FORMATS = ("text", "json", "junit", "sarif", "markdown", "html")


def render(report: Report, format_name: str, fail_on: str = "error") -> str:
    """The report in one of ``FORMATS``. KeyError for any other name."""
    if format_name not in FORMATS:
        raise KeyError(format_name)
    return _writer(format_name)(report, fail_on)


def _writer(format_name: str) -> Callable[[Report, str], str]:
    """The render function of a format; modules are imported when they are needed."""
    match format_name:
        case "text":
            from mtpconvert.audit.report import text

            return text.render
        case "json":
            from mtpconvert.audit.report import json

            return json.render
        case "junit":
            from mtpconvert.audit.report import junit

            return junit.render
        case "sarif":
            from mtpconvert.audit.report import sarif

            return sarif.render
        case "markdown":
            from mtpconvert.audit.report import markdown

            return markdown.render
    from mtpconvert.audit.report import html

    return html.render
