"""The report as JUnit XML: one test case for the verdict and for each gate, axis, limit, closure pair and control."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlmismatch.contract import FieldComparison
from rlmismatch.drift.model import BudgetLine
from rlmismatch.exitcodes import ExitCode
from rlmismatch.report.model import AxisRow, Report
from rlmismatch.report.numbers import number, of, printable
from rlmismatch.report.sections import page, reading_text


@dataclass(frozen=True, kw_only=True)
class _Case:
    name: str
    outcome: Literal["pass", "failure", "error", "skipped"]
    text: str = ""


def render(report: Report) -> str:
    """JUnit XML. A verdict without numbers (exit 5 to 7) is an error, any other that is not OK a failure; what did not run is skipped."""
    suites = (
        ("verdict", _verdict(report)),
        ("gates", _gates(report)),
        ("axes", _axes(report)),
        ("budget", _budget(report)),
        ("closure", _closure(report)),
        ("controls", _controls(report)),
    )
    root = ET.Element("testsuites", name="rlmismatch")
    for name, cases in suites:
        _add_suite(root, name, list(cases), report)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_suite(root: ET.Element, name: str, cases: list[_Case], report: Report) -> None:
    if not cases:
        return
    suite = ET.SubElement(root, "testsuite", name=name, tests=str(len(cases)), timestamp=report.header.date)
    for attribute, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(c.outcome == outcome for c in cases)))
    if name == "verdict":
        properties = ET.SubElement(suite, "properties")
        h = report.header
        facts = {"command": h.command, "checkpoint": h.checkpoint, "run_id": h.run_id, "exit_code": str(report.verdict.exit_code)}
        for key, fact in facts.items():
            ET.SubElement(properties, "property", name=key, value=printable(fact))
        for line in page(report).banner:
            ET.SubElement(properties, "property", name="plant", value=printable(line))
    for case in cases:
        element = ET.SubElement(suite, "testcase", classname=f"rlmismatch.{name}", name=case.name)
        if case.outcome != "pass":
            ET.SubElement(element, case.outcome, message=printable(case.text))


def _verdict(report: Report) -> Iterable[_Case]:
    v = report.verdict
    text = "; ".join([f"{v.word} (exit {v.exit_code})", *(f"{r.axis}: {r.text}" if r.axis else r.text for r in v.reasons)])
    yield _Case(name="verdict", outcome="pass" if v.exit_code == 0 else "error" if v.exit_code in (5, 6, 7) else "failure", text=text)


def _gates(report: Report) -> Iterable[_Case]:
    for g in report.gates:
        text = ", ".join(g.differing) or g.note or "nothing was compared"
        yield _Case(name=g.name, outcome="pass" if g.ok else "failure" if g.equal is False else "error", text=text)


def _axes(report: Report) -> Iterable[_Case]:
    failing: dict[str, list[FieldComparison]] = {}
    for c in report.contract:
        if c.fails is not None:
            failing.setdefault(c.axis, []).append(c)
    rows = {a.axis: a for a in report.axes}
    for axis in dict.fromkeys((*rows, *(c.axis for c in report.contract))):
        if axis in failing:
            text = "; ".join(f"{c.field} {c.outcome.value}: {reading_text(c.trainer)} / {reading_text(c.rollout)}" for c in failing[axis])
            yield _Case(name=axis, outcome="failure", text=text)
        else:
            yield _axis(axis, rows.get(axis))


def _axis(axis: str, row: AxisRow | None) -> _Case:
    if row is not None and row.status in ("differs", "unknown"):
        return _Case(name=axis, outcome="failure", text=row.why or row.status)
    if row is not None and row.status in ("not run", "not built", "structural zero"):
        return _Case(name=axis, outcome="skipped", text=": ".join(filter(None, (row.status, row.why))))
    return _Case(name=axis, outcome="pass")


def _budget(report: Report) -> Iterable[_Case]:
    for line in report.budget:
        text = (
            f"{number(line.value, digits=5)}, allowed {line.sense} {number(line.allowed, digits=5)}" if line.value is not None else line.why
        )
        outcome: Literal["pass", "failure", "skipped"] = "failure" if not line.ok else "pass" if line.status == "within" else "skipped"
        if line.status == "over" and _only_reported(line, report):
            outcome, text = "skipped", f"{text}; --fail-on has it reported only"
        yield _Case(name=line.limit, outcome=outcome, text=text)


def _only_reported(line: BudgetLine, report: Report) -> bool:
    """Whether a limit that does not hold fails nothing: drift that fails comes before all that ends in another code than 3 or 4."""
    return line.value is not None and math.isfinite(line.value) and report.verdict.exit_code not in (ExitCode.DRIFT, ExitCode.CONTRACT)


def _closure(report: Report) -> Iterable[_Case]:
    for c in report.closure:
        text = c.why if c.unequal is None else f"{of(c.unequal, c.tokens)} tokens unequal, max {number(c.max)} nats"
        yield _Case(name=c.name, outcome="pass" if c.ok else "skipped" if c.unequal is None else "failure", text=text)


def _controls(report: Report) -> Iterable[_Case]:
    for c in report.controls:
        yield _Case(name=c.name, outcome="pass" if c.ok else "failure", text=f"expected {c.expected}, got {c.got}")
