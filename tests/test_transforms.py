"""Transforms of logits: order, what each step does, and which lists count as candidates."""

from __future__ import annotations

import math

import pytest
import torch

from rlmismatch.errors import UsageError
from rlmismatch.transforms import NEUTRAL, Chain, Step, candidates, parse_order, parse_texts

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]], dtype=torch.float64)


def chain(**values: float) -> Chain:
    return Chain.of(values)


def kept(x_TV: torch.Tensor) -> list[int]:
    return x_TV[0].isfinite().nonzero()[:, 0].tolist()


def test_neutral_values_are_no_steps() -> None:
    assert Chain.of(dict(NEUTRAL)) == Chain()
    assert torch.equal(Chain().apply(LOGITS), LOGITS)


def test_steps_run_in_the_order_given() -> None:
    capped_first = chain(soft_cap=2.0, logit_scale=3.0).apply(LOGITS)
    scaled_first = Chain.of({"soft_cap": 2.0, "logit_scale": 3.0}, ("logit_scale", "soft_cap")).apply(LOGITS)
    assert torch.equal(capped_first, torch.tanh(LOGITS / 2) * 2 * 3)
    assert torch.equal(scaled_first, torch.tanh(LOGITS * 3 / 2) * 2)
    assert not torch.allclose(capped_first, scaled_first)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),  # the first token alone holds 0.64
        ({"top_p": 0.7}, [0, 1]),
        ({"min_p": 0.2}, [0, 1]),  # exp(-1) is above, exp(-2) below
        ({"top_k": 1, "top_p": 0.99}, [0]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ],
)
def test_truncation_keeps_the_likeliest(values: dict[str, float], expected: list[int]) -> None:
    out = chain(**values).apply(LOGITS)
    assert kept(out) == expected
    assert torch.equal(out[:, expected], LOGITS[:, expected])


def test_the_kept_mass_is_the_offset_of_every_kept_token() -> None:
    shift = (chain(top_p=0.7).apply(LOGITS).log_softmax(-1) - LOGITS.log_softmax(-1))[0, :2]
    assert torch.allclose(shift, torch.full((2,), -math.log(float(LOGITS.softmax(-1)[0, :2].sum())), dtype=torch.float64))


def test_input_is_left_as_it_is() -> None:
    x = LOGITS.clone()
    chain(soft_cap=1.0, logit_scale=2.0, temperature=0.5, min_p=0.1, top_k=3, top_p=0.9).apply(x)
    assert torch.equal(x, LOGITS)


def test_nan_stays_nan() -> None:
    x = LOGITS.clone()
    x[0, 2] = math.nan
    assert chain(soft_cap=1.0, temperature=0.5).apply(x)[0, 2].isnan()


def test_texts_come_back() -> None:
    c = chain(soft_cap=30.0, temperature=0.6, top_p=0.8)
    assert c.texts == ["soft_cap(30)", "temperature(0.6)", "top_p(0.8)"]
    assert parse_texts(c.texts) == c
    assert str(c) == "soft_cap(30) then temperature(0.6) then top_p(0.8)"
    assert str(Chain()) == "raw"


def test_only_elementwise_steps_run_on_a_shard() -> None:
    assert chain(soft_cap=1.0, logit_scale=2.0, temperature=3.0).elementwise
    assert not chain(top_k=3).elementwise


@pytest.mark.parametrize(("values", "temperature"), [({}, 1.0), ({"temperature": 0.6}, 0.6), ({"temperature": 0.6, "top_k": 3}, None)])
def test_a_temperature_alone_is_known_as_such(values: dict[str, float], temperature: float | None) -> None:
    assert chain(**values).only_temperature == temperature


def test_candidates_hold_every_order_and_subset_the_asked_one_first() -> None:
    asked = chain(soft_cap=2.0, logit_scale=3.0)
    found = candidates(asked)
    assert found[0] == asked
    assert [str(c) for c in found[1:]] == ["raw", "soft_cap(2)", "logit_scale(3)", "logit_scale(3) then soft_cap(2)"]


def test_candidates_never_hold_one_step_twice() -> None:
    found = candidates(chain(temperature=0.6), chain(temperature=0.7))
    assert {str(c) for c in found} == {"temperature(0.6)", "temperature(0.7)", "raw"}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.0), ("top_p", 1.1), ("top_k", 1.5), ("min_p", -0.1), ("soft_cap", math.nan), ("temprature", 1.0)]
)
def test_nonsense_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError):
        Step(name=name, value=value)


def test_an_order_that_leaves_out_a_step_with_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves out temperature"):
        Chain.of({"temperature": 0.6, "top_k": 3}, ("top_k",))


@pytest.mark.parametrize("text", ["temperature,top_q", "top_k,top_k"])
def test_a_malformed_order_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="transform-chain"):
        parse_order(text)
