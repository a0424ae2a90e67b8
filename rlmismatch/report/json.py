"""The report as JSON; docs/report-schema.md says what each key means."""

from __future__ import annotations

import json
from typing import Any

from rlmismatch.report.model import Report


def render(report: Report) -> str:
    """The whole report, indented by two, with no infinity or NaN tokens."""
    return dump(report.to_json())


def dump(data: dict[str, Any]) -> str:
    """JSON data in the form of every file and output of this program."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
