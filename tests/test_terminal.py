"""Progress where no one watches a bar: lines in a log, none of them long after the one before."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from rlmismatch.commands import terminal


def test_a_log_is_told_how_far_the_arms_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with terminal.TerminalProgress(log) as progress:
        progress.step("starting engines")
        clock.now = 30.0
        progress.arms("measuring", 4)
        for now, side, arm in (
            (33.0, "rollout", "native"),
            (41.0, "trainer", "native"),
            (45.0, "rollout", "pinned"),
            (90.5, "trainer", "pinned"),
        ):
            clock.now = now
            progress.arm_done(side, arm)
        clock.now = 91.0
        progress.arms("attributing", 1)
        progress.arm_done("trainer", "all")
        progress.step("starting the rollout once more")
        clock.now = 120.0
        progress.arm_done("rollout", "eager")  # of no known number
    assert log.getvalue().splitlines() == [
        "[   0.0 s] starting engines",
        "[  30.0 s] measuring: 4 arms",
        "[  41.0 s] 2 of 4 arms, the last one trainer native",
        "[  90.5 s] 4 of 4 arms, the last one trainer pinned",
        "[  91.0 s] attributing: 1 arm",
        "[  91.0 s] starting the rollout once more",
    ]
