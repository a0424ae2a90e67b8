"""Limits, their parsing, and that nothing unmeasured is ever within."""

import dataclasses
import math

import pytest

from rlmismatch.drift import LIMITS, Budget, Drift, Invalid, OracleError
from rlmismatch.errors import UsageError

DRIFT = Drift(
    tokens=20, sequences=1, mean_abs=0.01, max=0.2, signed_mean=-0.005, token_mult_prob_error=1.02, k1=0.005, ess=0.9, bit_equal=8
)

OTHERS = ("ess", "bit_equal_share", "oracle_error_ratio")


def lines(budget, drift=DRIFT, **kwargs):
    return {line.limit: line for line in budget.check(drift, **kwargs)}


def test_defaults_are_the_fields_gate_and_twice_the_plain_error():
    budget = Budget()
    assert {name: getattr(budget, name) for name in LIMITS if getattr(budget, name) is not None} == {
        "token_mult_prob_error": 1.05,
        "oracle_error_ratio": 2.0,
    }


def test_a_line_has_limit_value_and_the_smallest_limit_that_passes():
    line = lines(Budget.parse("mean_abs=0.005"))["mean_abs"]
    assert (line.status, line.allowed, line.value, line.smallest_limit_that_passes) == ("over", 0.005, 0.01, 0.01)
    assert not line.ok
    again = lines(Budget.parse(f"mean_abs={line.smallest_limit_that_passes!r}"))["mean_abs"]
    assert again.ok


def test_signed_metrics_are_limited_in_size_and_floors_from_below():
    checked = lines(Budget.parse("signed_mean=0.004,ess=0.95,bit_equal_share=0.4"))
    assert checked["signed_mean"].value == 0.005
    assert not checked["signed_mean"].ok
    assert (checked["ess"].sense, checked["ess"].ok) == ("at least", False)
    assert checked["bit_equal_share"].ok


@pytest.mark.parametrize(
    "drift",
    [
        None,
        Drift(tokens=0, sequences=1, invalid=(Invalid(kind="not_finite", text="a has NaN"),)),
        dataclasses.replace(DRIFT, token_mult_prob_error=math.nan),
        dataclasses.replace(DRIFT, token_mult_prob_error=math.inf),
    ],
)
def test_what_was_not_measured_is_never_within(drift):
    line = lines(Budget(), drift)["token_mult_prob_error"]
    assert not line.ok
    assert line.why or line.value == math.inf


def test_every_limit_can_be_exceeded_and_met():
    worst = Drift(
        tokens=16,
        sequences=1,
        bit_equal=0,
        ess=0.1,
        **{n: 5.0 for n in LIMITS if n not in ("ess", "bit_equal_share", "oracle_error_ratio")},
    )
    text = ",".join(f"{name}=0.5" for name in LIMITS)
    oracle = {"trainer": OracleError(drift=worst, ratio=5.0)}
    assert [line.ok for line in Budget.parse(text).check(worst, oracle=oracle)] == [False] * len(LIMITS)
    best = Drift(
        tokens=16,
        sequences=1,
        bit_equal=16,
        ess=1.0,
        **{n: 0.0 for n in LIMITS if n not in ("ess", "bit_equal_share", "oracle_error_ratio")},
    )
    assert all(line.ok for line in Budget.parse(text).check(best, oracle={"trainer": OracleError(drift=best, ratio=0.0)}))


def test_the_oracle_limit_speaks_of_each_side():
    oracle = {"trainer": OracleError(drift=DRIFT, ratio=1.1), "rollout": OracleError(drift=DRIFT, ratio=2.5)}
    checked = lines(Budget(), oracle=oracle)
    assert checked["oracle_error_ratio (trainer)"].ok
    assert not checked["oracle_error_ratio (rollout)"].ok


def test_the_oracles_default_limit_needs_tokens():
    few = {"trainer": OracleError(drift=dataclasses.replace(DRIFT, tokens=15), ratio=2.5)}
    default, asked = (
        lines(budget, oracle=few)["oracle_error_ratio (trainer)"] for budget in (Budget(), Budget.parse("oracle_error_ratio=2"))
    )
    assert (default.status, default.ok, default.value) == ("not measured", True, None)
    assert "15 tokens" in default.why
    assert (asked.status, asked.ok) == ("over", False)


def test_recorded_values_have_the_limit_of_the_mean_ratio():
    name = "token_mult_prob_error (recorded)"
    assert name not in lines(Budget())
    off = dataclasses.replace(DRIFT, token_mult_prob_error=1512.8)
    for budget, drift, status in (
        (Budget(), off, "over"),
        (Budget(), DRIFT, "within"),
        (Budget.parse("token_mult_prob_error=2000"), off, "within"),
    ):
        (line,) = [x for x in budget.check(DRIFT, recorded=drift) if x.limit == name]
        assert line.status == status
    (line,) = [x for x in Budget().check(DRIFT, recorded=dataclasses.replace(DRIFT, token_mult_prob_error=None)) if x.limit == name]
    assert not line.ok


def test_a_missing_oracle_fails_only_a_limit_that_was_asked_for():
    default, asked = (lines(budget)["oracle_error_ratio"] for budget in (Budget(), Budget.parse("oracle_error_ratio=2")))
    assert (default.status, default.ok) == ("not measured", True)
    assert (asked.status, asked.ok) == ("not measured", False)


def test_an_unknown_limit_names_the_nearest():
    with pytest.raises(UsageError) as error:
        Budget.parse("mean_ab=0.1")
    assert (error.value.slug, error.value.hint) == ("budget-unknown-key", "did you mean 'mean_abs'?")
    with pytest.raises(UsageError, match="explicit"):
        Budget.parse("explicit=1")


@pytest.mark.parametrize(
    "text", ["", " , ", "mean_abs", "mean_abs=", "mean_abs=x", "mean_abs=nan", "mean_abs=inf", "max=-1", "max=1,max=2"]
)
def test_a_malformed_budget_is_refused(text):
    with pytest.raises(UsageError) as error:
        Budget.parse(text)
    assert error.value.slug == "budget-malformed"


def test_a_yaml_file_says_the_same(tmp_path):
    path = tmp_path / "budget.yaml"
    path.write_text("mean_abs: 0.01\nmax: 1\n")
    assert Budget.parse(str(path)) == Budget.parse("mean_abs=0.01,max=1")
    assert Budget.parse(str(path), "max=0.2") == Budget.parse("mean_abs=0.01", "max=0.2")


def test_no_text_is_the_default_budget():
    assert Budget.parse() == Budget()


@pytest.mark.parametrize(
    ("content", "slug"),
    [
        ("", "budget-malformed"),
        ("- 1\n", "budget-malformed"),
        ("max: [", "budget-malformed"),
        ("max: true\n", "budget-malformed"),
        ("mx: 1\n", "budget-unknown-key"),
    ],
)
def test_a_malformed_yaml_file_is_refused(tmp_path, content, slug):
    path = tmp_path / "budget.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        Budget.parse(str(path))
    assert error.value.slug == slug
    assert error.value.where == str(path)


def test_a_missing_yaml_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError) as error:
        Budget.parse(str(tmp_path / "none.yml"))
    assert error.value.slug == "file-unreadable"
