"""The JSON form: exact round trip, strict keys and types, and a document that says what each key means."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from rlmismatch.contract import FieldComparison, Outcome, Tier, read, unknown
from rlmismatch.drift import Drift
from rlmismatch.errors import UsageError
from rlmismatch.report import Report, codec
from rlmismatch.report.model import SCHEMA_VERSION, ClosureRow, Gate, Header, RatioRow
from rlmismatch.verdict.model import Verdict
from tests.report.golden import CASES, load

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "report-schema.md").read_text(encoding="utf-8")
SMALL = Report(header=Header(command="c", run_id="r", date="d", checkpoint="k"), verdict=Verdict(word="OK", exit_code=0))


def through_json(report: Report) -> Report:
    return Report.loads(json.dumps(report.to_json(), allow_nan=False))


@pytest.mark.parametrize("case", CASES)
def test_round_trip_of_the_golden_reports(case):
    report = load(case)
    assert through_json(report) == report


def test_round_trip_keeps_types_floats_and_infinities():
    comparison = FieldComparison(
        axis="model.norm",
        field="eps",
        tier=Tier.IDENTICAL,
        trainer=read(0.1 + 0.2, "x"),
        rollout=unknown("y"),
        outcome=Outcome.UNKNOWN,
        fails=Tier.IDENTICAL,
    )
    drift = Drift(tokens=1, sequences=1, max=math.inf, signed_mean=-math.inf, k1=5e-324, mean_abs=2.0)
    report = dataclasses.replace(
        SMALL, contract=(comparison,), ratios=(RatioRow(name="a/b", drift=drift),), provenance={"host": {"n": [1, None]}}
    )
    back = through_json(report)
    assert back == report
    assert isinstance(back.ratios[0].drift.mean_abs, float)
    assert back.contract[0].tier is Tier.IDENTICAL


def test_a_nan_survives_as_a_nan():
    report = dataclasses.replace(SMALL, ratios=(RatioRow(name="a/b", drift=Drift(tokens=1, sequences=1, max=math.nan)),))
    assert math.isnan(through_json(report).ratios[0].drift.max)


def test_none_is_null_and_zero_is_zero():
    data = dataclasses.replace(SMALL, ratios=(RatioRow(name="a/b", drift=Drift(tokens=1, sequences=1, max=0.0)),)).to_json()
    assert (data["ratios"][0]["drift"]["max"], data["ratios"][0]["drift"]["mean_abs"]) == (0.0, None)


@pytest.mark.parametrize(
    ("change", "slug", "words"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, "report-schema-version", "schema version 2"),
        ({"schema_version": None}, "report-schema-version", "schema version None"),
        ({"surplus": 1}, "report-malformed", "unknown keys ['surplus']"),
        ({"verdict": {"word": "OK"}}, "report-malformed", "report.verdict: missing keys ['exit_code']"),
        ({"verdict": {"word": "OK", "exit_code": "0"}}, "report-malformed", "report.verdict.exit_code: expected int, got '0'"),
        ({"verdict": {"word": "OK", "exit_code": True}}, "report-malformed", "expected int, got True"),
        ({"gates": {}}, "report-malformed", "report.gates: expected a list"),
        ({"gates": [{"name": "weights", "equal": "yes"}]}, "report-malformed", "report.gates[0].equal: expected bool, got 'yes'"),
        ({"contract": [{"tier": "maybe"}]}, "report-malformed", "missing keys"),
        ({"provenance": {"host": 1}}, "report-malformed", "report.provenance.host: expected an object"),
        (
            {"ratios": [{"name": "a/b", "drift": {"tokens": 1, "sequences": 1, "max": "big"}}]},
            "report-malformed",
            "drift.max: expected a number",
        ),
        ({"attribution": {"players": [{"pin": "p", "axis": "a", "role": "main"}]}}, "report-malformed", "expected one of ['fix set'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change, slug, words):
    with pytest.raises(UsageError) as error:
        Report.from_json({**SMALL.to_json(), **change}, where="report.json")
    assert (error.value.slug, error.value.where) == (slug, "report.json")
    assert words in error.value.what


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(UsageError):
        Report.loads(text)


def test_a_gate_or_pair_that_compared_nothing_does_not_hold():
    assert Gate(name="weights", equal=True, compared=3).ok
    assert not Gate(name="weights", equal=True, compared=0).ok
    assert not Gate(name="weights", equal=None, compared=3).ok
    assert ClosureRow(name="p", tokens=3, unequal=0).ok
    assert not ClosureRow(name="p", tokens=0, unequal=0).ok
    assert not ClosureRow(name="p", tokens=3, unequal=None).ok


def test_the_document_says_every_key_with_its_type_and_no_other():
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", DOCUMENT, re.S | re.M))
    documented = {
        name: {key: kind for key, kind, meaning in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", body, re.M) if meaning.strip()}
        for name, body in sections.items()
    }
    assert documented == codec.schema(Report)
    assert f"`schema_version` is {SCHEMA_VERSION}." in DOCUMENT
