"""Looking axes up: unknown names suggest, waivers carry to what repeats them, and importing is cheap."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping

import pytest

from rlmismatch import axes, contract
from rlmismatch.axes import Setup
from rlmismatch.axes.base import ZERO_RULES, Axis, Plant
from rlmismatch.contract import Outcome, Reading, not_applicable, read
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.exitcodes import ExitCode

TP = "gemm.runtime_flags:tensor_parallel_size"


def test_an_unknown_axis_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        axes.by_id("gemm.kernal")
    assert error.value.slug == "axis-unknown"
    assert error.value.hint == "did you mean gemm.kernel?"


def test_nothing_near_gives_no_hint() -> None:
    with pytest.raises(UsageError) as error:
        axes.by_id("zzzzzz")
    assert error.value.hint == ""


def test_families_and_the_rollouts_all_reduce_among_the_gemms() -> None:
    assert [len(axes.family(name)) for name in axes.FAMILIES] == [6, 10, 11, 7]
    assert "rollout.all_reduce_backend" in {a.id for a in axes.family("gemm")}
    with pytest.raises(UsageError, match="attn") as error:
        axes.family("attn")
    assert error.value.slug == "family-unknown"


def test_fields_by_key() -> None:
    axis, spec = axes.field_by_key("model.norm:eps")
    assert (axis.id, spec.name) == ("model.norm", "eps")
    with pytest.raises(UsageError) as error:
        axes.field_by_key("model.norm:epsilon")
    assert error.value.hint == "did you mean model.norm:eps?"


def test_knobs_lead_to_their_axis() -> None:
    found = axes.axis_of_knob("logprob.reduce")
    assert found is not None
    assert found.id == "logprob.reduce"
    assert axes.axis_of_knob("seed") is None


def test_plants(monkeypatch: pytest.MonkeyPatch) -> None:
    axis, plant = axes.plant("eps", "trainer")
    assert (axis.id, plant.verdict) == ("model.norm", "contract")
    with pytest.raises(UsageError) as unknown:
        axes.plant("epsi", "trainer")
    assert unknown.value.hint == "did you mean eps?"
    with pytest.raises(UsageError) as wrong:
        axes.plant("dropout_on", "rollout")
    assert wrong.value.slug == "plant-wrong-side"
    assert wrong.value.hint == "say --plant dropout_on@trainer"
    listed = dataclasses.replace(axes.by_id("model.norm"), plants=(Plant(id="later", verdict="contract", what="not built"),))
    monkeypatch.setattr(axes, "ALL", (*axes.ALL, listed))
    with pytest.raises(EnvironmentUnfitError) as unbuilt:
        axes.plant("later", "rollout")
    assert unbuilt.value.exit_code is ExitCode.ENVIRONMENT


def test_what_ran_instead_of_what_was_asked_for_needs_a_reason() -> None:
    def side(asked: str, ran: str, reason: Reading) -> Mapping[str, Mapping[str, Reading]]:
        fields = {"requested_backend": read(asked, "knob"), "actual_backend": read(ran, "trial"), "fallback_reason": reason}
        return {"logprob.provenance": fields}

    none = not_applicable("none reported")
    assert axes.unreported_fallbacks(side("a", "a", none), side("b", "b", none)) == {}
    assert axes.unreported_fallbacks(side("a", "b", read("b is not installed", "import")), {}) == {}
    assert axes.unreported_fallbacks(side("a", "a", none), side("a", "b", none)) == {
        "logprob.provenance:actual_backend": "the rollout was asked for a, ran b, and reported no fallback"
    }


def test_a_spec_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="has no field"):
        Axis(id="model.x", family="model", asks="?", spec=axes.by_id("model.norm").spec, field_names=("epsilon",))
    with pytest.raises(ValueError, match=r"family\.name"):
        Axis(id="model", family="model", asks="?", spec=axes.by_id("model.norm").spec)
    with pytest.raises(ValueError, match="unknown zero rules"):
        Axis(id="model.x", family="model", asks="?", spec=axes.by_id("model.norm").spec, zero={"tp0": "never"})


@pytest.mark.parametrize(
    ("axis", "zero", "live"),
    [
        ("gemm.forward_reduce", Setup(), Setup(trainer_tp=2)),
        ("gemm.dgrad_reduce", Setup(trainer_tp=2, equal_payload=True), Setup(trainer_tp=2)),
        ("gemm.dgrad_reduce", Setup(rollout_tp=4), Setup(trainer_tp=4, equal_payload=True)),
        ("rollout.all_reduce_backend", Setup(trainer_tp=2), Setup(rollout_tp=2)),
        ("attention.merge_order", Setup(rollout_kv_splits=1), Setup()),
        ("attention.merge_order", Setup(rollout_kv_splits=1), Setup(cp=2, rollout_kv_splits=1)),
        ("attention.layout", Setup(num_heads=8, num_kv_heads=1), Setup(num_heads=8, num_kv_heads=2)),
        ("logprob.vocab_padding", Setup(), Setup(pad_rows=128)),
        ("logprob.merge_order", Setup(trainer_tp=2, rollout_tp=2), Setup(trainer_tp=4)),
        ("model.qk_norm", Setup(has_qk_norm=False), Setup()),
    ],
)
def test_structural_zeros(axis: str, zero: Setup, live: Setup) -> None:
    assert axes.by_id(axis).structural_zero(zero)
    assert axes.by_id(axis).structural_zero(live) is None


def test_every_zero_rule_is_used() -> None:
    assert {rule for a in axes.ALL for rule in a.zero} == set(ZERO_RULES)


def test_waiving_unequal_tp_covers_what_repeats_it_and_what_exists_only_above_tp1() -> None:
    tp1, tp2 = read(1, "here"), read(2, "here")
    none = not_applicable("TP1: nothing to reduce")
    trainer = {
        "gemm.runtime_flags": {"tensor_parallel_size": tp2},
        "attention.provenance": {"tensor_parallel_size": tp2},
        "gemm.forward_reduce": {"acc_dtype": read("float32", "here"), "order": read("rank", "here")},
    }
    rollout = {
        "gemm.runtime_flags": {"tensor_parallel_size": tp1},
        "attention.provenance": {"tensor_parallel_size": tp1},
        "gemm.forward_reduce": {"acc_dtype": none, "order": none},
    }
    assert axes.implied_waivers((), trainer, rollout) == frozenset()
    implied = axes.implied_waivers((TP,), trainer, rollout)
    assert {"attention.provenance:tensor_parallel_size", "attention.layout:tp_head_ownership", "gemm.forward_reduce:acc_dtype"} <= implied
    assert TP not in implied
    found = {
        c.key: c for c in contract.compare(trainer, rollout, axes.contract_fields([axes.by_id(a) for a in trainer]), waivers={TP, *implied})
    }
    assert found[TP].outcome is Outcome.WAIVED
    assert found["gemm.forward_reduce:order"].outcome is Outcome.WAIVED


def test_waiving_unequal_tp_does_not_hide_another_dtype_of_the_sum() -> None:
    sums = ({"gemm.forward_reduce": {"acc_dtype": read(dtype, "here")}} for dtype in ("float32", "bfloat16"))
    assert "gemm.forward_reduce:acc_dtype" not in axes.implied_waivers((TP,), *sums)


def test_sequence_parallelism_is_the_trainers_alone_and_must_be_known_there() -> None:
    key = "sequence_parallel"
    fields = {"gemm.runtime_flags": tuple(f for f in axes.by_id("gemm.runtime_flags").fields if f.name == key)}
    none = {"gemm.runtime_flags": {key: not_applicable("no sequence parallelism in the rollout")}}
    for on in (True, False):
        (compared,) = contract.compare({"gemm.runtime_flags": {key: read(on, "config")}}, none, fields)
        assert compared.fails is None
    (compared,) = contract.compare({}, none, fields)
    assert compared.fails is contract.Tier.IDENTICAL


def test_built_axes_are_what_is_compared() -> None:
    assert {a.id for a in axes.built()} == set(axes.contract_fields(axes.built()))
    assert {a.id for a in axes.ALL} - {a.id for a in axes.built()} == {a.id for a in axes.ALL if a.built == "not_built"}


def test_importing_the_axes_loads_neither_torch_nor_an_engine() -> None:
    code = "import sys, rlmismatch.axes; print([m for m in ('torch', 'numpy', 'vllm', 'megatron', 'yaml') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
