"""Tiers, readings and their comparison: unknown is not equal, and nothing is compared by accident."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from rlmismatch import contract
from rlmismatch.contract import (
    Evidence,
    FieldSpec,
    Outcome,
    Reading,
    Tier,
    compare,
    declare,
    documented,
    fields_of,
    identical,
    not_applicable,
    read,
    recorded,
    same_value,
    semantic,
    unknown,
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One field per tier."""

    eps: float = identical("the constant")
    chain: str = semantic("what is done")
    backend: str = recorded("who does it")


AXES = {"model.norm": fields_of(Spec)}


def outcome(field: str, trainer: Reading, rollout: Reading, **options: Any) -> tuple[Outcome, Tier | None]:
    found = {c.field: c for c in compare({"model.norm": {field: trainer}}, {"model.norm": {field: rollout}}, AXES, **options)}
    return found[field].outcome, found[field].fails


def test_fields_keep_their_tier_meaning_and_order() -> None:
    assert [(f.name, f.tier, f.meaning) for f in fields_of(Spec)] == [
        ("eps", Tier.IDENTICAL, "the constant"),
        ("chain", Tier.SEMANTIC, "what is done"),
        ("backend", Tier.RECORDED, "who does it"),
    ]


@pytest.mark.parametrize(("field", "tier"), [("eps", Tier.IDENTICAL), ("chain", Tier.SEMANTIC)])
class TestComparedTiers:
    def test_equal(self, field: str, tier: Tier) -> None:
        assert outcome(field, read(1, "a"), documented(1, "b")) == (Outcome.EQUAL, None)

    def test_differs(self, field: str, tier: Tier) -> None:
        assert outcome(field, read(1, "a"), read(2, "b")) == (Outcome.DIFFERS, tier)

    @pytest.mark.parametrize("other", [read(1, "a"), unknown("why"), not_applicable("none here"), Reading()])
    def test_unknown_equals_nothing_not_even_unknown(self, field: str, tier: Tier, other: Reading) -> None:
        assert outcome(field, unknown("why"), other) == (Outcome.UNKNOWN, tier)
        assert outcome(field, other, unknown("why")) == (Outcome.UNKNOWN, tier)

    def test_not_applicable_equals_only_itself(self, field: str, tier: Tier) -> None:
        assert outcome(field, not_applicable("no merge"), not_applicable("another reason")) == (Outcome.NOT_APPLICABLE, None)
        assert outcome(field, not_applicable("no merge"), read(None, "a")) == (Outcome.DIFFERS, tier)

    def test_nan_equals_nothing(self, field: str, tier: Tier) -> None:
        assert outcome(field, read(math.nan, "a"), read(math.nan, "b")) == (Outcome.DIFFERS, tier)

    def test_waived_by_name_keeps_both_readings(self, field: str, tier: Tier) -> None:
        key = f"model.norm:{field}"
        assert outcome(field, read(1, "a"), read(2, "b"), waivers=[key]) == (Outcome.WAIVED, None)
        assert outcome(field, read(1, "a"), unknown("b"), waivers=[key]) == (Outcome.WAIVED, None)
        assert outcome(field, read(1, "a"), read(2, "b"), waivers=["model.norm:other"]) == (Outcome.DIFFERS, tier)

    def test_a_waiver_of_an_equal_field_changes_nothing(self, field: str, tier: Tier) -> None:
        assert outcome(field, read(1, "a"), read(1, "b"), waivers=[f"model.norm:{field}"]) == (Outcome.EQUAL, None)

    def test_a_contradiction_fails_even_where_the_values_agree(self, field: str, tier: Tier) -> None:
        assert outcome(field, read(1, "a"), read(1, "b"), contradictions=[f"model.norm:{field}"]) == (Outcome.CONTRADICTION, tier)

    def test_a_missing_field_is_unknown(self, field: str, tier: Tier) -> None:
        found = {c.field: c for c in compare({}, {"model.norm": {field: read(1, "a")}}, AXES)}
        assert (found[field].outcome, found[field].fails) == (Outcome.UNKNOWN, tier)
        assert found[field].trainer.source == "the adapter did not report this field"

    def test_one_side_only(self, field: str, tier: Tier) -> None:
        sided = {"model.norm": "trainer"}
        assert outcome(field, read(1, "a"), read(2, "b"), one_sided=sided) == (Outcome.EQUAL, None)
        assert outcome(field, unknown("a"), read(2, "b"), one_sided=sided) == (Outcome.UNKNOWN, tier)
        assert outcome(field, not_applicable("a"), read(2, "b"), one_sided=sided) == (Outcome.NOT_APPLICABLE, None)
        assert outcome(field, unknown("a"), read(2, "b"), one_sided={"model.norm": "rollout"}) == (Outcome.EQUAL, None)


