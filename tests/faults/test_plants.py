"""Every built plant on every side, put into the real engines: the right axis is named first, at the right tier, and loudly.

The chain: a clean run of the same set-up exits 0 (tests/e2e); the plant changes one thing; so the verdict is about that thing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from rlmismatch import axes
from rlmismatch.report import Report, render
from tests.cli_runs import MASK, QUICK, ROOT, TINY, Done, run, selected, side_by_side
from tests.faults.matrix import CASES
from tests.faults.matrix import render as controls

BY_ID = {case.key: case for case in CASES}
# Runs with more than one plant, and one whose plant this set-up cannot show.
OTHERS = {
    "three": ("--plant", "eps@trainer", "--plant", "rope_theta@rollout", "--plant", "one_stale_tensor@rollout"),
    "unseen": ("--plant", "pad_rows_nonzero@trainer"),
}


def test_every_built_plant_has_its_case_on_every_side() -> None:
    built = [(axis.id, f"{p.id}@{side}") for axis in axes.ALL for p in axis.plants if p.built for side in p.sides]
    assert {case.id for case in CASES} == {plant for _, plant in built}
    assert len(BY_ID) == len(CASES)
    assert len(CASES) == len(built)


def test_the_document_is_current() -> None:
    assert (ROOT / "docs/controls.md").read_text() == controls(), "run: python -m tests.faults.matrix > docs/controls.md"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> Iterator[Mapping[str, Future[Done]]]:
    """The selected cases, started; each is awaited by its own test."""
    folder = tmp_path_factory.mktemp("plants")
    chosen = selected(request, "case")
    cases = {
        c.key: functools.partial(
            run, "probe", *c.command, out=folder / c.key.replace(" ", "-"), torchrun=c.torchrun, python=None if c.torchrun else preloaded
        )
        for c in CASES
        if c.key in chosen
    }
    for name, plants in OTHERS.items():
        if name in chosen:
            cases[name] = functools.partial(run, "probe", "--ckpt", TINY, *MASK, *QUICK, *plants, out=folder / name, python=preloaded)
    with side_by_side(cases) as started:
        yield started


def loud(done: Done, *plants: str) -> None:
    """The report lists the plants, and its page shows each before anything else."""
    assert [f"{p['id']}@{p['side']}" for p in done.report["plants"]] == list(plants)
    page = render(Report.from_json(done.report), "console")
    verdict = page.index(done.report["verdict"]["word"])
    for plant in plants:
        assert f"PLANT IN FORCE  {plant}" in page[:verdict]


@pytest.mark.engines
@pytest.mark.parametrize("case", BY_ID)
def test_a_plant_is_named_first(case: str, runs: Mapping[str, Future[Done]]) -> None:
    expected = BY_ID[case]
    code = 0 if expected.word == "OK" else 4
    done = runs[case].result().exits(code)
    verdict = done.report["verdict"]
    first = verdict["reasons"][0]
    assert (verdict["word"], verdict["exit_code"], first["axis"], first["tier"]) == (expected.word, code, expected.axis, expected.tier)
    assert expected.says in first["text"]
    assert first["hint"] or not code
    loud(done, expected.id)
    measured = [row["name"] for row in done.report["ratios"] if row["drift"]]
    assert verdict["numbers_void"] is (expected.word == "NOT COMPARABLE")
    assert bool(measured) is not verdict["numbers_void"]


@pytest.mark.engines
@pytest.mark.parametrize("case", ["three"])
def test_three_plants_are_all_named(case: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[case].result().exits(4)
    named = [r["axis"] for r in done.reasons]
    assert named[0] == "model.weights"  # the most causal one
    assert {"model.norm", "attention.rope"} <= set(named)
    loud(done, "eps@trainer", "rope_theta@rollout", "one_stale_tensor@rollout")


@pytest.mark.engines
@pytest.mark.parametrize("case", ["unseen"])
def test_a_plant_that_this_set_up_cannot_show_is_no_pass(case: str, runs: Mapping[str, Future[Done]], tmp_path: Path) -> None:
    done = runs[case].result().exits(5)
    assert done.report["verdict"]["word"] == "INCONCLUSIVE"
    assert done.reasons[0]["text"].startswith("plant pad_rows_nonzero@trainer is in force and was not named")
    loud(done, "pad_rows_nonzero@trainer")
