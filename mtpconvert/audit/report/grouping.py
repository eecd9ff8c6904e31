"""Thousands of findings with one cause as one line: grouped by code, side and the stem of the name."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from mtpconvert.audit.findings import Finding
from mtpconvert.errors import some

_NUMBER = re.compile(r"\d+")
_FEW = 3  # findings of one group that are shown one by one
_MANY = 20  # files or config keys of one group that are named


@dataclass(frozen=True, slots=True)
class Line:
    """A finding, or ``count`` of them under one message."""

    finding: Finding
    message: str
    count: int = 1


def lines(findings: list[Finding]) -> list[Line]:
    """Findings in order, each group of more than a few cut to its first and a count."""
    groups: dict[tuple[str, str, str, str | None], list[Finding]] = defaultdict(list)
    for found in findings:
        groups[found.code, found.side, _stem(found.tensor), found.waived_by].append(found)
    result: list[Line] = []
    for group in groups.values():
        if len(group) <= _FEW:
            result += [Line(found, found.message) for found in group]
            continue
        cause = group[0].detail.get("cause")
        same = f"; cause: {cause}" if cause and all(f.detail.get("cause") == cause for f in group) else ""
        text = f"{len(group)} times{_names(group)}{same}; first: {group[0].message}"
        result.append(Line(group[0], text, len(group)))
    return result


def _names(group: list[Finding]) -> str:
    """Tensors, which differ in a number, by the first two and the last; files and config keys one by one."""
    if group[0].tensor is not None:
        return f": {group[0].tensor}, {group[1].tensor} ... {group[-1].tensor}"
    places = [place for found in group if (place := found.detail.get("file") or found.detail.get("key"))]
    return f": {some(places, _MANY)}" if places else ""


def _stem(tensor: str | None) -> str:
    """The part of a name that many tensors of one loss share: up to the layer's number."""
    if tensor is None:
        return ""
    match = re.match(r"^(.*?layers\.\d+\.|mtp\.|[^.]*\.)", tensor)
    return match[0] if match else tensor
