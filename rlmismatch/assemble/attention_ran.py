"""Which attention was asked for and which one ran, per layer and phase, from what the sides wrote of their trials."""

from __future__ import annotations

from rlmismatch.contract import Evidence as Known
from rlmismatch.contract import Reading
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import AttentionRanRow

_AXIS = "attention.provenance"


def rows(evidence: Evidence) -> tuple[AttentionRanRow, ...]:
    """Trainer, then rollout; none of a side that has no trial."""
    out: list[AttentionRanRow] = []
    sides: tuple[SideName, ...] = ("trainer", "rollout")
    for name in sides:
        side = evidence.side(name)
        if side is None:
            continue
        fields = side.readings.get(_AXIS, {})
        asked, why = fields.get("requested_backend", Reading()), fields.get("fallback_reason", Reading())
        reason = str(why.value) if why.evidence is Known.READ else ""
        out += [
            AttentionRanRow(side=name, requested=str(asked.value), fallback_reason=reason, **row)
            for row in side.provenance.get("attention_ran", ())
        ]
    return tuple(out)
