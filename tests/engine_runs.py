"""How many real engines a test session started. Each process that loads one leaves the line ``side engine rank`` in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ENGINE_LOG = "RLMISMATCH_ENGINE_LOG"  # environment variable that names the file
SIDES = ("trainer", "rollout", "oracle")


@dataclass(frozen=True, kw_only=True)
class EngineRuns:
    """Loads of a side's engine, counted at its rank 0, and the processes that took part in all of them."""

    trainer: int
    rollout: int
    oracle: int
    processes: int

    @property
    def total(self) -> int:
        return self.trainer + self.rollout + self.oracle

    def __str__(self) -> str:
        sides = ", ".join(f"{side} {getattr(self, side)}" for side in SIDES)
        return f"{self.total} real engine runs ({sides}) in {self.processes} processes"


def count(lines: Iterable[str]) -> EngineRuns:
    """Count the lines of an engine log. ValueError for a line that is not ``side engine rank``."""
    runs = dict.fromkeys(SIDES, 0)
    processes = 0
    for line in lines:
        side, _engine, rank = line.split()
        if side not in runs:
            raise ValueError(f"not a side: {line!r}")
        processes += 1
        runs[side] += int(rank) == 0
    return EngineRuns(**runs, processes=processes)
