"""For a terminal: MTP first, then findings by weight, then the verdict. Short when clean."""

from __future__ import annotations

import io

from mtpconvert.audit.report.grouping import lines
from mtpconvert.audit.report_model import Report
from mtpconvert.tensors import size_words

_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_CONTROL = dict.fromkeys((7, 8, 11, 12, 13, 27))  # names of a hostile file ring no bell and move no cursor

Part = tuple[str, str]  # a text and its style ("" for none)


def render(report: Report, fail_on: str, *, color: bool = False, width: int = 120) -> str:
    """Lines of text; ``color``: with the escape sequences of a terminal of ``width`` columns."""
    parts = [[(text.translate(_CONTROL), style) for text, style in line] for line in _lines(report, fail_on)]
    if not color:
        return "".join("".join(text for text, _ in line) + "\n" for line in parts)
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False, soft_wrap=True)
    for line in parts:
        console.print(Text.assemble(*line))
    return out.getvalue()


def _lines(report: Report, fail_on: str) -> list[list[Part]]:
    found: list[list[Part]] = []
    for side, summary in (("left ", report.left), ("right", report.right)):
        what = f"{summary.kind}, {summary.layout}, {summary.tensors} tensors, {size_words(summary.nbytes)}"
        found.append([(f"{side}  {summary.path}  ({what})", "")])
    found += [[], [("MTP", "bold")]]
    found += [[(f"  {line}", "")] for line in (*report.mtp.sentences, *(layer.sentence for layer in report.mtp.layers))]
    open_ones = [one for one in report.findings if one.waived_by is None]
    waived = [one for one in report.findings if one.waived_by is not None]
    if open_ones:
        found += [[], [(f"Findings ({len(open_ones)})", "bold")]]
    for line in lines(open_ones):
        label = line.finding.severity.label
        found.append(
            [
                ("  ", ""),
                (f"{label:8}", _STYLE[label]),
                (f"{line.finding.side:6} ", ""),
                (line.finding.code, "bold"),
                (f"  {line.message}", ""),
            ]
        )
    if waived:
        found += [[], [(f"Waived ({len(waived)})", "bold")]]
    for line in lines(waived):
        one = line.finding
        found.append([(f"  {one.side:6} {one.code}  {line.message}  (waived: {one.waived_by})", "")])
    verdict = report.verdict(fail_on)
    read = "names, shapes and dtypes only" if report.level == "headers" else f"every byte, {size_words(report.nbytes)}"
    ending = (f"  {report.tensors} tensors compared, {read}{_beside(report)}", "")
    return [*found, [], [(verdict.upper(), "bold green" if verdict == "pass" else "bold red"), ending]]


def _beside(report: Report) -> str:
    count, nbytes = report.passthrough["tensors"], report.passthrough["bytes"]
    if not count:
        return ""
    size = f", {size_words(nbytes)}" if nbytes else ""
    return f"; beside them {count} of another part of the model, as kept for the way back{size}"
