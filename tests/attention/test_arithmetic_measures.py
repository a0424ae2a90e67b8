"""The measures of merge order, precision and backward on operands whose arithmetic is known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlmismatch import attention_policies as policies
from rlmismatch.assemble import attention_trainer
from rlmismatch.attention_policies import POLICIES, Operands, Policy
from rlmismatch.report.model import MeasureRow

TOKENS, HEADS, KV_HEADS, DIM = 80, 4, 2, 32
SOUND = {f"backward/native/layers.0.{name}": torch.tensor([0.1, 0.004, 1.0, 1.0001, 1.0]).double() for name in ("dq", "dk", "dv")}


def captured(policy: Policy, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A capture of one layer whose output `policy` computed."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(TOKENS, n, DIM, generator=generator).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    given = Operands(q_THD=q, k_THD=k, v_THD=v, scale=DIM**-0.5)
    return {"layers.0.q": q, "layers.0.k": k, "layers.0.v": v, "layers.0.out": policies.simulate(given, policy)}


def precision(tensors: dict[str, torch.Tensor]) -> dict[str, MeasureRow]:
    rows = attention_trainer.precision("trainer", attention_trainer.layers(tensors))
    return {row.what.partition(":")[0]: row for row in rows}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_policy_that_computed_an_output_is_named(policy: Policy) -> None:
    row = precision(captured(policy))["explained best by"]
    assert row.what == f"explained best by: {policy}"
    assert row.value == 0.0
    assert row.note.startswith(f"{TOKENS * HEADS * DIM} of {TOKENS * HEADS * DIM} elements bit-equal; next: ")


def test_what_no_rounding_shows_is_unobservable() -> None:
    """One token: its only weight is 1 whatever is rounded, and its output is V."""
    tensors = {name: x[:1] for name, x in captured(Policy()).items()}
    assert precision(tensors)["explained best by"].what.startswith(f"explained best by: unobservable here: {len(POLICIES)} policies")


def test_fp8_keys_and_values_move_the_output_by_what_they_keep() -> None:
    row = precision(captured(Policy()))["simulated"]
    assert row.value is not None
    assert 0.005 < row.value < 0.05  # three bits of mantissa: up to 6 % of an element, averaged over many


def test_the_envelope_of_merge_orders_is_small_and_the_fixed_fold_holds_its_limit() -> None:
    rows = list(attention_trainer.merge_orders("rollout", attention_trainer.layers(captured(Policy()))))
    envelopes = [row for row in rows if "envelope" in row.what]
    assert [row.what for row in envelopes] == [
        "2 KV splits: envelope of 2 merge orders",
        "4 KV splits: envelope of 24 merge orders",
        "2 KV splits of 64 keys: envelope of 2 merge orders",
    ]
    assert envelopes[1].value is not None
    assert 0 < envelopes[1].value < 1e-5
    limited = [row for row in rows if row.limit is not None]
    assert len(limited) == 3
    assert all(row.ok for row in limited)


def test_operands_that_are_not_finite_pass_nowhere() -> None:
    tensors = captured(Policy())
    tensors["layers.0.v"][3, 0, 0] = math.nan
    rows = list(attention_trainer.merge_orders("trainer", attention_trainer.layers(tensors)))
    assert [row.ok for row in rows if row.limit is not None] == [False] * 3


def test_a_sound_backward_holds_its_limits() -> None:
    rows = list(attention_trainer.backward({**captured(Policy()), **SOUND}))
    assert len(rows) == 6
    assert all(row.ok and row.limit for row in rows)
    assert rows[0].note == "three runs bit-equal"


@pytest.mark.parametrize(
    ("facts", "broken"),
    [
        ([0.1, 0.004, 1.0, 1.02, 1.0], "slope over the exact one, minus 1"),
        ([0.9, 0.4, 1.0, 1.0, 1.0], "mean error over mean size"),
        ([math.nan] * 4 + [1.0], "slope over the exact one, minus 1"),
    ],
)
def test_a_wrong_gradient_is_over_its_limit(facts: list[float], broken: str) -> None:
    rows = attention_trainer.backward({**captured(Policy()), **SOUND, "backward/native/layers.1.dk": torch.tensor(facts).double()})
    assert f"dk of native, {broken}" in [row.what for row in rows if not row.ok]


def test_a_backward_that_does_not_repeat_says_so() -> None:
    facts = torch.tensor([0.1, 0.004, 1.0, 1.0, 0.0]).double()
    rows = list(attention_trainer.backward({**captured(Policy()), "backward/native/layers.0.dq": facts}))
    assert rows[0].note == "three runs differ: the backward adds in no fixed order"
    assert all(row.ok for row in rows)  # nobody claimed otherwise


@pytest.mark.parametrize("repeats", [1.0, 0.0])
def test_a_claim_of_determinism_is_held_to(repeats: float) -> None:
    facts = torch.tensor([0.1, 0.004, 1.0, 1.0, repeats]).double()
    rows = list(attention_trainer.backward({**captured(Policy()), "backward/native/layers.0.dq": facts}, deterministic=True))
    assert [row.ok for row in rows if "deterministic_mode" in row.what] == [repeats == 1.0]


def test_the_captures_are_cut_to_what_is_simulated() -> None:
    many = {name: x.repeat(5, 4, 1) for name, x in captured(Policy()).items()}
    (given,) = attention_trainer.layers(many).values()
    assert given.q_THD.shape == (256, 8, DIM)
    assert dataclasses.replace(given).scale == DIM**-0.5


def test_a_few_tokens_have_no_limit() -> None:
    wrong = {"backward/native/layers.0.dk": torch.tensor([0.1, 0.004, 1.0, 1.01, 1.0]).double()}
    for tokens, ok in ((15, True), (16, False)):
        few = {name: x[:tokens] for name, x in captured(Policy()).items()}
        slope = next(iter(attention_trainer.backward({**few, **wrong})))
        assert (slope.ok, "too few" in slope.note) == (ok, ok)
