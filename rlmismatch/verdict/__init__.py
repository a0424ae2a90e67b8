"""Facts to verdict to exit code: pure, and the only place where it is decided what a run ended as.

Everything fails closed: nothing compared is not a pass, a gate or a control that did not run did not hold, NaN is within no limit, and a
plant that nobody named is a failed control. Reasons come in a fixed order, the one to act on first.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final, get_args

from rlmismatch import axes
from rlmismatch.axes.base import Axis
from rlmismatch.contract import Evidence, FieldComparison, Outcome, Reading, Tier
from rlmismatch.drift.budget import OF_RECORDED, ORACLE
from rlmismatch.errors import RlmismatchError, UsageError
from rlmismatch.exitcodes import ExitCode
from rlmismatch.verdict.model import (
    DEFAULT_FAIL_ON,
    BrokenPromise,
    Control,
    Defect,
    Facts,
    Gate,
    Kind,
    Knob,
    PlantInForce,
    Reason,
    Signature,
    Verdict,
    Word,
)

__all__ = [
    "DEFAULT_FAIL_ON",
    "ENDS",
    "GATES",
    "BrokenPromise",
    "Control",
    "Defect",
    "Facts",
    "Gate",
    "Kind",
    "Knob",
    "PlantInForce",
    "Reason",
    "Signature",
    "Verdict",
    "Word",
    "judge",
    "parse_fail_on",
]

# What a failing reason of each kind makes of the run, the one that decides first. 4 comes before 3, and 5 to 7 only where there was no
# verdict; among those, what explains the others: an engine that can not run, one that failed, then evidence that is missing.
ENDS: Final[dict[Kind, tuple[Word, ExitCode]]] = {
    "void": ("NOT COMPARABLE", ExitCode.CONTRACT),
    "contract": ("CONTRACT", ExitCode.CONTRACT),
    "defect": ("DEFECT", ExitCode.CONTRACT),
    "warning": ("CONTRACT", ExitCode.CONTRACT),
    "drift": ("DRIFT", ExitCode.DRIFT),
    "environment": ("CANNOT RUN", ExitCode.ENVIRONMENT),
    "engine": ("ENGINE FAILED", ExitCode.ENGINE),
    "inconclusive": ("INCONCLUSIVE", ExitCode.INCONCLUSIVE),
}
GATES: Final = ("model.tokens", "model.weights", "model.mode")
_OPTIONAL: Final[frozenset[Kind]] = frozenset({"drift", "warning"})  # all other kinds fail whatever --fail-on says
_FAILURES: Final[dict[ExitCode, Kind]] = {
    ExitCode.CONTRACT: "contract",
    ExitCode.INCONCLUSIVE: "inconclusive",
    ExitCode.ENGINE: "engine",
    ExitCode.ENVIRONMENT: "environment",
}


def parse_fail_on(text: str) -> frozenset[Kind]:
    """The kinds that fail a run, from ``--fail-on``: a comma list of contract, defect, drift, warning.

    It can add warnings, or leave out drift (which is then only reported). Every other kind fails in any case. Raises UsageError for an
    unknown word.
    """
    words = [w.strip() for w in text.split(",") if w.strip()]
    known = ("contract", "defect", "drift", "warning")
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            raise UsageError(
                "fail-on-unknown",
                f"--fail-on does not know {word!r}",
                hint=f"did you mean {near[0]}?" if near else f"known are: {', '.join(known)}",
            )
    return frozenset(k for k in get_args(Kind) if k not in _OPTIONAL or k in words)


def judge(facts: Facts) -> Verdict:
    """The verdict over all facts, with every reason: those that fail first, and by kind in the order of `ENDS`.

    Within a kind, contract fields stand with the most causal axis first (`axes.CAUSAL_ORDER`) and those that only repeat another failing
    field last; all other reasons keep the order of the facts.
    """
    fails = parse_fail_on(facts.fail_on)
    reasons = [*map(_failure, facts.failures), *_gates(facts), *_fields(facts)]
    void = any(r.kind == "void" for r in reasons)
    if not void:
        reasons += [*_promises(facts), *_drift(facts), *_defects(facts), *_budget(facts), *_controls(facts), *_signatures(facts)]
    reasons += _knobs(facts)
    reasons += _unseen_plants(facts, reasons)
    rank = {kind: i for i, kind in enumerate(ENDS)}
    reasons.sort(key=lambda r: (r.kind not in fails, rank[r.kind]))
    word, code = ENDS[reasons[0].kind] if reasons and reasons[0].kind in fails else ("OK", ExitCode.OK)
    return Verdict(word=word, exit_code=int(code), reasons=tuple(reasons), numbers_void=void)


def _failure(error: RlmismatchError) -> Reason:
    if error.exit_code not in _FAILURES:
        raise ValueError(f"{error.slug}: a usage error ends before there is anything to judge")
    return Reason(kind=_FAILURES[error.exit_code], text=f"{error.where}: {error.what}" if error.where else error.what, hint=error.hint)


def _gates(facts: Facts) -> Iterable[Reason]:
    """A gate that did not hold, or did not run, at the strongest tier of its axis that is concerned."""
    ran = {_gate_axis(g): g for g in facts.gates}
    for axis in GATES:
        gate = ran.get(axis)
        if gate is not None and gate.equal is True and gate.compared > 0:
            continue
        differs = gate is not None and gate.equal is False
        if facts.failures and not differs:
            continue
        failing = [c for c in facts.comparisons if c.axis == axis and c.fails]
        tiers = {c.fails for c in failing} or {f.tier for f in axes.by_id(axis).fields}
        tier = Tier.IDENTICAL if Tier.IDENTICAL in tiers else Tier.SEMANTIC
        yield Reason(
            kind="void" if tier is Tier.IDENTICAL else "contract",
            text=_gate_text(gate, failing),
            axis=axis,
            tier=tier.value,
            hint=axes.by_id(axis).hint if differs else _declare_hint(failing),
        )


def _gate_axis(gate: Gate) -> str:
    return gate.name if "." in gate.name else f"model.{gate.name}"


def _gate_text(gate: Gate | None, failing: Sequence[FieldComparison]) -> str:
    if gate is None:
        return "this gate did not run"
    by_field = {c.field: c for c in failing}
    if gate.differing and not set(gate.differing) <= set(by_field):
        shown = ", ".join(gate.differing[:3])
        more = f" and {len(gate.differing) - 3} more" if len(gate.differing) > 3 else ""
        return f"{len(gate.differing)} of {gate.compared} differ: {shown}{more}"
    if failing:
        return "; ".join(_says(c) for c in failing)
    if gate.equal is None:
        return "could not be established" + (f": {gate.note}" if gate.note else "")
    return "the sides differ" if gate.equal is False else "nothing was compared"


def _fields(facts: Facts) -> Iterable[Reason]:
    """Every contract field that failed, and as warnings those that were waived by name. Gates speak for their own axis."""
    spoken = {r.axis for r in _gates(facts)}
    waived = {c.key for c in facts.comparisons if c.outcome is Outcome.WAIVED}
    fallbacks = axes.unreported_fallbacks(*(_readings(facts.comparisons, side) for side in ("trainer", "rollout")))
    for c in _causal(facts.comparisons):
        axis = axes.by_id(c.axis)
        if c.outcome is Outcome.WAIVED and waived.isdisjoint(axis.mirrors.get(c.field, ())):
            yield Reason(kind="warning", text=f"{_says(c)}; waived by name", axis=c.axis, tier=c.tier.value)
        if c.fails is None or c.axis in spoken or (facts.failures and c.outcome is Outcome.UNKNOWN):
            continue
        fallback = fallbacks.get(c.key) if c.outcome is Outcome.CONTRADICTION else None
        hint = (_switch_hint(axis, c) or axis.hint) if c.outcome is Outcome.DIFFERS or fallback else _declare_hint([c])
        kind: Kind = "void" if c.fails is Tier.IDENTICAL else "contract"
        yield Reason(kind=kind, text=fallback or _says(c), axis=c.axis, tier=c.tier.value, hint=hint)
    if not facts.comparisons and not facts.failures:
        yield Reason(kind="inconclusive", text="no contract field was compared")


def _readings(comparisons: Iterable[FieldComparison], side: str) -> dict[str, dict[str, Reading]]:
    out: dict[str, dict[str, Reading]] = {}
    for c in comparisons:
        out.setdefault(c.axis, {})[c.field] = c.trainer if side == "trainer" else c.rollout
    return out


def _causal(comparisons: Sequence[FieldComparison]) -> list[FieldComparison]:
    """The most causal axis first; a field that only repeats another one that fails too comes after all that do not."""
    failing = {c.key for c in comparisons if c.fails}
    place = {axis: i for i, axis in enumerate(axes.CAUSAL_ORDER)}

    def order(c: FieldComparison) -> tuple[bool, int]:
        return not failing.isdisjoint(axes.by_id(c.axis).mirrors.get(c.field, ())), place[c.axis]

    return sorted(comparisons, key=order)


def _says(c: FieldComparison) -> str:
    sides = {"trainer": c.trainer, "rollout": c.rollout}
    blind = {side: r for side, r in sides.items() if r.evidence is Evidence.UNKNOWN}
    if blind:
        why = next((r.source for r in blind.values() if r.source), "")
        return f"{c.field} is unknown on the {' and the '.join(blind)}" + (f" ({why})" if why else "")
    t, r = (_value(reading) for reading in sides.values())
    if c.outcome is Outcome.CONTRADICTION:
        return f"{c.field} was declared otherwise than the engine says: trainer {t}, rollout {r}"
    if not t or not r:
        return f"{c.field} differs between the trainer and the rollout"
    return f"{c.field} is {t} on the trainer and {r} on the rollout"


_LONGEST_VALUE: Final = 60  # characters; digests and tables say nothing to a reader


def _value(reading: Reading) -> str:
    """A value for a sentence; empty if it is too long for one."""
    if reading.evidence is Evidence.NOT_APPLICABLE:
        return f"not applicable ({reading.source})" if reading.source else "not applicable"
    text = reading.value if isinstance(reading.value, str) else json.dumps(reading.value)
    return text if len(text) <= _LONGEST_VALUE else ""


def _switch_hint(axis: Axis, c: FieldComparison) -> str:
    """The knob that sets a field alike on both sides, where it is a switch that either side has."""
    if set(axis.knobs.get(f"{axis.family}.{c.field}", ())) != {"on", "off"}:
        return ""
    return f"--{c.field.replace('_', '-')} off sets both sides alike; if they are meant to differ, --waive {c.key}"


def _declare_hint(comparisons: Sequence[FieldComparison]) -> str:
    """What to do about fields that are unknown, or declared against what was read."""
    for c in comparisons:
        if c.outcome is Outcome.CONTRADICTION:
            return f"take back the declaration of {c.key}"
        blind = [side for side, r in (("trainer", c.trainer), ("rollout", c.rollout)) if r.evidence is Evidence.UNKNOWN]
        if blind:
            where = f"{blind[0]}." if len(blind) == 1 else ""
            return f"--declare {where}{c.key}=VALUE if you know it, or --waive {c.key}"
    return ""


def _drift(facts: Facts) -> Iterable[Reason]:
    if facts.drift is None:
        if not facts.failures:
            yield Reason(kind="inconclusive", text="the drift was not measured")
        return
    for invalid in facts.drift.invalid:
        yield Reason(kind="inconclusive", text=invalid.text)
    if not facts.drift.invalid and facts.drift.tokens < 1:
        yield Reason(kind="inconclusive", text="no token was compared")


def _budget(facts: Facts) -> Iterable[Reason]:
    """Limits that do not hold. Over the oracle's is a defect: the side is wrong, whatever the other side says."""
    if facts.drift is None or not facts.drift.valid:
        return
    if not facts.budget:
        yield Reason(kind="inconclusive", text="no limit was checked")
    for line in facts.budget:
        # An infinite value is an answer, and over every limit that is a ceiling.
        if line.value is None or not (math.isfinite(line.value) or (line.value > 0 and line.sense == "at most")):
            if line.required:
                why = line.why or f"its value is {line.value}"
                yield Reason(kind="inconclusive", text=f"the limit {line.limit} was not checked: {why}")
        elif not line.ok or not (line.value <= line.allowed if line.sense == "at most" else line.value >= line.allowed):
            oracle = line.limit.startswith(ORACLE)
            if oracle:
                hint = "see the errors against float64, op by op"
            elif line.limit.endswith(OF_RECORDED):
                hint = "the recorded log-probs are not this rollout's: another version, sampler, transform or weights wrote them"
            else:
                hint = "run again with --attribute to see which ops carry it"
            text = f"{line.limit} is {line.value:.4g}, allowed is {line.sense} {line.allowed:.4g}"
            yield Reason(kind="defect" if oracle else "drift", text=text, hint=hint)


