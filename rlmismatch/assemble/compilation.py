"""What compilation or graph capture moves in the rollout: that mode against an eager start of the same engine, on the same tokens."""

from __future__ import annotations

from rlmismatch.arms import ALL, COMPILE, EAGER, NATIVE, ROLLOUT_PATHS, arm_id, compiled
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.evidence import Evidence
from rlmismatch.pins.spec import PINS
from rlmismatch.report.model import MeasureRow


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """One row a path; none of a rollout that runs eagerly anyway."""
    if EAGER not in book.arms["rollout"]:
        return ()
    mode = evidence.settings.knobs_of("rollout")[COMPILE]
    return tuple(_row(book, mode, path) for path in ROLLOUT_PATHS)


def _row(book: ScoreBook, mode: str, path: str) -> MeasureRow:
    what = f"rollout {path}: {mode} against eager, mean |d|"
    aligned = book.aligned(book.get("rollout", NATIVE, path), book.get("rollout", EAGER, path))
    if aligned is None or aligned.invalid:
        return MeasureRow(axis=COMPILE, what=what, value=None, note=aligned.invalid[0].text if aligned else "not run")
    drift = book.summary(aligned)
    return MeasureRow(
        axis=COMPILE, what=what, value=drift.mean_abs, note=f"{drift.unequal} of {drift.tokens} tokens differ, largest {drift.max:.3g} nats"
    )


def inert_pins(evidence: Evidence, book: ScoreBook) -> tuple[str, ...]:
    """Pins that the rollout's compiled code left uncalled on some path, of those that an eager rollout calls; none of an eager one."""
    result = book.arms["rollout"].get(arm_id(ALL, evidence.base_pins))
    if result is None or not compiled(evidence.settings):
        return ()
    live = {*evidence.players(), *evidence.base_pins}
    if evidence.settings.rollout_tp == 1:
        live.discard("forward_reduce")  # one rank has no sum to pin
    return tuple(pin for pin in PINS if pin in live and not result.calls.get(pin))
