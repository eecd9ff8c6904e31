"""One self-contained page: a map of the model (layers against tensors, MTP set apart) and a table that filters."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from mtpconvert.audit.codes import CODES
from mtpconvert.audit.report_model import Report

_LAYER = re.compile(
    r"^(?P<head>.*?(?:layers|mtp_layers|mtp_block|blocks|h))\.(?P<n>\d+)\.(?P<tail>.+)$"
    r"|^mtp\.(?P<k>\d+)\.(?P<rest>.+)$",
    re.A,
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_RANK = ("missing", "differs", "unexpected", "unread", "equal")


def render(report: Report, fail_on: str) -> str:
    page = files("mtpconvert.audit.report").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_data(report, fail_on), ensure_ascii=False, separators=(",", ":"))
    # Inside a script element only "</" and "<!--" could end or change it; in JSON both may be written escaped.
    return page.replace("/*DATA*/null", data.replace("<", "\\u003c"))


def _data(report: Report, fail_on: str) -> dict[str, object]:
    document = report.as_json(fail_on)
    document["mend"] = {code: CODES[code].mend for code in {found.code for found in report.findings}}
    document["map"] = _map(report)
    return document


def _map(report: Report) -> list[dict[str, object]]:
    """Rows of the map: one per layer, MTP rows last and marked; experts of a kind share one cell."""
    rows: dict[tuple[bool, str, int], dict[str, dict[str, object]]] = {}
    for tensor in report.states():
        match = _LAYER.match(tensor.name)
        head, number, tail = "", -1, tensor.name
        if match and match["n"] is not None:
            head, number, tail = match["head"], int(match["n"]), match["tail"]
        elif match:
            head, number, tail = "mtp", int(match["k"]), match["rest"]
        column = _EXPERT.sub(".experts.*.", tail)
        cells = rows.setdefault((tensor.mtp, head, number), {})
        cell = cells.setdefault(column, {"label": column, "state": "equal", "names": [], "counts": {}})
        names, counts = cell["names"], cell["counts"]
        assert isinstance(names, list) and isinstance(counts, dict)
        names.append([tensor.name, tensor.state, list(tensor.shape), tensor.dtype])
        counts[tensor.state] = counts.get(tensor.state, 0) + 1
        cell["state"] = next(state for state in _RANK if state in counts)
    return [
        {
            "mtp": mtp,
            "layer": number >= 0,
            "label": f"{head}.{number}" if number >= 0 else (head or "model"),
            "cells": list(cells.values()),
        }
        for (mtp, head, number), cells in sorted(rows.items())
    ]
