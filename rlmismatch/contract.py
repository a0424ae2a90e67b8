"""What the two sides promise, field by field, and how promises are compared.

A *tier* belongs to a field. IDENTICAL: differs or missing -> not comparable, every number void. SEMANTIC: differs, or
unknown where it applies -> failed. RECORDED: listed, never compared for equality.

A value is a `Reading`: the value and the *evidence* for it. Unknown is not equal to unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Tier(str, Enum):
    IDENTICAL = "identical"
    SEMANTIC = "semantic"
    RECORDED = "recorded"


class Evidence(str, Enum):
    """How a value is known, strongest first."""

    READ = "read"  # from the live engine
    DOCUMENTED = "documented"  # a table in the adapter for this engine version, with the source file it was read in
    DECLARED = "declared"  # by the person, --declare
    NOT_APPLICABLE = "not_applicable"  # needs a reason; not the same as unknown
    UNKNOWN = "unknown"


Sides = Literal["both", "trainer", "rollout"]


def _spec_field(tier: Tier, meaning: str, side: Sides, must: tuple[Any, ...] = ()) -> Any:
    return field(metadata={"tier": tier, "meaning": meaning, "side": side, "must": must})


def identical(meaning: str, *, side: Sides = "both") -> Any:
    """A spec field whose difference makes the two sides not comparable. `side`: the one side that can have it."""
    return _spec_field(Tier.IDENTICAL, meaning, side)


def semantic(meaning: str, *, side: Sides = "both", must: tuple[Any, ...] = ()) -> Any:
    """A spec field on which both sides must agree, and which must be known where it applies. `side`: the one side that can have it.

    must: the values that alone are right. Where only one side has the field there is no other to differ from.
    """
    return _spec_field(Tier.SEMANTIC, meaning, side, must)


def recorded(meaning: str, *, side: Sides = "both") -> Any:
    """A spec field that is shown and never compared for equality."""
    return _spec_field(Tier.RECORDED, meaning, side)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of one axis' contract."""

    name: str
    tier: Tier
    meaning: str
    side: Sides = "both"
    must: tuple[Any, ...] = ()  # the values that alone are right; (): any, if known


