"""SARIF 2.1.0 (OASIS), for code-scanning pages: a rule per code, a logical location per tensor."""

from __future__ import annotations

import json
from typing import Any

from mtpconvert.audit.codes import CODES
from mtpconvert.audit.findings import Finding, Severity
from mtpconvert.audit.report_model import Report

_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render(report: Report, fail_on: str) -> str:
    used = sorted({found.code for found in report.findings})
    rules = [
        {
            "id": code,
            "shortDescription": {"text": CODES[code].what},
            "help": {"text": CODES[code].mend},
            "defaultConfiguration": {"level": CODES[code].severity},
        }
        for code in used
    ]
    driver = {"name": "mtpconvert", "version": report.as_json()["tool_version"], "rules": rules}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "results": [_result(found, used, report) for found in report.findings],
        "properties": {"mtp": report.mtp.as_json(), "verdict": report.verdict(fail_on)},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _result(found: Finding, rules: list[str], report: Report) -> dict[str, Any]:
    root = report.left.path if found.side == "left" else report.right.path
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": _uri(root)}},
        "logicalLocations": [{"name": found.tensor or "(checkpoint)", "kind": "member"}],
    }
    result: dict[str, Any] = {
        "ruleId": found.code,
        "ruleIndex": rules.index(found.code),
        "level": _LEVEL[found.severity],
        "message": {"text": found.message},
        "locations": [location],
        "partialFingerprints": {"mtpconvert/v1": f"{found.code}:{found.side}:{found.tensor}"},
    }
    if found.waived_by is not None:
        result["suppressions"] = [{"kind": "external", "justification": found.waived_by}]
    return result


def _uri(path: str) -> str:
    from urllib.parse import quote

    return quote(path.replace("\\", "/"))
