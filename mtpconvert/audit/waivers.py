"""Waivers: findings that someone has looked at and accepted, by code, tensor and reason.

[[waiver]]
code = "tensor-missing"
tensor = "model.layers.2.*"        # exact name or shell pattern; left out: findings that name no tensor
key = "mtp_num_layers"             # optional: only findings about this config key or argument
reason = "MTP dropped on purpose, ticket 17"
expires = 2027-01-31               # optional
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.errors import UsageError

_KEYS = ("code", "tensor", "key", "reason", "expires")


@dataclass(frozen=True, slots=True)
class Waiver:
    """``key`` narrows a waiver down to findings about one config key or argument."""

    code: str
    tensor: str | None
    reason: str
    expires: date | None = None
    key: str | None = None

    def matches(self, found: Finding) -> bool:
        if found.code != self.code or self.key not in (None, found.detail.get("key")):
            return False
        if found.tensor is None or self.tensor is None:
            return found.tensor is None and self.tensor is None
        return found.tensor == self.tensor or fnmatchcase(found.tensor, self.tensor)


def load_waivers(path: Path) -> list[Waiver]:
    """The waivers of a TOML file. UsageError names the file and the entry for anything but the keys above."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(f"the waiver file cannot be read: {error}", str(path)) from error
    entries = table.get("waiver", [])
    if set(table) - {"waiver"} or not isinstance(entries, list):
        raise _refused("a waiver file holds [[waiver]] tables and nothing else", str(path))
    return [_waiver(entry, f"{path}, waiver {number}") for number, entry in enumerate(entries, 1)]


def _waiver(entry: Any, where: str) -> Waiver:
    if not isinstance(entry, dict):
        raise _refused("a waiver is a table", where)
    if unknown := sorted(set(entry).difference(_KEYS)):
        raise _refused(f"unknown keys {unknown}", where)
    code, tensor, key, reason, expires = (entry.get(k) for k in ("code", "tensor", "key", "reason", "expires"))
    if not isinstance(code, str) or not isinstance(reason, str) or not reason.strip():
        raise _refused("a waiver needs a code and a reason", where)
    if tensor is not None and not isinstance(tensor, str):
        raise _refused("tensor must be a name or a pattern", where)
    if key is not None and not isinstance(key, str):
        raise _refused("key must be a config key or an argument", where)
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise _refused("expires must be a TOML date such as 2027-01-31", where)
    return Waiver(code, tensor, reason, expires, key)


def _refused(what: str, where: str) -> UsageError:
    return UsageError(what, where=where, next_step=f"a [[waiver]] has {', '.join(_KEYS)}; docs/audit.md shows one")


def apply_waivers(findings: list[Finding], waivers: list[Waiver], today: date) -> list[Finding]:
    """Mark waived findings in place (they stay in every report) and return the findings about the waivers."""
    about: list[Finding] = []
    for waiver in waivers:
        label = f"{waiver.code} on {waiver.tensor or waiver.key or 'the whole checkpoint'}"
        if waiver.expires is not None and waiver.expires < today:
            about.append(finding("waiver-expired", f"waiver for {label} expired on {waiver.expires}", side="both"))
            continue
        matched = [found for found in findings if waiver.matches(found)]
        for found in matched:
            found.waived_by = found.waived_by or waiver.reason
        if not matched:
            about.append(finding("waiver-unused", f"waiver for {label} matches no finding", side="both"))
    return about