def _defects(facts: Facts) -> Iterable[Reason]:
    for defect in facts.defects:
        yield Reason(kind="defect", text=defect.text, axis=defect.axis, tier=Tier.RECORDED.value, hint=axes.by_id(defect.axis).hint)


def _promises(facts: Facts) -> Iterable[Reason]:
    """A promise turns what would only be recorded into a part of the contract."""
    for promise in facts.promises:
        hint = "take the promise back (--batch-invariant off), or give that side kernels that keep it"
        yield Reason(kind="contract", text=promise.text, axis=promise.axis, tier=Tier.SEMANTIC.value, hint=hint)


def _controls(facts: Facts) -> Iterable[Reason]:
    for control in facts.controls:
        if not control.ok:
            yield Reason(kind="inconclusive", text=f"{control.name}: expected {control.expected}, got {control.got}")
    if not facts.controls and not facts.failures:
        yield Reason(kind="inconclusive", text="no control ran")


def _signatures(facts: Facts) -> Iterable[Reason]:
    for found in facts.signatures:
        yield Reason(kind="warning", text=found.says, axis=found.axis)


def _knobs(facts: Facts) -> Iterable[Reason]:
    """A knob without its effect: what was asked for was not measured."""
    for row in facts.knobs:
        if row.status == "applied":
            continue
        axis = axes.axis_of_knob(row.knob)
        yield Reason(
            kind="inconclusive",
            text=f"{row.knob}={row.requested} on the {row.side}: {row.status.replace('_', ' ')}, actual is {row.actual}"
            + (f" ({row.reason})" if row.reason else ""),
            axis=axis.id if axis else "",
            hint=_knob_hint(row, axis),
        )


def _knob_hint(row: Knob, axis: Axis | None) -> str:
    """What to ask for instead: what runs here where it has a name, or else another of the knob's values."""
    name = row.knob.rpartition(".")[2]
    option = f"--{name.replace('_', '-')}"
    values = next((v for knob, v in axis.knobs.items() if knob.rpartition(".")[2] == name), ()) if axis else ()
    if row.actual in values and row.actual != row.requested:
        return f"leave {option} out, or ask for what runs here: {option} {row.actual}"
    others = [value for value in values if value != row.requested]
    return f"leave {option} out" + (f", or ask for another value: {', '.join(others)}" if others else "")


def _unseen_plants(facts: Facts, reasons: Collection[Reason]) -> list[Reason]:
    """A fault that was put in and that no reason names: this set-up can not see it, so its other verdicts prove nothing either."""
    named = {r.axis for r in reasons if r.kind in ("void", "contract", "defect")}
    return [
        Reason(kind="inconclusive", text=f"plant {p.id}@{p.side} is in force and was not named; it must get: {p.expected}")
        for p in facts.plants
        if p.expected != "recorded" and named.isdisjoint(a.id for a in axes.axes_of_plant(p.id))
    ]
