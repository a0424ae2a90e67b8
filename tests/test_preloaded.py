"""A run whose workers were forked reads, scores and says what a run of fresh processes does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmismatch import capture
from tests.cli_runs import MASK, QUICK, TINY, TP2, Done, gone, run, side_by_side

pytestmark = pytest.mark.engines


def side(done: Done, name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((done.folder / name / "side.json").read_text())
    return data


def test_a_forked_worker_is_a_worker(preloaded: str, tmp_path: Path) -> None:
    options = ("--ckpt", TINY, *MASK, *TP2, *QUICK)
    cases = {
        "forked": lambda: run("logprob", *options, python=preloaded, out=tmp_path / "forked"),
        "fresh": lambda: run("logprob", *options, out=tmp_path / "fresh"),
    }
    with side_by_side(cases) as started:
        forked, fresh = (started[name].result().exits(0) for name in cases)
    gone(forked.folder)
    compared = 0
    for name in ("trainer", "rollout"):
        assert side(forked, name) == side(fresh, name)
        a, b = (capture.read_arms(done.folder, name) for done in (forked, fresh))  # type: ignore[arg-type]
        assert a.keys() == b.keys()
        for arm in a:
            assert a[arm].calls == b[arm].calls
            for path, scores in a[arm].scores.items():
                for sequence, score in scores.items():
                    assert torch.equal(score, b[arm].scores[path][sequence]), (name, arm, path, sequence)
                    compared += score.numel()
    assert compared
    assert forked.report["measures"] == fresh.report["measures"]


@pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS", "1") != "1", reason="threads are asked for: nothing is forked")
def test_workers_are_forked(preloaded: str) -> None:
    assert preloaded != sys.executable
