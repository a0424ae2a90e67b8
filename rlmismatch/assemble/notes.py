"""What a report says in words: what was waived, declared, and noted by either side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmismatch import axes
from rlmismatch.assemble import gradients, head
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.contract import Evidence as Known
from rlmismatch.contract import Outcome, Reading, same_value
from rlmismatch.engines.gemm_facts import NOT_FLIPPED
from rlmismatch.engines.protocol import NOT_PACKED
from rlmismatch.evidence import Evidence
from rlmismatch.report.numbers import value
from rlmismatch.settings import parse_declarations


def waivers(evidence: Evidence) -> Iterator[str]:
    """Every field that was waived, and every waiver that had nothing to waive: the next reader must see what was accepted."""
    waived = {c.key: c for c in evidence.comparisons if c.outcome is Outcome.WAIVED}
    outcomes = {c.key: c.outcome.value for c in evidence.comparisons}
    yield from (f"waived: {c.key} (trainer {c.trainer.value}, rollout {c.rollout.value})" for c in waived.values())
    for key in dict.fromkeys(evidence.settings.waive):
        if key not in waived and axes.implied_waivers({key}, {}, {}).isdisjoint(waived):
            yield f"a waiver had nothing to act on: {key} ({outcomes.get(key, 'not compared')})"


def declarations(evidence: Evidence) -> Iterator[str]:
    """Every reading that is only declared, and every declaration that filled no reading and contradicts none."""
    asked = parse_declarations(evidence.settings.declare)
    readings = {(side, c.key): r for c in evidence.comparisons for side, r in (("trainer", c.trainer), ("rollout", c.rollout))}
    for (side, key), reading in readings.items():
        if reading.evidence is Known.DECLARED:
            whose = "" if key in asked[side] else ", by this run's other options"
            yield f"declared: {side}.{key} = {value(reading.value)}{whose}"
    for text in dict.fromkeys(evidence.settings.declare):
        fields = [(side, key, said) for side, by_key in parse_declarations([text]).items() for key, said in by_key.items()]
        one = [(readings.get((side, key), Reading()), said) for side, key, said in fields]
        if not any(reading.evidence is Known.DECLARED or _contradicts(reading, said) for reading, said in one):
            found = dict.fromkeys(f"{reading.evidence.value.replace('_', ' ')}{_as(reading)}" for reading, _ in one)
            yield f"a declaration had nothing to act on: {value(text)} ({', '.join(found)})"


def _contradicts(reading: Reading, said: Any) -> bool:
    return reading.evidence in (Known.READ, Known.DOCUMENTED) and not same_value(reading.value, said)


def _as(reading: Reading) -> str:
    return f" as {value(reading.value)}" if reading.evidence in (Known.READ, Known.DOCUMENTED) else ""


def notes(evidence: Evidence, book: ScoreBook) -> tuple[str, ...]:
    said_here = [*evidence.run.get("notes", []), *waivers(evidence), *declarations(evidence)]
    for side in ("trainer", "rollout"):
        said = (gradients.REFUSED, gradients.CONSISTS, NOT_FLIPPED, NOT_PACKED)  # by the table of the gradients, and by the measures
        seen = {note for result in book.arms[side].values() for note in result.notes if not note.startswith(said)}
        said_here += [f"{side}: {note}" for note in sorted(seen)]
    return tuple(filter(None, (*said_here, head.note(evidence))))
