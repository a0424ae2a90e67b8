"""Score sets by name, and the drift between any two of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from rlmismatch.arms import NATIVE, ORACLE, repeat_id
from rlmismatch.attribution import ArmDrift
from rlmismatch.drift import AlignedScores, Drift, align, summarise
from rlmismatch.engines.protocol import ArmResult, SideName
from rlmismatch.errors import InconclusiveError
from rlmismatch.evidence import Evidence

Scores = dict[str, torch.Tensor]
# The pairs of DESIGN: the name, and (side, path) of both.
RATIOS: Final[tuple[tuple[str, tuple[SideName, str], tuple[SideName, str]], ...]] = (
    ("trainer/prefill", ("trainer", "forward"), ("rollout", "prefill")),
    ("prefill/chunked", ("rollout", "prefill"), ("rollout", "chunked")),
    ("prefill/paged", ("rollout", "prefill"), ("rollout", "paged")),
    ("prefill/decode", ("rollout", "prefill"), ("rollout", "decode")),
    ("decode/recorded", ("rollout", "decode"), ("rollout", "recorded")),
)


@dataclass(frozen=True, eq=False)
class ScoreBook:
    """All scores of a run. A set that was not taken is None; a name that cannot exist is an error."""

    evidence: Evidence
    _drifts: dict[tuple[str, str], Drift | None] = field(default_factory=dict)

    @functools.cached_property
    def arms(self) -> dict[SideName, dict[str, ArmResult]]:
        sides: tuple[SideName, ...] = ("trainer", "rollout", "oracle")
        return {side: self.evidence.arms(side) for side in sides}

    def get(self, side: SideName, arm: str, path: str) -> Scores | None:
        """The scores of one path of one arm, or None when they were not taken."""
        if path == "recorded":
            recorded = {s.id: s.recorded_logprobs for s in self.evidence.sequences}
            if any(r is None for r in recorded.values()):
                return None
            return {i: torch.tensor(r, dtype=torch.float64) for i, r in recorded.items() if r is not None}
        result = self.arms[side].get(arm)
        return result.scores.get(path) if result else None

    def aligned(self, a: Scores | None, b: Scores | None, names: tuple[str, str] = ("first", "second")) -> AlignedScores | None:
        """Two score sets token by token, or None when one was not taken. `names` stand in the reasons why they do not line up."""
        return None if a is None or b is None else align(a, b, self.evidence.sequences, names=names)

    def drift(self, ratio: str, arm: str = NATIVE) -> Drift | None:
        """The drift of a named ratio under one arm, or None when a side did not take it. Cached: attribution asks often."""
        if (ratio, arm) not in self._drifts:
            aligned = self.ratio(ratio, arm)
            self._drifts[ratio, arm] = None if aligned is None else self.summary(aligned)
        return self._drifts[ratio, arm]

    def pinned(self, ratio: str, pins: frozenset[str]) -> Drift | None:
        """The drift of a named ratio with exactly `pins` in force among the players, or None when no arm took it.

        A pin that is no player (a structural zero here, or held by a knob) does not tell arms apart.
        """
        players = frozenset(self.evidence.players())
        for name in self.pin_arms():
            if self.arms["trainer"][name].arm.pins & players == pins & players:
                drift = self.drift(ratio, name)
                if drift is not None:
                    return drift
        return None

    def pin_arms(self) -> list[str]:
        """Ids of the arms that differ by pins alone: not the repeats, and not the probes."""
        return [name for name in self.arms["trainer"] if name == NATIVE or name.startswith("pins=")]

    def ratio(self, ratio: str, arm: str = NATIVE) -> AlignedScores | None:
        _, (side_a, path_a), (side_b, path_b) = next(r for r in RATIOS if r[0] == ratio)
        names = (f"the {side_a}'s {path_a}", f"the {side_b}'s {path_b}")
        return self.aligned(self.get(side_a, arm, path_a), self.get(side_b, arm, path_b), names)

    def summary(self, aligned: AlignedScores) -> Drift:
        return summarise(aligned, seed=self.evidence.settings.seed)

    def drift_table(self) -> dict[frozenset[str], ArmDrift]:
        """Which players were pinned -> trainer/prefill drift, over the arms that both engines finished."""
        players = frozenset(self.evidence.players())
        table: dict[frozenset[str], ArmDrift] = {}
        for name in self.pin_arms():
            aligned = self.ratio("trainer/prefill", name)
            if aligned is None:
                continue
            if aligned.invalid:
                raise InconclusiveError("drift-invalid", f"arm {name}: {aligned.invalid[0].text}")
            cuts = np.cumsum(np.bincount(aligned.sequence_N, minlength=len(aligned.sequences)))[:-1]
            table[self.arms["trainer"][name].arm.pins & players] = ArmDrift.of(np.split(aligned.delta_N, cuts))
        return table

    def floor(self) -> float:
        """Mean |delta|, nats, that both sides' own repeats show together; 0 where both repeat bit for bit."""
        total = 0.0
        pairs: tuple[tuple[SideName, str], ...] = (("trainer", "forward"), ("rollout", "prefill"))
        for side, path in pairs:
            repeats = (
                self.aligned(self.get(side, NATIVE, path), self.get(side, repeat_id(n), path))
                for n in range(1, self.evidence.settings.repeat)
            )
            means = [self.summary(a).mean_abs for a in repeats if a is not None]
            total += max((m for m in means if m is not None), default=0.0)
        return total

    def oracle(self, path: str) -> Scores | None:
        return self.get("oracle", ORACLE, path)
