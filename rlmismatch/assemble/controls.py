"""Checks of the measurement itself: both sides repeat themselves, native bits return, pins ran, nothing was left out, the closure holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlmismatch.arms import BOUNDARY, LOCAL, NATIVE, RETURN, compiled, repeat_id
from rlmismatch.assemble.compilation import inert_pins
from rlmismatch.assemble.rows import SIDES
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.drift import bit_equal
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.pins.spec import boundary_names
from rlmismatch.report.model import ClosureRow, ControlRow, FloorRow


def controls(evidence: Evidence, book: ScoreBook, floor: Sequence[FloorRow], closed: Sequence[ClosureRow]) -> tuple[ControlRow, ...]:
    """Checks of the measurement itself; one that did not hold makes a clean verdict impossible."""
    rows = [_floor_control(row, book) for row in floor]
    rows += [_return_control(side, book) for side in SIDES]
    rows += [_pins_control(side, evidence, book) for side in SIDES]
    if not inert_pins(evidence, book):
        rows += _captured_controls(evidence, book)
    if not evidence.broken and not inert_pins(evidence, book):
        for row in closed:
            got = row.why or f"{row.unequal} of {row.tokens} differ"
            rows.append(ControlRow(name=f"closure: {row.name}", expected="all pinned: bit-equal", got=got, ok=row.ok))
    return tuple(rows)


def _captured_controls(evidence: Evidence, book: ScoreBook) -> list[ControlRow]:
    """That no operation was left out on either side: one that was never seen has no error, and would pass for exact."""
    rows = []
    if any(BOUNDARY in book.arms[side] for side in SIDES):  # an arm that one side alone has is an arm that the other left out
        found = {side: set(arm.boundaries) if (arm := book.arms[side].get(BOUNDARY)) else set() for side in SIDES}
        every = [n for n in boundary_names(evidence.run["checkpoint"]["num_layers"]) if any(n in found[side] for side in SIDES)]
        lacking = [f"the {side} lacks {n}" for n in every for side in SIDES if n not in found[side]]
        got = f"{len(lacking)} missing, first {lacking[0]}" if lacking else f"{len(every)} captured"
        rows.append(ControlRow(name="every op's output on both sides", expected="none missing", got=got, ok=bool(every) and not lacking))
    if any(LOCAL in book.arms[side] for side in SIDES):
        seen = {side: {(e.pin, e.boundary) for e in arm.local} if (arm := book.arms[side].get(LOCAL)) else set() for side in SIDES}
        for side in SIDES:
            ranks = evidence.settings.trainer_tp if side == "trainer" else evidence.settings.rollout_tp
            pins = [p for p in evidence.players() if p != "forward_reduce" or ranks > 1]
            missing = [p for p in pins if p not in {pin for pin, _ in seen[side]}]
            others = {x for x in seen["rollout" if side == "trainer" else "trainer"] if x[0] in pins} - seen[side]
            missing += [boundary for pin, boundary in sorted(others) if pin not in missing]
            got = f"{len(missing)} never seen, first {missing[0]}" if missing else f"{len(seen[side])} compared"
            rows.append(ControlRow(name=f"{side}: every op on its own inputs", expected="none missing", got=got, ok=not missing))
    return rows


_FLOOR_SHARE: Final = 0.1  # a floor above a tenth of the drift leaves nothing to blame an axis for


def _floor_control(row: FloorRow, book: ScoreBook) -> ControlRow:
    name = f"{row.side} {row.path} repeats itself"
    if row.drift is None or row.drift.mean_abs is None:
        return ControlRow(name=name, expected="bit-equal", got=row.why or "not measured", ok=False)
    headline = book.drift("trainer/prefill")
    limit = _FLOOR_SHARE * headline.mean_abs if headline and headline.mean_abs else 0.0
    got = "bit-equal" if row.drift.unequal == 0 else f"{row.drift.unequal} of {row.drift.tokens} differ, mean {row.drift.mean_abs:.3g} nats"
    expected = "bit-equal" if row.drift.unequal == 0 else f"bit-equal, or below {limit:.3g} nats (a tenth of the drift)"
    return ControlRow(name=name, expected=expected, got=got, ok=row.drift.unequal == 0 or row.drift.mean_abs < limit)


def _return_control(side: SideName, book: ScoreBook) -> ControlRow:
    path = "forward" if side == "trainer" else "prefill"
    aligned = book.aligned(book.get(side, NATIVE, path), book.get(side, RETURN, path))
    name = f"{side}: native bits return when pins are lifted"
    if aligned is None or aligned.invalid:
        return ControlRow(name=name, expected="bit-equal", got=aligned.invalid[0].text if aligned else "not run", ok=False)
    unequal = int(aligned.tokens - bit_equal(aligned).sum())
    # A side that does not repeat itself cannot return to its own bits; its floor says so.
    repeat = book.aligned(book.get(side, NATIVE, path), book.get(side, repeat_id(1), path))
    noisy = repeat is not None and not repeat.invalid and int(repeat.tokens - bit_equal(repeat).sum()) > 0
    got = f"{unequal} of {aligned.tokens} differ" + (" (the side does not repeat itself)" if noisy else "")
    return ControlRow(name=name, expected="bit-equal", got=got, ok=unequal == 0 or noisy)


def _pins_control(side: SideName, evidence: Evidence, book: ScoreBook) -> ControlRow:
    if side == "rollout" and compiled(evidence.settings):
        inert = inert_pins(evidence, book)
        got = f"nothing is claimed of {', '.join(inert)}" if inert else "each ran"
        return ControlRow(name="rollout: pins under compilation", expected="each ran, or is named", got=got, ok=True)
    live = set(evidence.players()) | evidence.base_pins
    config = evidence.side(side)
    if config and config.config.tp == 1:
        live.discard("forward_reduce")  # one rank has no sum to pin
    asked = {(arm, pin) for arm, result in book.arms[side].items() for pin in result.arm.pins if pin in live}
    silent = sorted({pin for arm, pin in asked if not book.arms[side][arm].calls.get(pin)})
    got = f"never ran: {', '.join(silent)}" if silent else f"{len(asked)} pins in {len(book.arms[side])} arms, each ran"
    return ControlRow(name=f"{side}: every pin in force ran", expected="at least one call each", got=got, ok=not silent and bool(asked))
