"""The report as one JSON document; its schema is ``docs/audit-report.schema.json``."""

from __future__ import annotations

import json

from mtpconvert.audit.report_model import Report


def render(report: Report, fail_on: str) -> str:
    return json.dumps(report.as_json(fail_on), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
