"""The measures of which backend computes attention: what another one in its place moves, and whether cascade attention is on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

from rlmismatch.arms import FORCED, NATIVE
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.engines import attention_forced
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

_SIDES: Final[tuple[SideName, ...]] = ("trainer", "rollout")


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Rows of provenance and merge_order; none without the arms of ``rlmismatch attention``."""
    return (*_cascade(evidence), *_forced(evidence, book))


def _cascade(evidence: Evidence) -> Iterator[MeasureRow]:
    """Cascade attention splits at a shared prefix and merges: whether the rollout has it on."""
    rollout = evidence.side("rollout")
    said = rollout.provenance.get("cascade_attention") if rollout else None
    if said and evidence.settings.command == "attention":
        yield MeasureRow(axis="attention.merge_order", side="rollout", what="cascade attention", value=None, note=said)


def _forced(evidence: Evidence, book: ScoreBook) -> Iterator[MeasureRow]:
    """What another backend in place of a side's own attention moves in its log-probs; and why a backend was not forced."""
    axis = "attention.provenance"
    for side in _SIDES:
        described, arms = evidence.side(side), book.arms[side]
        known = described.provenance.get("attention_forced", {}) if described else {}
        if not any(name.startswith(FORCED) for name in arms):
            continue
        for backend, version in known.items():
            arm = arms.get(FORCED + backend)
            if arm is None:
                yield MeasureRow(axis=axis, side=side, what=f"{backend} forced", value=None, note=version)
                continue
            outcome = arm.knobs.get(attention_forced.SETTING, {})
            for path, scores in arm.scores.items():
                what = f"{backend} forced, {path}: mean abs difference from the side's own attention"
                aligned = book.aligned(arms[NATIVE].scores[path], scores)
                if outcome.get("status") != "applied" or aligned is None or aligned.invalid:
                    yield MeasureRow(axis=axis, side=side, what=what, value=math.nan, note=f"did not run: {outcome.get('reason', '')}")
                    continue
                delta = abs(aligned.delta_N)
                note = f"{int((delta != 0).sum())} of {aligned.tokens} tokens unequal, largest {delta.max():.3g}"
                note += f"{_between(book, side, path, scores)}; {version}"
                yield MeasureRow(axis=axis, side=side, what=what, value=float(delta.mean()), note=note)


def _between(book: ScoreBook, side: SideName, path: str, scores: dict[str, torch.Tensor]) -> str:
    """What drift between the sides the forced backend leaves, the other side as it is."""
    if path not in ("forward", "prefill"):
        return ""
    other = book.get("rollout", NATIVE, "prefill") if side == "trainer" else book.get("trainer", NATIVE, "forward")
    aligned = book.aligned(scores, other)
    if aligned is None or aligned.invalid:
        return ""
    return f"; trainer/prefill is then {abs(aligned.delta_N).mean():.3g} nats, mean abs"
