"""The axis table against the machine-readable specification: ids, knobs, values, tiers and plants are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlmismatch import axes
from rlmismatch.contract import Tier
from rlmismatch.pins.spec import PINS

SPEC: dict[str, list[dict[str, Any]]] = yaml.safe_load((Path(__file__).parents[1] / "data" / "axes.yaml").read_text())
ROWS = [(family, row) for family, rows in SPEC.items() for row in rows]
TIERS = {"I": Tier.IDENTICAL, "S": Tier.SEMANTIC, "R": Tier.RECORDED}
each_row = pytest.mark.parametrize(("family", "row"), ROWS, ids=[row["id"] for _, row in ROWS])


def _knob_values(values: Any) -> tuple[str, ...]:
    """The specification's values as the table writes them: YAML reads on/off as booleans, and a kind such as [int] is a free value."""
    if not isinstance(values, list) or values == ["int"]:
        return ()
    return tuple({True: "on", False: "off"}[v] if isinstance(v, bool) else str(v) for v in values)


def test_the_specification_was_read() -> None:
    assert len(ROWS) == 34
    assert sum(len(row["fields"]) for _, row in ROWS) > 150


@each_row
def test_every_row_is_an_axis_with_its_words(family: str, row: dict[str, Any]) -> None:
    axis = axes.by_id(row["id"])
    assert axis.family == family
    assert axis.asks == row["asks"]
    assert axis.spec.__name__ == row["spec"]
    assert axis.pin == ("" if row["pin"] == "-" else row["pin"])
    assert axis.measure == row.get("measure", "")


@each_row
def test_fields_and_their_tiers(family: str, row: dict[str, Any]) -> None:
    assert {f.name: f.tier for f in axes.by_id(row["id"]).fields} == {name: TIERS[t] for name, t in row["fields"].items()}


@each_row
def test_knobs_and_their_values(family: str, row: dict[str, Any]) -> None:
    axis = axes.by_id(row["id"])
    wanted = {knob: _knob_values(values) for knob, values in row.get("knobs", {}).items()}
    assert {knob: axis.knobs[knob] for knob in wanted} == wanted  # knobs that the specification does not name may stand beside them
    for name, values in row.get("values", {}).items():
        assert axis.values[name] == tuple(values)


@each_row
def test_plants_and_their_verdicts(family: str, row: dict[str, Any]) -> None:
    assert {p.id: p.verdict for p in axes.by_id(row["id"]).plants} == row.get("plant", {})


@each_row
def test_every_zero_of_the_specification_has_a_rule(family: str, row: dict[str, Any]) -> None:
    assert bool(axes.by_id(row["id"]).zero) == bool(row.get("zero"))


def test_the_table_holds_nothing_that_the_specification_does_not_name() -> None:
    assert [a.id for a in axes.ALL] == [row["id"] for _, row in ROWS]


def test_every_axis_says_what_to_change_and_its_plants_say_what_is_broken() -> None:
    assert [a.id for a in axes.ALL if not a.hint] == []
    assert [p.id for a in axes.ALL for p in a.plants if not p.what] == []


def test_pins_exist_and_each_player_has_the_axis_that_speaks_for_it() -> None:
    assert tuple(axes.PLAYERS) == PINS
    for pin, axis_id in axes.PLAYERS.items():
        assert pin in axes.by_id(axis_id).pins
    for axis in axes.ALL:
        assert set(axis.pins) <= set(PINS), axis.id


def test_built_as_promised() -> None:
    by = {state: {a.id for a in axes.ALL if a.built == state} for state in ("complete", "pin_only", "contract_only", "not_built")}
    assert by["complete"] >= {
        "gemm.kernel",
        "attention.materialization",
        "logprob.reduce",
        "model.norm",
        "model.qk_norm",
        "model.activation",
    }
    assert by["pin_only"] <= {"attention.rope", "attention.precision", "gemm.forward_reduce"}
    assert by["not_built"] <= {
        "gemm.dgrad_reduce",
        "gemm.wgrad_accumulate",
        "rollout.all_reduce_backend",
        "attention.merge_order",
        "attention.backend_reuse",
        "attention.backward",
    }


def test_at_tp1_the_pins_of_what_still_computes_can_be_played() -> None:
    """At TP1 no partial is merged, but the log-softmax is still two engines' own: its pin must not vanish with the reduction."""
    setup = axes.Setup()
    idle = [pin for pin in PINS if all(a.structural_zero(setup) for a in axes.ALL if pin in a.pins)]
    assert idle == ["forward_reduce"]


def test_sides() -> None:
    assert axes.one_sided(axes.ALL) == {
        "gemm.dgrad_reduce": "trainer",
        "gemm.wgrad_accumulate": "trainer",
        "attention.backward": "trainer",
        "logprob.backward": "trainer",
        "rollout.all_reduce_backend": "rollout",
    }
    for axis in axes.ALL:
        if axis.side != "both":
            assert all(p.sides == (axis.side,) for p in axis.plants), axis.id


def test_built_plants_can_be_named_without_doubt() -> None:
    """One id on two axes is one fault in two places: which of them a set-up has decides where it goes."""
    ids = [p.id for a in axes.ALL for p in a.plants if p.built]
    assert {plant for plant in ids if ids.count(plant) > 1} == {"merge_arrival_order"}


def test_causal_order_names_every_axis_once_and_gates_first() -> None:
    assert sorted(axes.CAUSAL_ORDER) == sorted(a.id for a in axes.ALL)
    assert axes.CAUSAL_ORDER[:3] == ("model.tokens", "model.weights", "model.mode")
    assert axes.CAUSAL_ORDER[-1] == "gemm.runtime_flags"


def test_a_mirror_repeats_a_field_of_the_same_tier_or_above_it() -> None:
    for axis in axes.ALL:
        for name, origins in axis.mirrors.items():
            for origin in origins:
                _, spec = axes.field_by_key(origin)
                assert spec.tier is not Tier.RECORDED, f"{axis.id}:{name} repeats a field that never fails"
                assert origin != f"{axis.id}:{name}"
