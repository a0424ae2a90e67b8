"""The log-sum-exps of attention that were exported on captured operands, each against float64: its base, its axes, what a masked row is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from rlmismatch.arms import ATTENTION
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst
from rlmismatch.engines import attention_lse
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

AXIS: Final = "attention.lse"
OURS: Final = 2.0**-16  # nats: float32 sums of the exponentials of at most 512 scores
_SOURCES: Final[Mapping[str, str]] = {
    "native": "the engine's own kernel",
    "pin": "our kernel",
    "sdpa": "torch's fused kernel",
}
_NONE: Final[Mapping[SideName, str]] = {
    "trainer": "not applicable: the engine's own attention exports none, and at CP1 nothing merges partial outputs",
    "rollout": "not applicable: the kernel that ran exports none, and at CP1 nothing merges partial outputs",
}


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Every exported LSE of every side; none without the arm ``attention``, nor where ranks share the sequence."""
    sides: tuple[SideName, ...] = ("trainer", "rollout")
    measured = [side for side in sides if ATTENTION in book.arms[side] and (side == "rollout" or evidence.settings.cp == 1)]
    return tuple(row for side in measured for row in of_side(side, book.arms[side][ATTENTION].boundaries))


def of_side(side: SideName, tensors: Mapping[str, torch.Tensor]) -> Iterator[MeasureRow]:
    """A row a source, over all kept layers. tensors: the arm's, as attention_capture.py and attention_exports.py name them."""
    for source, words in _SOURCES.items():
        found = [
            attention_lse.diagnose(lse_TH.T, _exact(tensors, key.rpartition("/")[2]))
            for key, lse_TH in tensors.items()
            if key.startswith(f"lse/{source}/layers.")
        ]
        if found:
            yield _row(side, source, words, found, tensors.get(f"lse/{source}/masked"))
        elif source == "native":
            yield MeasureRow(axis=AXIS, side=side, what=f"LSE of {words}", value=None, note=_NONE[side])


def _exact(tensors: Mapping[str, torch.Tensor], layer: str) -> torch.Tensor:
    q_THD, k_THD = tensors[f"{layer}.q"], tensors[f"{layer}.k"]
    return attention_lse.exact(q_THD, k_THD, float(q_THD.shape[-1] ** -0.5))


def _row(side: SideName, source: str, words: str, found: list[attention_lse.LseFound], masked: torch.Tensor | None) -> MeasureRow:
    bases, shapes = {f.base for f in found}, {f.shape for f in found}
    fits = None not in bases | shapes and len(bases) == len(shapes) == 1
    slopes = [f.slope for f in found]
    notes = [f"base {bases.pop()}, {shapes.pop()}" if fits else "fits no log-sum-exp of the scores"]
    notes += [f"slope {min(slopes):.6f} to {max(slopes):.6f}"]
    notes += [] if masked is None else [f"a row that sees nothing: {float(masked):g}"]
    return MeasureRow(
        axis=AXIS,
        side=side,
        what=f"LSE of {words}, largest difference from float64",
        value=worst(f.worst_nats for f in found) if fits else math.nan,
        limit=OURS if source == "pin" else None,
        note="; ".join(notes),
    )
