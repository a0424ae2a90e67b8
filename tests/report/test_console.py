"""Colour only where it is wanted, and never another text for it."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import sys

import pytest

from rlmismatch import report
from rlmismatch.drift.model import BudgetLine
from rlmismatch.report import console
from rlmismatch.report.blocks import Cell, Column, Table, clip, fit, parts
from rlmismatch.report.model import MeasureRow
from rlmismatch.report.sections import page
from tests.report.golden import load

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch, **environment):
    """In the test itself: pytest puts its own stdout back between a fixture and the test."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())


def test_colour_changes_no_character():
    content = page(load("contract"))
    coloured = console.render(content, width=100, colour=True)
    assert ANSI.search(coloured)
    plain = "\n".join(line.rstrip() for line in ANSI.sub("", coloured).splitlines()) + "\n"
    assert plain == console.render(content, width=100, colour=False)


def test_a_file_gets_no_colour(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not ANSI.search(report.render(load("ok")))


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_gets_colour_unless_no_color_or_dumb(monkeypatch, environment, coloured):
    on_a_terminal(monkeypatch, **environment)
    assert bool(ANSI.search(report.render(load("ok")))) == coloured


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 100)])
def test_a_narrow_terminal_sets_the_width_and_a_wide_one_stops_at_100(monkeypatch, columns, width):
    on_a_terminal(monkeypatch, COLUMNS=columns)
    assert max(len(line) for line in ANSI.sub("", report.render(load("ok"))).splitlines()) == width


def test_text_from_a_prompt_can_not_move_the_cursor_or_style():
    full = load("contract")
    row = full.ratios[0]
    evil = dataclasses.replace(row.drift.worst[0], text="\x1b[2J[red]x", context_text="a\nb\u202e|", sequence="i\n\x1b[2Jd")
    outlier = dataclasses.replace(row.drift.per_sequence[0], sequence="o\n\x1b[2Jd", outlier=True)
    drift = dataclasses.replace(row.drift, worst=(evil,), per_sequence=(outlier,))
    changed = dataclasses.replace(full, ratios=(dataclasses.replace(row, drift=drift),))
    text = console.render(page(changed, verbose=True), width=100, colour=False)
    for form in ("console", "text", "markdown", "html"):
        shown = report.render(changed, form, verbose=True)
        assert "\x1b" not in shown
        assert r"i\n" in shown.replace("\\\\", "\\")
    assert "o\\n\\x1b[2Jd" in text
    assert "a\\nb\\u202e|[\\x1b[2J[red]x]" in text
    assert r"a\\nb\\u202e\|\[\\x1b\[2J\[red\]x\]" in report.render(changed, "markdown")


def test_bar_is_twelve_wide_and_in_eighths():
    assert console.bar(0.0) == " " * 12
    assert console.bar(1.0) == "█" * 12
    assert console.bar(0.5) == "█" * 6 + " " * 6
    assert console.bar(1 / 96) == "▏" + " " * 11


def test_fit_cuts_only_flexible_columns_the_widest_first():
    table = Table(
        columns=(Column(header="a"), Column(header="b", flexible=True), Column(header="c", flexible=True)),
        rows=((Cell(text="x" * 20), Cell(text="y" * 30), Cell(text="z" * 12)),),
    )
    row = fit(table, 50).rows[0]
    assert [len(c.text) for c in row] == [20, 14, 12]
    assert row[1].text.endswith("…")
    assert [len(c.text) for c in fit(table, 10).rows[0]] == [20, 8, 8]


def _words(content):
    """Every header and cell of a column that may not be cut."""
    tables = [block for section in content.sections for block in section.blocks if isinstance(block, Table)]
    for table in tables:
        for i, column in enumerate(table.columns):
            if not column.flexible:
                yield from filter(None, (column.header, column.unit, *(row[i].text.strip() for row in table.rows)))


@pytest.mark.parametrize("form", ["console", "text"])
@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
@pytest.mark.parametrize("name", ["ok", "contract", "inconclusive"])
def test_no_width_cuts_a_number_or_a_header(name, width, form):
    run = load(name)
    shown = report.render(run, form, width=width, verbose=True)
    assert [word for word in _words(page(run, verbose=True)) if word not in shown] == []
    if width >= 60 and form == "console":
        assert max(map(len, shown.splitlines())) <= width


def test_columns_that_do_not_fit_stand_below_beside_the_name_of_their_row():
    columns = (Column(header="name"), *(Column(header=f"number {i}", right=True) for i in range(3)))
    table = Table(columns=columns, rows=((Cell(text="row"), Cell(text="1.25e-12"), Cell(text="2"), Cell(text="3")),))
    assert [[c.header for c in part.columns] for part in parts(table, 26)] == [["name", "number 0", "number 1"], ["name", "number 2"]]
    assert [[c.text for c in part.rows[0]] for part in parts(table, 26)] == [["row", "1.25e-12", "2"], ["row", "3"]]
    assert len(parts(table, 34)) == 1


def test_clip_counts_terminal_cells():
    assert clip("abcdef", 4) == "abc…"
    assert clip("日本語", 4) == "日…"
    assert clip("日本", 4) == "日本"


def test_measures_that_are_not_shown_are_announced():
    row = MeasureRow(axis="gemm.kernel", side="trainer", what="an error", value=0.5)
    unmeasured = dataclasses.replace(row, value=None, limit=1.0)  # no limit that was held
    run = dataclasses.replace(load("ok"), measures=(row, row, unmeasured))
    quiet = console.render(page(run, verbose=False))
    assert re.search(r"Measures +none has a limit", quiet)
    assert "--verbose shows 3 rows, each with its note" in quiet
    assert "--verbose shows" not in console.render(page(run, verbose=True))


def test_no_limit_is_offered_that_budget_refuses():
    line = BudgetLine(limit="token_mult_prob_error", sense="at most", allowed=1.05, value=math.inf, status="over")
    for least, offered in ((math.inf, False), (1.25, True)):
        run = dataclasses.replace(load("ok"), budget=(dataclasses.replace(line, smallest_limit_that_passes=least),))
        assert ("token_mult_prob_error=" in console.render(page(run), width=100)) == offered
