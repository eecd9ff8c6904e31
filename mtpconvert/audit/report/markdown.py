"""Markdown for a pull-request comment or a model card: verdict and MTP first, findings as a table."""

from __future__ import annotations

from mtpconvert.audit.report.grouping import lines
from mtpconvert.audit.report_model import Report
from mtpconvert.tensors import size_words

_MOST = 50


def render(report: Report, fail_on: str) -> str:
    verdict = report.verdict(fail_on)
    read = "headers only" if report.level == "headers" else f"every byte ({size_words(report.nbytes)})"
    out = [f"## Checkpoint audit: {verdict}", ""]
    count = report.passthrough["tensors"]
    beside = f" Beside them {count} of another part of the model, as kept for the way back." if count else ""
    out += [f"`{report.left.path}` against `{report.right.path}`: {report.tensors} tensors, {read}.{beside}", ""]
    out += ["| | kind | tensors | bytes |", "|---|---|---:|---:|"]
    for label, side in (("left", report.left), ("right", report.right)):
        out.append(f"| {label} | {side.kind}, {side.layout} | {side.tensors} | {size_words(side.nbytes)} |")
    out += ["", "### MTP", ""]
    out += [f"- {_cell(sentence)}" for sentence in report.mtp.sentences]
    if report.mtp.layers:
        out += ["", "| layer | expected | left | right | equal | bytes (right) |", "|---:|---:|---:|---:|---:|---:|"]
        for row in report.mtp.layers:
            equal = "not read" if row.equal is None else row.equal
            counts = f"{row.expected} | {row.left} | {row.right} | {equal}"
            out.append(f"| {row.layer} | {counts} | {size_words(row.right_bytes)} |")
    shown = lines(report.findings)
    if shown:
        out += ["", "### Findings", "", "| severity | side | code | finding |", "|---|---|---|---|"]
    for line in shown[:_MOST]:
        found = line.finding
        waived = f" *(waived: {_cell(found.waived_by)})*" if found.waived_by is not None else ""
        out.append(f"| {found.severity.label} | {found.side} | `{found.code}` | {_cell(line.message)}{waived} |")
    if len(shown) > _MOST:
        out.append(f"| | | | and {len(shown) - _MOST} more |")
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    """Text that stays inside a table cell and renders as itself."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
