"""Engines that are up one after the other give what engines beside each other give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlmismatch import capture
from tests.cli_runs import MASK, TINY, run

pytestmark = pytest.mark.engines


def test_in_turn_gives_the_same_bits(tmp_path: Path) -> None:
    options = ("--ckpt", TINY, *MASK, "--oracle", "off", "--max-new-tokens", "4")
    together = run("probe", *options, "--sides", "together", out=tmp_path / "together").exits(0)
    in_turn = run("probe", *options, "--sides", "in-turn", out=tmp_path / "in-turn").exits(0)
    assert len(list(in_turn.folder.glob("logs/*-start2.log"))) >= 1, "no side was started again"
    assert not list(together.folder.glob("logs/*-start2.log"))
    for side in ("trainer", "rollout"):
        a, b = (capture.read_arms(done.folder, side) for done in (together, in_turn))  # type: ignore[arg-type]
        assert a.keys() == b.keys()
        compared = 0
        for arm in a:
            for path, scores in a[arm].scores.items():
                for sequence, score in scores.items():
                    assert torch.equal(score, b[arm].scores[path][sequence]), (side, arm, path, sequence)
                    compared += score.numel()
        assert compared
