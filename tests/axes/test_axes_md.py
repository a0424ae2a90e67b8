"""docs/axes.md is what the table says today."""

from __future__ import annotations

from pathlib import Path

from rlmismatch import axes
from rlmismatch.axes.__main__ import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "axes.md"


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text() == render(), "run: python -m rlmismatch.axes > docs/axes.md"


def test_every_axis_and_plant_stands_in_it() -> None:
    text = render()
    assert [a.id for a in axes.ALL if f"| `{a.id}`" not in text] == []
    assert [p.id for a in axes.ALL for p in a.plants if f"`{p.id}`" not in text] == []


def test_the_rows_have_one_cell_per_column() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) == len(axes.ALL)
    assert {line.replace("\\|", "").count("|") for line in rows} == {10}
