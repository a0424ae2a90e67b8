"""The golden reports: one JSON file a case in fixtures/golden, and beside it the exact text of what each renderer makes of it.

Rewrite them after a change that is meant: ``python -m tests.report.golden``, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from rlmismatch import report
from rlmismatch.report import Report

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "golden"
CASES = tuple(sorted(p.stem for p in GOLDEN.glob("*.json") if not p.stem.startswith("compare")))
SUFFIXES = {"console": "console.txt", "text": "txt", "json": "json", "markdown": "md", "html": "html", "junit": "xml"}
WIDTH = 100


def load(case: str) -> Report:
    return Report.loads((GOLDEN / f"{case}.json").read_text(encoding="utf-8"), where=case)


def expected() -> dict[str, str]:
    """File name -> text that must stand in it."""
    out = {f"{case}.{SUFFIXES[form]}": report.render(load(case), form, width=WIDTH) for case in CASES for form in report.FORMATS}
    out |= {f"{case}.verbose.console.txt": report.render(load(case), verbose=True, width=WIDTH) for case in CASES}
    change = report.compare(load("contract"), load("ok"))
    out |= {
        f"compare.{SUFFIXES[form]}": report.render_comparison(change, form, width=WIDTH) for form in ("console", "text", "json", "markdown")
    }
    return out


if __name__ == "__main__":
    for name, text in expected().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
