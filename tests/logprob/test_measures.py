"""The log-prob measures as a pure function of two captures: right numbers on honest ones, and a defect for every kind of fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlmismatch.assemble import logprob as measures
from rlmismatch.assemble.defects import over_limit
from rlmismatch.assemble.logprob import Captured
from rlmismatch.report.model import MeasureRow
from rlmismatch.transforms import Chain, Step

ROWS, REAL, PADDED = 12, 200, 256
TEMPERATURE = Chain(steps=(Step(name="temperature", value=0.6),))


def captured(chain: Chain = Chain(), seed: int = 0, **tensors: torch.Tensor) -> Captured:  # noqa: B008 - frozen
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, PADDED, generator=generator) * 2
    logits[:, REAL:] = 0.0
    own = Captured(tensors={"logits": logits, "targets": torch.arange(ROWS) * 7}, chain=chain, vocab_size=REAL)
    recorded = own.logprob().float().double()
    return dataclasses.replace(own, tensors={**own.tensors, "recorded": recorded, "hidden": torch.ones(ROWS, 4), **tensors})


def value(rows: Any, words: str) -> MeasureRow:
    (row,) = [r for r in rows if words in r.what]
    return row


def test_the_padding_bias_is_its_closed_form() -> None:
    bias, closed = measures._padding(captured())
    logits = captured().tensors["logits"].double()
    expected = logits[:, :REAL].logsumexp(1) - logits.logsumexp(1)
    assert bias.value == pytest.approx(float(expected.mean()), abs=1e-12)
    assert bias.value is not None
    assert bias.value < -1e-3
    assert closed.ok
    assert closed.value is not None
    assert closed.value <= 1e-12


def test_without_padded_rows_there_is_no_bias_to_measure() -> None:
    own = captured()
    assert list(measures._padding(dataclasses.replace(own, vocab_size=PADDED))) == []


@pytest.mark.parametrize(("trainer", "rollout", "tile"), [(256, 256, 64), (128, 128, 64), (64, 128, 64), (64, 96, 32)])
def test_tiles_do_not_see_the_shards(trainer: int, rollout: int, tile: int) -> None:
    by_shards, tiled = measures._shards(captured(), {"trainer": trainer, "rollout": rollout})
    assert by_shards.ok
    assert tiled.what.endswith(f"tiles of {tile}")
    assert tiled.value == 0.0
    assert list(measures._shards(captured(), {"trainer": trainer})) == []


def test_the_order_of_arrival_moves_bits_from_three_shards_on() -> None:
    assert list(measures._merge_orders(captured(), 2)) == []
    (row,) = measures._merge_orders(captured(), 4)
    assert "4 shards in 24 orders" in row.what
    assert row.value is not None
    assert 0 < row.value < 3e-6


def test_a_way_that_is_off_is_a_defect_of_reduce() -> None:
    good = captured()
    exact = good.logprob()
    bad = captured(**{"reduce/allgather_logits": exact, "reduce/allreduce_partials": exact + 1e-5})
    rows = tuple(measures._reduces({"trainer": bad}))
    assert [r.ok for r in rows] == [True, False]
    (defect,) = over_limit(rows)
    assert defect.axis == "logprob.reduce"
    assert "trainer allreduce_partials" in defect.text


class _Evidence:
    """No readings: the candidates are what the two sides were asked for."""

    def side(self, name: str) -> None:
        return None


def chains(trainer: Captured, rollout: Captured) -> tuple[MeasureRow, ...]:
    return tuple(measures._chains({"trainer": trainer, "rollout": rollout}, _Evidence()))  # type: ignore[arg-type]


def test_the_chain_of_each_side_is_named_from_its_recorded_values() -> None:
    raw_recorded = captured().tensors["recorded"]
    rows = chains(captured(TEMPERATURE), captured(TEMPERATURE, recorded=raw_recorded))
    assert [r.what for r in rows] == ["recorded values explained by: temperature(0.6)", "recorded values explained by: raw"]
    assert all(r.note == "rollout: raw; trainer: temperature(0.6)" for r in rows)
    assert all(r.ok for r in rows)


def test_values_that_no_chain_explains_are_a_defect() -> None:
    noise = captured(TEMPERATURE).tensors["recorded"] + torch.linspace(0, 0.1, ROWS, dtype=torch.float64)
    rows = chains(captured(TEMPERATURE), captured(TEMPERATURE, recorded=noise))
    assert [r.ok for r in rows] == [True, False]
    assert "none of the known" in rows[1].what


def test_a_nucleus_is_named_with_the_mass_it_kept() -> None:
    nucleus = Chain(steps=(Step(name="top_p", value=0.8),))
    base = captured(nucleus)
    targets = base.tensors["logits"][:, :REAL].argmax(1)
    rollout = dataclasses.replace(base, tensors={**base.tensors, "targets": targets})
    rollout = dataclasses.replace(rollout, tensors={**rollout.tensors, "recorded": rollout.logprob()})
    rows = chains(captured(), rollout)
    offset = value(rows, "mass kept")
    assert offset.value is not None
    assert 0 < offset.value <= 0.224  # -log(0.8), and the nucleus holds at least that much


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_shift_of_the_targets_is_found(shift: int) -> None:
    own = captured()
    shifted = dataclasses.replace(own, tensors={**own.tensors, "recorded": own.logprob(shift=shift)})
    (row,) = measures._shifts({"rollout": shifted})
    assert row.value == abs(shift)
    assert row.ok == (shift == 0)


def test_head_and_log_softmax_add_up_to_the_drift() -> None:
    trainer, other = captured(), captured()
    moved = other.tensors["logits"] + 1e-3 * torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(3))
    rollout = dataclasses.replace(other, tensors={**other.tensors, "logits": moved})
    rollout = dataclasses.replace(rollout, tensors={**rollout.tensors, "recorded": rollout.logprob() + 2e-4})
    head, lse, rest = measures._head_and_lse(trainer, rollout)
    assert head.value == pytest.approx(float((trainer.logprob() - rollout.logprob()).abs().mean()))
    assert lse.value == pytest.approx(2e-4, abs=1e-6)
    assert rest.ok


def test_unequal_hidden_rows_are_said_and_not_compared() -> None:
    (row,) = measures._head_and_lse(captured(), captured(hidden=torch.zeros(ROWS, 4)))
    assert row.value is None
    assert "differ" in row.note


def test_a_gradient_that_is_cast_or_missing_is_told_apart() -> None:
    facts = {
        "backward/plain": torch.tensor([1e-7, 1e-9, 1e-2, 0.5, 0.0, 1e-7]),
        "backward/cast": torch.tensor([1e-3, 1.4e-5, 1e-2, 0.5, 1.0, 1e-3]),
        "backward/zero": torch.tensor([1.0, 5e-3, 1e-2, 0.0, 0.0, 0.9]),
    }
    rows = tuple(measures._backward(captured(**facts)))
    assert [r.ok for r in rows] == [True, True, False]
    assert "cast to bfloat16" in rows[1].note


def test_nan_is_within_no_limit() -> None:
    assert not MeasureRow(axis="logprob.reduce", what="x", value=float("nan"), limit=1.0).ok


CUT = Chain(steps=(Step(name="top_k", value=100),))


def test_a_token_that_is_cut_off_on_both_sides_is_no_difference_and_on_one_it_is() -> None:
    own = captured(CUT)
    exact = own.logprob()
    assert 0 < int(exact.isinf().sum()) < ROWS
    named = {"impl/right": exact, "impl/wrong": captured().logprob(), "reduce/right": exact, "reduce/wrong": captured().logprob()}
    both = dataclasses.replace(own, tensors={**own.tensors, **named})
    for rows in (list(measures._impls(both)), list(measures._reduces({"trainer": both}))):
        assert [row.ok for row in rows] == [True, False]
        assert value(rows, "right").value == 0.0


def test_a_side_that_cuts_off_tokens_alone_still_adds_up() -> None:
    rows = list(measures._head_and_lse(captured(CUT), captured()))
    assert value(rows, "the two against the whole").ok


def test_a_recorded_value_that_is_no_number_is_explained_by_nothing() -> None:
    a = torch.tensor([1.0, torch.nan, 2.0, -torch.inf])
    assert measures._mean_or_inf(a, a) == torch.inf
    b = a.nan_to_num(0.0, neginf=-torch.inf)
    assert measures._mean_or_inf(b, b + 3) == pytest.approx(2.25)
    assert measures._mean_or_inf(b[3:], b[3:]) == torch.inf  # nothing was compared
    assert measures._mean_or_inf(b, b.nan_to_num(neginf=-5.0)) == torch.inf
