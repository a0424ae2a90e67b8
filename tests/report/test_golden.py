"""Every renderer against its exact text at width 100."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET

import pytest
from rich.cells import cell_len

from rlmismatch import report
from rlmismatch.drift.model import BudgetLine
from rlmismatch.errors import UsageError
from rlmismatch.verdict.model import Verdict
from tests.report.golden import CASES, GOLDEN, SUFFIXES, WIDTH, expected, load

EXPECTED = expected()


def test_the_four_kinds_of_ending_are_there():
    assert [(case, load(case).verdict.exit_code) for case in CASES] == [
        ("contract", 4),
        ("inconclusive", 5),
        ("not_comparable", 4),
        ("ok", 0),
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_exact_text(name):
    assert EXPECTED[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {p.name for p in GOLDEN.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", [n for n in EXPECTED if n.endswith(".txt")])
def test_no_line_is_wider_than_the_page(name):
    for line in EXPECTED[name].splitlines():
        assert cell_len(line) <= WIDTH, line
        assert line == line.rstrip()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["console", "text", "markdown", "html"])
def test_the_verdict_comes_before_everything_but_a_plant(case, form):
    text, verdict = EXPECTED[f"{case}.{SUFFIXES[form]}"], load(case).verdict
    body = text[text.index("<body>") :] if form == "html" else text
    assert body.index(verdict.word) < body.index("Gates")
    assert re.search(rf"{verdict.word}\W.*exit {verdict.exit_code}", body)
    for reason in verdict.reasons:
        assert reason.text.split()[0] in body


@pytest.mark.parametrize("form", ["console", "text", "markdown", "html"])
def test_a_plant_is_loud_and_first(form):
    text = EXPECTED[f"inconclusive.{SUFFIXES[form]}"]
    body = text[text.index("<body>") :] if form == "html" else text
    assert body.index("PLANT IN FORCE") < body.index("INCONCLUSIVE")
    assert "PLANT IN FORCE" not in EXPECTED[f"ok.{SUFFIXES[form]}"]


def test_a_plant_stands_in_json_and_junit_too():
    assert '"id": "one_stale_tensor"' in EXPECTED["inconclusive.json"]
    assert "PLANT IN FORCE" in EXPECTED["inconclusive.xml"]


@pytest.mark.parametrize("form", ["console", "text", "markdown", "html"])
def test_void_numbers_are_not_shown(form):
    assert load("not_comparable").headline.drift.mean_abs is not None
    text = EXPECTED[f"not_comparable.{SUFFIXES[form]}"]
    assert "numbers are void" in text
    assert "mean abs" not in text


@pytest.mark.parametrize("case", CASES)
def test_junit_counts_what_it_holds(case):
    root = ET.fromstring(EXPECTED[f"{case}.xml"])
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.get("tests")) == len(cases) > 0
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(attribute)) == sum(c.find(tag) is not None for c in cases)
    verdict = root.find("testsuite[@name='verdict']/testcase")
    outcome = {0: [], 4: ["failure"], 5: ["error"]}[load(case).verdict.exit_code]
    assert [child.tag for child in verdict] == outcome


@pytest.mark.parametrize(
    ("word", "code", "value", "outcome"),
    [
        ("OK", 0, 0.5, "skipped"),
        ("INCONCLUSIVE", 5, 0.5, "skipped"),  # a limit that fails comes before what makes a run inconclusive
        ("INCONCLUSIVE", 5, math.inf, "failure"),  # no limit was checked
        ("DRIFT", 3, 0.5, "failure"),
        ("CONTRACT", 4, 0.5, "failure"),
    ],
)
def test_a_limit_that_fail_on_only_reports_is_no_failure_in_junit(word, code, value, outcome):
    line = BudgetLine(limit="mean_abs", sense="at most", allowed=0.01, value=value, status="over", smallest_limit_that_passes=value)
    run = dataclasses.replace(load("ok"), budget=(line,), verdict=Verdict(word=word, exit_code=code))
    suite = ET.fromstring(report.render(run, "junit")).find("testsuite[@name='budget']")
    (child,) = suite.find("testcase")
    assert (child.tag, suite.get("failures")) == (outcome, "1" if outcome == "failure" else "0")
    assert "allowed at most 0.01" in child.get("message")


def test_html_is_one_page_without_script_or_link():
    text = EXPECTED["contract.html"]
    assert not re.search(r"<script|<link|src=|href=|url\(", text)


def test_a_comparison_has_an_html_form_too():
    text = report.render_comparison(report.compare(load("contract"), load("ok")), "html")
    assert "CONTRACT → OK" in text
    assert "padded vocabulary rows" in text


def test_an_unknown_format_is_a_usage_error():
    with pytest.raises(UsageError) as error:
        report.render(load("ok"), "yaml")
    assert error.value.slug == "format-unknown"
    with pytest.raises(UsageError) as error:
        report.render_comparison(report.compare(load("ok"), load("ok")), "junit")
    assert error.value.slug == "format-not-for-two-runs"
