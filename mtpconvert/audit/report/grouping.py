"""Thousands of findings with one cause as one line: grouped by code, side and the stem of the name."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from mtpconvert.audit.findings import Finding

_NUMBER = re.compile(r"\d+")
_FEW = 3  # findings of one group that are shown one by one


@dataclass(frozen=True, slots=True)
class Line:
    """A finding, or ``count`` of them under one message."""

    finding: Finding
    message: str
    count: int = 1


def lines(findings: list[Finding], few: int = _FEW) -> list[Line]:
    """Findings in order, each group of more than ``few`` cut to its first and a count."""
    groups: dict[tuple[str, str, str, str | None], list[Finding]] = defaultdict(list)
    for found in findings:
        groups[found.code, found.side, _stem(found.tensor), found.waived_by].append(found)
    result: list[Line] = []
    for group in groups.values():
        if len(group) <= few:
            result += [Line(found, found.message) for found in group]
            continue
        cause = group[0].detail.get("cause")
        same = f"; cause: {cause}" if cause and all(f.detail.get("cause") == cause for f in group) else ""
        names = ", ".join(found.tensor or "?" for found in group[:2])
        text = f"{len(group)} times: {names} ... {group[-1].tensor}{same}; first: {group[0].message}"
        result.append(Line(group[0], text, len(group)))
    return result


def _stem(tensor: str | None) -> str:
    """The part of a name that many tensors of one loss share: up to the layer's number."""
    if tensor is None:
        return ""
    match = re.match(r"^(.*?layers\.\d+\.|mtp\.|[^.]*\.)", tensor)
    return match[0] if match else tensor
