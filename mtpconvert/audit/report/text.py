"""For a terminal: MTP first, then findings by weight, then the verdict. Short when clean."""

from __future__ import annotations

import io

from mtpconvert.audit.report.grouping import lines
from mtpconvert.audit.report_model import Report

_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render(report: Report, fail_on: str, *, color: bool = False, width: int = 120) -> str:
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False, soft_wrap=True)
    for side, summary in (("left ", report.left), ("right", report.right)):
        what = f"{summary.kind}, {summary.layout}, {summary.tensors} tensors, {size(summary.nbytes)}"
        console.print(Text(f"{side}  {summary.path}  ({what})"))
    console.print()
    console.print(Text("MTP", style="bold"))
    for sentence in [*report.mtp.sentences, *(layer.sentence for layer in report.mtp.layers)]:
        console.print(Text(f"  {sentence}"))
    open_ones = [found for found in report.findings if found.waived_by is None]
    waived = [found for found in report.findings if found.waived_by is not None]
    if open_ones:
        console.print()
        console.print(Text(f"Findings ({len(open_ones)})", style="bold"))
    for line in lines(open_ones):
        label = line.finding.severity.label
        console.print(
            Text.assemble(
                "  ",
                (f"{label:8}", _STYLE[label]),
                f"{line.finding.side:6} ",
                (line.finding.code, "bold"),
                f"  {line.message}",
            )
        )
    if waived:
        console.print()
        console.print(Text(f"Waived ({len(waived)})", style="bold"))
    for line in lines(waived):
        found = line.finding
        console.print(Text(f"  {found.side:6} {found.code}  {line.message}  (waived: {found.waived_by})"))
    console.print()
    verdict = report.verdict(fail_on)
    read = "names, shapes and dtypes only" if report.level == "headers" else f"every byte, {size(report.nbytes)}"
    console.print(
        Text.assemble(
            (verdict.upper(), "bold green" if verdict == "pass" else "bold red"),
            f"  {report.tensors} tensors compared, {read}",
        )
    )
    return out.getvalue()


def size(nbytes: int) -> str:
    """1234567 -> "1.2 MB" (powers of 1000, as file managers and model cards count)."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