def fields_of(spec: type[Any]) -> tuple[FieldSpec, ...]:
    """The fields of a spec dataclass (`@dataclass` with `identical` / `semantic` / `recorded` fields), in order."""
    return tuple(
        FieldSpec(name=f.name, tier=f.metadata["tier"], meaning=f.metadata["meaning"], side=f.metadata["side"], must=f.metadata["must"])
        for f in dataclasses.fields(spec)
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A contract value and how it is known. `value` is JSON: str, int, float, bool, None, or a list / dict of them."""

    value: Any = None
    evidence: Evidence = Evidence.UNKNOWN
    source: str = ""  # attribute path, env variable, source file, or the reason for not applicable / unknown

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "evidence": self.evidence.value, "source": self.source}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Reading:
        return cls(value=data["value"], evidence=Evidence(data["evidence"]), source=data.get("source", ""))


def read(value: Any, source: str) -> Reading:
    return Reading(value=value, evidence=Evidence.READ, source=source)


def documented(value: Any, source: str) -> Reading:
    return Reading(value=value, evidence=Evidence.DOCUMENTED, source=source)


def not_applicable(reason: str) -> Reading:
    return Reading(evidence=Evidence.NOT_APPLICABLE, source=reason)


def unknown(reason: str) -> Reading:
    return Reading(evidence=Evidence.UNKNOWN, source=reason)


# axis id -> field name -> reading; what one side's worker returns from its live engine.
Readings = Mapping[str, Mapping[str, Reading]]


def readings_to_json(readings: Readings) -> dict[str, dict[str, Any]]:
    return {axis: {name: r.to_json() for name, r in fields.items()} for axis, fields in readings.items()}


def readings_from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Reading]]:
    return {axis: {name: Reading.from_json(r) for name, r in fields.items()} for axis, fields in data.items()}


class Outcome(str, Enum):
    """What the comparison of one field came to."""

    EQUAL = "equal"
    DIFFERS = "differs"
    UNKNOWN = "unknown"  # at least one side does not know
    CONTRADICTION = "contradiction"  # a declared or documented value against a read one
    NOT_APPLICABLE = "not_applicable"
    RECORDED = "recorded"
    WAIVED = "waived"


@dataclass(frozen=True, kw_only=True)
class FieldComparison:
    """One field, both sides, and what follows. `fails` is the tier it fails at, or None."""

    axis: str
    field: str
    tier: Tier
    trainer: Reading
    rollout: Reading
    outcome: Outcome
    fails: Tier | None

    @property
    def key(self) -> str:
        return f"{self.axis}:{self.field}"


# What `compare` needs of an axis; `axes.Axis` has it.
AxisFields = Mapping[str, tuple[FieldSpec, ...]]


def declare(readings: Readings, declarations: Mapping[str, Any]) -> tuple[dict[str, dict[str, Reading]], tuple[str, ...]]:
    """Fill unknown fields with what the person declared.

    declarations: ``"axis:field" -> value``. Returns the new readings and the keys where a declaration contradicts a value
    that was read or documented (the reading stays; a contradiction is an error in `compare`).
    """
    merged = {axis: dict(fields) for axis, fields in readings.items()}
    contradictions = []
    for key, value in declarations.items():
        axis, name = key.split(":", 1)
        current = merged.setdefault(axis, {}).get(name, Reading())
        if current.evidence in (Evidence.UNKNOWN, Evidence.DECLARED):
            merged[axis][name] = Reading(value=value, evidence=Evidence.DECLARED, source="--declare")
        elif current.evidence is not Evidence.NOT_APPLICABLE and not same_value(current.value, value):
            contradictions.append(key)
    return merged, tuple(contradictions)


def same_value(a: Any, b: Any) -> bool:
    """Equality of JSON values; True is not 1, at any depth, and NaN equals nothing."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def compare(
    trainer: Readings,
    rollout: Readings,
    axes: AxisFields,
    *,
    waivers: Iterable[str] = (),
    contradictions: Iterable[str] = (),
    one_sided: Mapping[str, Sides] | None = None,
) -> tuple[FieldComparison, ...]:
    """Compare the two sides' readings over every field of every axis in `axes`.

    waivers: ``"axis:field"`` keys the person accepts. contradictions: keys that `declare` returned.
    one_sided: axis id -> the one side that has this axis (a trainer-only backward axis has no rollout value to equal).
    A field missing from a side's readings is UNKNOWN there. NOT_APPLICABLE equals only NOT_APPLICABLE.
    """
    waived, contradicted, sided = set(waivers), set(contradictions), one_sided or {}
    missing = Reading(source="the adapter did not report this field")
    out = []
    for axis, specs in axes.items():
        for spec in specs:
            t = trainer.get(axis, {}).get(spec.name, missing)
            r = rollout.get(axis, {}).get(spec.name, missing)
            side = sided.get(axis, spec.side)
            if side != "both":
                only = t if side == "trainer" else r
                other = not_applicable(f"{side} only" + (f"; must be {' or '.join(map(str, spec.must))}" if spec.must else ""))
                t, r = (only, other) if side == "trainer" else (other, only)
                outcome = _one_side_outcome(spec, only)
            else:
                outcome = _outcome(spec.tier, t, r)
            key = f"{axis}:{spec.name}"
            if key in contradicted:
                outcome = Outcome.CONTRADICTION
            failed = outcome in (Outcome.DIFFERS, Outcome.UNKNOWN, Outcome.CONTRADICTION)
            if failed and key in waived:
                outcome, failed = Outcome.WAIVED, False
            out.append(
                FieldComparison(
                    axis=axis, field=spec.name, tier=spec.tier, trainer=t, rollout=r, outcome=outcome, fails=spec.tier if failed else None
                )
            )
    return tuple(out)


def _one_side_outcome(spec: FieldSpec, only: Reading) -> Outcome:
    if spec.tier is Tier.RECORDED:
        return Outcome.RECORDED
    if only.evidence is Evidence.UNKNOWN:
        return Outcome.UNKNOWN
    if only.evidence is Evidence.NOT_APPLICABLE:
        return Outcome.NOT_APPLICABLE
    wrong = spec.must and not any(same_value(only.value, right) for right in spec.must)
    return Outcome.DIFFERS if wrong else Outcome.EQUAL


def _outcome(tier: Tier, t: Reading, r: Reading) -> Outcome:
    if tier is Tier.RECORDED:
        return Outcome.RECORDED
    na = [x.evidence is Evidence.NOT_APPLICABLE for x in (t, r)]
    if all(na):
        return Outcome.NOT_APPLICABLE
    if Evidence.UNKNOWN in (t.evidence, r.evidence):
        return Outcome.UNKNOWN
    if any(na):
        return Outcome.DIFFERS
    return Outcome.EQUAL if same_value(t.value, r.value) else Outcome.DIFFERS
