"""The verdict: every exit code, their order, the order of reasons, and the doors that stay shut.

More than 400 lines: one short test a door, all on the same small run (`given`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from rlmismatch import axes, contract, verdict
from rlmismatch.contract import FieldComparison, Reading, declare, not_applicable, read, unknown
from rlmismatch.drift import BudgetLine, Drift, Hint
from rlmismatch.drift.model import Invalid
from rlmismatch.errors import ContractError, EngineError, EnvironmentUnfitError, InconclusiveError, RlmismatchError, UsageError
from rlmismatch.exitcodes import ExitCode
from rlmismatch.report.model import ControlRow, Gate, KnobRow, PlantInForce
from rlmismatch.verdict import Facts, Reason, Verdict, judge

Fields = Mapping[str, Any]  # "axis:field" -> (trainer, rollout); a plain value is read, a Reading stands for itself


def compare(fields: Fields, **options: Any) -> tuple[FieldComparison, ...]:
    """The comparison of a few fields of real axes."""
    sides: tuple[dict[str, dict[str, Reading]], ...] = ({}, {})
    specs: dict[str, tuple[contract.FieldSpec, ...]] = {}
    for key, values in fields.items():
        axis, spec = axes.field_by_key(key)
        specs[axis.id] = (*specs.get(axis.id, ()), spec)
        for side, value in zip(sides, values, strict=True):
            side.setdefault(axis.id, {})[spec.name] = value if isinstance(value, Reading) else read(value, "engine")
    return contract.compare(*sides, specs, **options)


EQUAL = {"attention.rope:theta": (1e6, 1e6), "model.norm:eps": (1e-6, 1e-6)}
GATES = tuple(Gate(name=name, equal=True, compared=3) for name in verdict.GATES)
DRIFT = Drift(tokens=111, sequences=4, mean_abs=4e-3, token_mult_prob_error=1.004)
LINE = BudgetLine(limit="token_mult_prob_error", sense="at most", allowed=1.05, value=1.004, status="within")
CONTROL = ControlRow(name="trainer repeats itself", expected="bit-equal", got="bit-equal", ok=True)
CLEAN = Facts(comparisons=compare(EQUAL), gates=GATES, controls=(CONTROL,), budget=(LINE,), drift=DRIFT)


def given(**changes: Any) -> Verdict:
    return judge(dataclasses.replace(CLEAN, **changes))


def over(value: float, limit: str = "token_mult_prob_error") -> BudgetLine:
    return BudgetLine(limit=limit, sense="at most", allowed=1.05, value=value, status="over")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong:
    axis: str = "gemm.kernel"
    text: str = "trainer layers.0.q_proj: 2 % from float64"


def ends(result: Verdict) -> tuple[str, int]:
    return result.word, result.exit_code


def kinds(result: Verdict) -> list[str]:
    return [r.kind for r in result.reasons]


VOID = compare({"model.norm:eps": (1e-5, 1e-6)})
SEMANTIC = compare({"attention.rope:theta": (1e5, 1e6)})
EVERYTHING: dict[str, dict[str, Any]] = {
    "void": {"comparisons": VOID},
    "contract": {"comparisons": SEMANTIC},
    "defect": {"defects": (Wrong(),)},
    "drift": {"budget": (over(1.2),)},
    "environment": {"failures": (EnvironmentUnfitError("no-gpu", "no GPU here"),)},
    "engine": {"failures": (EngineError("worker-killed", "a worker was killed"),)},
    "inconclusive": {"controls": (dataclasses.replace(CONTROL, ok=False, got="3 differ"),)},
}


class TestEnds:
    def test_clean(self) -> None:
        assert given() == Verdict(word="OK", exit_code=0)

    @pytest.mark.parametrize(
        ("kind", "word", "code"),
        [
            ("void", "NOT COMPARABLE", 4),
            ("contract", "CONTRACT", 4),
            ("defect", "DEFECT", 4),
            ("drift", "DRIFT", 3),
            ("environment", "CANNOT RUN", 7),
            ("engine", "ENGINE FAILED", 6),
            ("inconclusive", "INCONCLUSIVE", 5),
        ],
    )
    def test_each_kind_alone(self, kind: str, word: str, code: int) -> None:
        result = given(**EVERYTHING[kind])
        assert ends(result) == (word, code)
        assert kinds(result) == [kind]

    def test_every_end_is_an_exit_code_and_every_kind_has_one(self) -> None:
        assert {kind: code for kind, (_, code) in verdict.ENDS.items()} == {
            "void": ExitCode.CONTRACT,
            "contract": ExitCode.CONTRACT,
            "defect": ExitCode.CONTRACT,
            "warning": ExitCode.CONTRACT,
            "drift": ExitCode.DRIFT,
            "environment": ExitCode.ENVIRONMENT,
            "engine": ExitCode.ENGINE,
            "inconclusive": ExitCode.INCONCLUSIVE,
        }

    @pytest.mark.parametrize(
        ("parts", "word", "code"),
        [
            (("contract", "drift"), "CONTRACT", 4),
            (("defect", "drift"), "DEFECT", 4),
            (("contract", "defect"), "CONTRACT", 4),
            (("drift", "inconclusive"), "DRIFT", 3),
            (("drift", "engine"), "DRIFT", 3),
            (("contract", "engine"), "CONTRACT", 4),
            (("engine", "inconclusive"), "ENGINE FAILED", 6),
            (("environment", "inconclusive"), "CANNOT RUN", 7),
        ],
    )
    def test_four_before_three_and_five_to_seven_only_without_a_verdict(self, parts: tuple[str, ...], word: str, code: int) -> None:
        result = given(**{k: v for part in parts for k, v in EVERYTHING[part].items()})
        assert ends(result) == (word, code)
        assert kinds(result) == list(parts), "all are listed, the deciding one first"

    def test_an_engine_that_cannot_run_comes_before_one_that_failed(self) -> None:
        result = given(failures=(EngineError("e", "crashed"), EnvironmentUnfitError("u", "not installed")))
        assert ends(result) == ("CANNOT RUN", 7)


class TestVoid:
    def test_void_numbers_have_no_reason_of_their_own(self) -> None:
        result = given(comparisons=VOID, budget=(over(9.0),), defects=(Wrong(),), controls=(), drift=None)
        assert result.numbers_void
        assert kinds(result) == ["void"]

    def test_a_contract_failure_alone_leaves_the_numbers(self) -> None:
        result = given(comparisons=SEMANTIC, budget=(over(9.0),))
        assert not result.numbers_void
        assert kinds(result) == ["contract", "drift"]

    def test_unequal_weights_name_the_tensors(self) -> None:
        gates = (
            Gate(name="model.weights", equal=False, compared=27, differing=tuple(f"layers.{i}.w: stale" for i in range(5))),
            GATES[0],
            GATES[2],
        )
        digests = compare({"model.weights:tensor_digests": ("a" * 64, "b" * 64)})
        result = given(gates=gates, comparisons=(*CLEAN.comparisons, *digests))
        assert result.reasons == (
            Reason(
                kind="void",
                text="5 of 27 differ: layers.0.w: stale, layers.1.w: stale, layers.2.w: stale and 2 more",
                axis="model.weights",
                tier="identical",
                hint=axes.by_id("model.weights").hint,
            ),
        ), "the gate speaks for its axis, once"

    def test_tokens_before_weights_before_other_fields(self) -> None:
        gates = (
            Gate(name="weights", equal=False, compared=2, differing=("head: stale",)),
            Gate(name="tokens", equal=False, compared=2, differing=("a",)),
            Gate(name="mode", equal=True, compared=2),
        )
        result = given(gates=gates, comparisons=VOID)
        assert [r.axis for r in result.reasons] == ["model.tokens", "model.weights", "model.norm"]

    def test_dropout_fails_the_contract_with_its_value(self) -> None:
        gates = (*GATES[:2], Gate(name="model.mode", equal=False, compared=1, differing=("hidden_dropout",)))
        result = given(gates=gates, comparisons=compare({**EQUAL, "model.mode:hidden_dropout": (0.1, 0.0)}))
        assert ends(result) == ("CONTRACT", 4)
        assert result.reasons[0].text == "hidden_dropout is 0.1 on the trainer and 0.0 on the rollout"
        assert result.reasons[0].axis == "model.mode"
        assert not result.numbers_void


class TestShutDoors:
    @pytest.mark.parametrize("missing", verdict.GATES)
    def test_a_gate_that_did_not_run_did_not_hold(self, missing: str) -> None:
        result = given(gates=tuple(g for g in GATES if g.name != missing))
        assert result.exit_code == 4
        assert (result.reasons[0].axis, result.reasons[0].text) == (missing, "this gate did not run")

    def test_a_gate_that_compared_nothing_did_not_hold(self) -> None:
        result = given(gates=(dataclasses.replace(GATES[0], compared=0), *GATES[1:]))
        assert ends(result) == ("NOT COMPARABLE", 4)
        assert result.reasons[0].text == "nothing was compared"

    def test_a_gate_without_an_answer_did_not_hold(self) -> None:
        result = given(gates=(dataclasses.replace(GATES[0], equal=None, note="no digest"), *GATES[1:]))
        assert result.reasons[0].text == "could not be established: no digest"

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"drift": None}, "the drift was not measured"),
            ({"drift": Drift(tokens=0, sequences=0)}, "no token was compared"),
            ({"comparisons": ()}, "no contract field was compared"),
            ({"controls": ()}, "no control ran"),
            ({"budget": ()}, "no limit was checked"),
        ],
    )
    def test_nothing_is_not_a_pass(self, changes: dict[str, Any], text: str) -> None:
        result = given(**changes)
        assert ends(result) == ("INCONCLUSIVE", 5)
        assert [r.text for r in result.reasons] == [text]

    def test_an_invalid_drift_never_passes_even_within_its_limits(self) -> None:
        bad = Drift(tokens=3, sequences=1, invalid=(Invalid(kind="not_finite", text="a log-prob is nan", sequence="a"),))
        for lines in ((LINE,), (), (dataclasses.replace(LINE, value=None, status="not measured", why="the drift is invalid"),)):
            result = given(drift=bad, budget=lines)
            assert ends(result) == ("INCONCLUSIVE", 5)
            assert [r.text for r in result.reasons] == ["a log-prob is nan"]

    def test_an_infinite_value_is_over_its_limit(self) -> None:
        assert ends(given(budget=(dataclasses.replace(LINE, value=math.inf, status="over"),))) == ("DRIFT", 3)
        assert ends(given(budget=(dataclasses.replace(LINE, value=math.inf),))) == ("DRIFT", 3)
        assert ends(given(budget=(dataclasses.replace(LINE, value=math.inf, sense="at least"),))) == ("INCONCLUSIVE", 5)

    @pytest.mark.parametrize("value", [math.nan, -math.inf, None])
    def test_a_value_that_is_no_number_is_within_no_limit(self, value: float | None) -> None:
        result = given(budget=(dataclasses.replace(LINE, value=value),))
        assert ends(result) == ("INCONCLUSIVE", 5)

    def test_a_line_that_says_within_is_checked_again(self) -> None:
        assert ends(given(budget=(dataclasses.replace(LINE, value=2.0),))) == ("DRIFT", 3)
        least = BudgetLine(limit="ess", sense="at least", allowed=0.9, value=0.5, status="within")
        assert ends(given(budget=(least,))) == ("DRIFT", 3)

    def test_a_limit_that_nobody_asked_for_may_go_unmeasured(self) -> None:
        line = BudgetLine(
            limit="oracle_error_ratio", sense="at most", allowed=2.0, value=None, status="not measured", required=False, why="no oracle"
        )
        assert ends(given(budget=(LINE, line))) == ("OK", 0)
        asked = dataclasses.replace(line, required=True)
        result = given(budget=(LINE, asked))
        assert ends(result) == ("INCONCLUSIVE", 5)
        assert result.reasons[0].text == "the limit oracle_error_ratio was not checked: no oracle"

    @pytest.mark.parametrize("status", ["fell_back", "unsupported", "unobservable", "something new"])
    def test_a_knob_without_its_effect_is_never_a_pass(self, status: str) -> None:
        row = KnobRow(
            knob="logprob.reduce",
            side="rollout",
            requested="allgather_partials_fixed_merge",
            actual="allgather_logits",
            status=status,
            reason="550 is no multiple of 64",
        )
        result = given(knobs=(row,))
        assert ends(result) == ("INCONCLUSIVE", 5)
        assert result.reasons[0].axis == "logprob.reduce"
        assert "550 is no multiple of 64" in result.reasons[0].text
        assert result.reasons[0].hint == "leave --reduce out, or ask for what runs here: --reduce allgather_logits"
        assert ends(given(knobs=(dataclasses.replace(row, status="applied"),))) == ("OK", 0)

    @pytest.mark.parametrize(
        ("knob", "requested", "actual", "hint"),
        [
            (
                "gemm.all_reduce_backend",
                "custom",
                "shm",
                "leave --all-reduce-backend out, or ask for what runs here: --all-reduce-backend shm",
            ),
            ("gemm.batch_invariant", "on", "off", "leave --batch-invariant out, or ask for what runs here: --batch-invariant off"),
            ("gemm.forward_reduce", "all_reduce", None, "leave --forward-reduce out, or ask for another value: reduce_scatter, rank_order"),
            ("gemm.no_such_knob", "x", None, "leave --no-such-knob out"),
        ],
    )
    def test_a_knob_that_cannot_be_had_comes_with_what_can(self, knob: str, requested: str, actual: str | None, hint: str) -> None:
        row = KnobRow(knob=knob, side="rollout", requested=requested, actual=actual, status="unsupported", reason="why")
        assert given(knobs=(row,)).reasons[0].hint == hint

    def test_an_oracle_limit_is_a_defect_whatever_the_other_side_says(self) -> None:
        result = given(budget=(LINE, over(3.4, "oracle_error_ratio (trainer)")), fail_on="contract")
        assert ends(result) == ("DEFECT", 4)

    def test_a_recorded_axis_with_a_defect_fails(self) -> None:
        result = given(defects=(Wrong(),))
        assert result.reasons[0].tier == "recorded"
        assert result.reasons[0].hint == axes.by_id("gemm.kernel").hint


class TestFields:
    def test_unknown_where_it_applies_fails_and_says_how_to_declare(self) -> None:
        result = given(comparisons=compare({"logprob.precision:accum_dtype": ("float32", unknown("not in the table for 0.25"))}))
        assert ends(result) == ("CONTRACT", 4)
        assert result.reasons[0].text == "accum_dtype is unknown on the rollout (not in the table for 0.25)"
        assert result.reasons[0].hint == (
            "--declare rollout.logprob.precision:accum_dtype=VALUE if you know it, or --waive logprob.precision:accum_dtype"
        )

    def test_unknown_on_both_sides_is_not_equal(self) -> None:
        result = given(comparisons=compare({"model.norm:norm_dtype": (unknown(""), unknown(""))}))
        assert result.reasons[0].text == "norm_dtype is unknown on the trainer and the rollout"
        assert result.reasons[0].hint.startswith("--declare model.norm:norm_dtype=VALUE")

    def test_a_declaration_against_what_was_read(self) -> None:
        merged, against = declare({"model.norm": {"eps": read(1e-6, "norm.eps")}}, {"model.norm:eps": 1e-5})
        fields = compare({"model.norm:eps": (merged["model.norm"]["eps"], 1e-6)}, contradictions=against)
        result = given(comparisons=fields)
        assert result.reasons[0].hint == "take back the declaration of model.norm:eps"
        assert "declared otherwise" in result.reasons[0].text

    def test_not_applicable_on_one_side_is_a_difference(self) -> None:
        result = given(comparisons=compare({"gemm.forward_reduce:order": ("rank", not_applicable("TP1"))}))
        assert result.reasons[0].text == "order is rank on the trainer and not applicable (TP1) on the rollout"

    def test_long_values_are_left_to_the_table(self) -> None:
        result = given(comparisons=compare({"attention.layout:qkv_layout": (1, 2), "attention.layout:gqa_mapping": ("a" * 99, "b" * 99)}))
        assert result.reasons[0].text == "gqa_mapping differs between the trainer and the rollout"

    def test_every_failing_axis_is_named_and_the_most_causal_first(self) -> None:
        result = given(
            comparisons=compare(
                {
                    "gemm.runtime_flags:tf32": (True, False),
                    "logprob.vocab_padding:vocab_padding_policy": ("include", "mask"),
                    "attention.rope:theta": (1e5, 1e6),
                    "logprob.transform_chain:temperature_applied": (1.0, 0.7),
                }
            )
        )
        assert [r.axis for r in result.reasons] == [
            "logprob.transform_chain",
            "logprob.vocab_padding",
            "attention.rope",
            "gemm.runtime_flags",
        ]
        assert result.reasons[1].hint.startswith("set --vocab-padding-policy mask")

    def test_a_field_that_repeats_another_comes_after_it(self) -> None:
        result = given(
            comparisons=compare(
                {
                    "attention.provenance:tensor_parallel_size": (2, 1),
                    "logprob.provenance:tensor_parallel_size": (2, 1),
                    "gemm.runtime_flags:tensor_parallel_size": (2, 1),
                }
            )
        )
        assert [r.axis for r in result.reasons] == ["gemm.runtime_flags", "attention.provenance", "logprob.provenance"]
        assert "--waive gemm.runtime_flags:" in result.reasons[0].hint

    def test_a_field_that_repeats_one_that_is_equal_stands_for_itself(self) -> None:
        result = given(
            comparisons=compare(
                {
                    "attention.rope:theta": (1e6, 1e6),
                    "attention.provenance:rope_identity": ("a", "b"),
                    "gemm.runtime_flags:tf32": (True, False),
                }
            )
        )
        assert [r.axis for r in result.reasons] == ["attention.provenance", "gemm.runtime_flags"]

    def test_a_waived_field_is_a_remark_and_its_echoes_are_silent(self) -> None:
        keys = ("gemm.runtime_flags:tensor_parallel_size", "attention.provenance:tensor_parallel_size")
        result = given(comparisons=compare(dict.fromkeys(keys, (2, 1)) | EQUAL, waivers=keys))
        assert ends(result) == ("OK", 0)
        assert result.reasons == (
            Reason(
                kind="warning",
                text="tensor_parallel_size is 2 on the trainer and 1 on the rollout; waived by name",
                axis="gemm.runtime_flags",
                tier="identical",
            ),
        )


class TestFailOn:
    def test_drift_can_be_reported_without_failing(self) -> None:
        result = given(budget=(over(1.2),), fail_on="contract,defect")
        assert ends(result) == ("OK", 0)
        assert kinds(result) == ["drift"]

    def test_what_fails_stands_before_what_is_only_reported(self) -> None:
        result = given(budget=(over(1.2),), controls=EVERYTHING["inconclusive"]["controls"], fail_on="contract")
        assert ends(result) == ("INCONCLUSIVE", 5)
        assert kinds(result) == ["inconclusive", "drift"]

    @pytest.mark.parametrize("kind", ["void", "contract", "defect", "environment", "engine", "inconclusive"])
    def test_nothing_else_can_be_left_out(self, kind: str) -> None:
        assert given(**EVERYTHING[kind], fail_on="").exit_code == given(**EVERYTHING[kind]).exit_code != 0

    def test_warnings_can_be_made_to_fail(self) -> None:
        hint = Hint(name="one_signed_bias", says="every delta is negative", axis="logprob.vocab_padding")
        assert ends(given(signatures=(hint,))) == ("OK", 0)
        strict = given(signatures=(hint,), fail_on="contract,defect,drift,warning")
        assert ends(strict) == ("CONTRACT", 4)
        assert strict.reasons[0].axis == "logprob.vocab_padding"

    def test_unknown_words_suggest(self) -> None:
        with pytest.raises(UsageError) as error:
            verdict.parse_fail_on("contract, drifft")
        assert error.value.slug == "fail-on-unknown"
        assert error.value.hint == "did you mean drift?"
        with pytest.raises(UsageError) as error:
            verdict.parse_fail_on("void")
        assert error.value.hint == "known are: contract, defect, drift, warning"

    def test_the_default_is_the_one_that_is_used(self) -> None:
        assert verdict.parse_fail_on(verdict.DEFAULT_FAIL_ON) == set(verdict.ENDS) - {"warning"}


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "word", "code"),
        [
            (EngineError("worker-hung", "no answer in 60 s", where="rollout rank 1", hint="see its log"), "ENGINE FAILED", 6),
            (EnvironmentUnfitError("engine-missing", "vllm is not installed"), "CANNOT RUN", 7),
            (InconclusiveError("nothing-to-score", "no response token"), "INCONCLUSIVE", 5),
            (ContractError("not-comparable", "the sides differ"), "CONTRACT", 4),
        ],
    )
    def test_what_is_missing_because_of_a_failure_is_not_held_against_the_contract(
        self, error: RlmismatchError, word: str, code: int
    ) -> None:
        dead = compare({"model.norm:eps": (1e-6, unknown("the side did not run"))})
        result = judge(Facts(comparisons=dead, failures=(error,)))
        assert ends(result) == (word, code)
        assert len(result.reasons) == 1
        assert result.reasons[0].text.endswith(error.what)
        assert result.reasons[0].hint == error.hint

    def test_what_did_differ_still_decides(self) -> None:
        result = given(comparisons=SEMANTIC, failures=EVERYTHING["engine"]["failures"])
        assert ends(result) == ("CONTRACT", 4)
        assert kinds(result) == ["contract", "engine"]
        stale = (Gate(name="model.weights", equal=False, compared=2, differing=("w: stale",)),)
        assert ends(given(gates=stale, failures=EVERYTHING["engine"]["failures"])) == ("NOT COMPARABLE", 4)

    def test_a_usage_error_is_no_fact(self) -> None:
        with pytest.raises(ValueError, match="usage"):
            judge(Facts(failures=(UsageError("bad-option", "no such option"),)))


class TestPlants:
    def test_a_plant_that_is_named_is_a_verdict_like_any_other(self) -> None:
        plant = PlantInForce(id="rope_theta", side="trainer", what="another theta", expected="contract")
        result = given(comparisons=SEMANTIC, plants=(plant,))
        assert ends(result) == ("CONTRACT", 4)
        assert len(result.reasons) == 1

    def test_a_plant_that_nobody_names_proves_that_this_run_is_blind(self) -> None:
        plant = PlantInForce(id="eps", side="trainer", what="another eps", expected="contract")
        result = given(plants=(plant,))
        assert ends(result) == ("INCONCLUSIVE", 5)
        assert "eps@trainer" in result.reasons[0].text
        beside = given(comparisons=SEMANTIC, plants=(plant,))
        assert kinds(beside) == ["contract", "inconclusive"], "another axis' failure does not show the plant"

    def test_a_plant_that_is_only_to_be_recorded(self) -> None:
        plant = PlantInForce(id="backend_fell_back", side="trainer", what="another backend", expected="recorded")
        assert ends(given(plants=(plant,))) == ("OK", 0)


def test_judging_is_pure() -> None:
    facts = dataclasses.replace(CLEAN, comparisons=SEMANTIC, budget=(over(1.2),))
    assert judge(facts) == judge(facts)


def test_a_switch_that_both_sides_have_is_named_as_what_sets_it_alike() -> None:
    """One engine's mode turns it off and the other's does not: the modes themselves cannot be made to agree."""
    flags = "gemm.runtime_flags"
    (reason,) = given(comparisons=compare({f"{flags}:bf16_reduced_precision_reduction": (True, False)})).reasons[:1]
    assert reason.hint.startswith("--bf16-reduced-precision-reduction off sets both sides alike")
    assert f"--waive {flags}:bf16_reduced_precision_reduction" in reason.hint
    (reason,) = given(comparisons=compare({f"{flags}:tensor_parallel_size": (2, 1)})).reasons[:1]
    assert reason.hint == axes.by_id(flags).hint