@pytest.mark.parametrize("rollout", [read("b", "x"), unknown("x"), not_applicable("x")])
def test_recorded_is_never_compared(rollout: Reading) -> None:
    assert outcome("backend", read("a", "x"), rollout) == (Outcome.RECORDED, None)
    assert outcome("backend", read("a", "x"), rollout, one_sided={"model.norm": "trainer"}) == (Outcome.RECORDED, None)


@pytest.mark.parametrize(("value", "expected"), [("after", Outcome.EQUAL), ("before", Outcome.DIFFERS), (None, Outcome.DIFFERS)])
def test_a_field_of_one_side_has_no_other_to_differ_from_but_must_be_right(value: str | None, expected: Outcome) -> None:
    spec = FieldSpec(name="entropy", tier=Tier.SEMANTIC, meaning="of what", must=("after",))
    (found,) = compare({"a.x": {"entropy": read(value, "trial")}}, {}, {"a.x": (spec,)}, one_sided={"a.x": "trainer"})
    assert found.outcome is expected
    assert (found.fails is None) == (expected is Outcome.EQUAL)
    assert found.rollout.source == "trainer only; must be after"


def test_every_field_of_every_axis_is_compared_once() -> None:
    found = compare({}, {}, {"a.x": fields_of(Spec), "a.y": fields_of(Spec)})
    assert [c.key for c in found] == [f"a.{axis}:{field}" for axis in "xy" for field in ("eps", "chain", "backend")]


def test_no_axis_gives_no_comparison() -> None:
    assert compare({"model.norm": {"eps": read(1, "a")}}, {}, {}) == ()


class TestDeclare:
    def test_fills_what_is_unknown_and_says_that_it_was_declared(self) -> None:
        merged, against = declare({"model.norm": {"eps": unknown("no table")}}, {"model.norm:eps": 1e-6, "model.mode:flag": False})
        assert merged["model.norm"]["eps"] == Reading(value=1e-6, evidence=Evidence.DECLARED, source="--declare")
        assert merged["model.mode"]["flag"].evidence is Evidence.DECLARED
        assert against == ()

    @pytest.mark.parametrize("known", [read(1e-5, "norm.eps"), documented(1e-5, "table")])
    def test_never_overrides_what_is_known(self, known: Reading) -> None:
        merged, against = declare({"model.norm": {"eps": known}}, {"model.norm:eps": 1e-6})
        assert merged["model.norm"]["eps"] == known
        assert against == ("model.norm:eps",)

    def test_agreeing_with_what_is_known_is_no_contradiction(self) -> None:
        assert declare({"model.norm": {"eps": read(1e-5, "a")}}, {"model.norm:eps": 1e-5})[1] == ()

    def test_leaves_the_given_readings_alone(self) -> None:
        given = {"model.norm": {"eps": unknown("why")}}
        declare(given, {"model.norm:eps": 1e-6})
        assert given["model.norm"]["eps"].evidence is Evidence.UNKNOWN


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (True, True, True),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (math.nan, math.nan, False),
    ],
)
def test_values_are_the_same_as_json(a: Any, b: Any, same: bool) -> None:
    assert same_value(a, b) is same
    assert same_value(b, a) is same


def test_readings_survive_json() -> None:
    readings = {
        "model.norm": {"eps": read(1e-6, "norm.eps"), "chain": not_applicable("none"), "backend": unknown("no table")},
        "logprob.transform_chain": {"transform_chain": documented(["temperature(0.7)"], "adapter table")},
    }
    assert contract.readings_from_json(json.loads(json.dumps(contract.readings_to_json(readings)))) == readings
