"""The GEMM measures as a pure function of captures: limits, causes, promises, and the page that shows them."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.arms import GEMM
from rlmismatch.assemble import gemm
from rlmismatch.assemble.defects import over_limit
from rlmismatch.engines.gemm_facts import AloneFacts, ReplayFacts, SumFacts, packed
from rlmismatch.report import replay as page
from rlmismatch.report.blocks import Items, Table
from rlmismatch.report.model import Gate
from rlmismatch.verdict import Facts, judge

HONEST = SumFacts(count=100, unequal=0, unequal_rounded=0, sum_error=0.1, error=0.2, scale=100.0, largest=0.01)
EXACT = ReplayFacts(count=80, unequal_pin=0, unequal_full=0, native_error=0.1, pin_error=0.1, scale=80.0, largest_full=0.0, largest_pin=0.0)


def book(**sides: dict[str, torch.Tensor]) -> Any:
    arms = {side: {GEMM: SimpleNamespace(boundaries=tensors)} for side, tensors in sides.items()}
    return SimpleNamespace(arms={"trainer": {}, "rollout": {}} | arms)


def sums(**ways: SumFacts) -> dict[str, torch.Tensor]:
    out = {f"sum/{way}/{payload}/{rows}": packed(f) for way, f in ways.items() for payload in ("bfloat16", "float32") for rows in (4, 83)}
    return {**out, "sum/rank_order/bfloat16/4": packed(HONEST), "sum/rank_order/bfloat16/83": packed(HONEST)} | {
        f"sum/rank_order/float32/{rows}": packed(HONEST) for rows in (4, 83)
    }


def test_an_honest_sum_is_within_its_limit_and_a_lost_partial_is_a_defect_of_the_backend() -> None:
    lost = dataclasses.replace(HONEST, error=30.0, sum_error=30.0, unequal=99)
    tensors = sums(all_reduce=lost) | {"backend/shm/4": packed(HONEST), "backend/shm/83": packed(HONEST)}
    rows = gemm.backends(book(rollout=tensors))
    assert (rows[0].what, rows[0].side, rows[0].value) == ("error of the worst all-reduce", "", 0.3)
    assert [(r.what.split(",")[0], r.ok) for r in rows[1:]] == [
        ("as its layers call it", False),
        ("as its layers call it", False),
        ("shm", True),
        ("shm", True),
    ]
    first = over_limit(rows)[0]
    assert first.axis == "rollout.all_reduce_backend"
    assert first.text.startswith("rollout as its layers call it, 4 rows")


def test_nan_is_within_no_limit() -> None:
    rows = gemm.backends(book(rollout=sums(all_reduce=dataclasses.replace(HONEST, error=math.nan))))
    assert rows[0].value != rows[0].value
    assert not any(r.ok for r in rows[1:])
    late = sums(all_reduce=HONEST) | {"sum/all_reduce/bfloat16/83": packed(dataclasses.replace(HONEST, error=math.nan))}
    (summary,) = (r for r in gemm.sums(book(trainer=late)) if r.what == "error of the sum, bfloat16 payload")
    assert math.isnan(summary.value)
    zeros = dataclasses.replace(HONEST, scale=0.0)
    assert not any(r.ok for r in gemm.backends(book(rollout=sums(all_reduce=zeros)))[1:])


def test_order_and_dtype_are_told_apart() -> None:
    other = dataclasses.replace(HONEST, unequal=7, unequal_rounded=1)
    tensors = sums(all_reduce=HONEST, reduce_scatter=HONEST) | {"sum/reduce_scatter/float32/83": packed(other)}
    summary = {r.what: r.value for r in gemm.sums(book(trainer=tensors)) if not r.side}
    assert summary == {
        "elements not as in rank order, bfloat16 payload": 0.0,
        "elements not as in rank order, float32 payload": 7.0,
        "error of the sum, bfloat16 payload": 0.002,
        "error of the sum, float32 payload": 0.002,
    }


def replays(**changes: ReplayFacts) -> dict[str, torch.Tensor]:
    names = [f"layers.{i}.{column}" for i in (0, 1, 10) for column in ("q_proj", "down_proj")] + ["lm_head"]
    facts = {f"{name}/{rows}": EXACT for name in names for rows in ("1", "64", "full")} | changes
    return {f"replay/{name}": packed(fact) for name, fact in facts.items()}


MOVED = {
    "layers.1.q_proj/1": dataclasses.replace(EXACT, unequal_full=5, largest_full=0.5),
    "layers.10.down_proj/64": dataclasses.replace(EXACT, unequal_full=1),
}


def test_rows_stand_in_the_order_of_the_forward_pass() -> None:
    rows = gemm.replay(book(trainer=replays()))
    columns = [f"layers.{i}.{column}" for i in (0, 1, 10) for column in ("q_proj", "down_proj")]
    assert [r.product for r in rows][::3] == [*columns, "lm_head"]
    assert [r.rows for r in rows[:3]] == ["1", "64", "full"]


def promised(**sides: str) -> Any:
    return SimpleNamespace(promised=sides)


def test_a_moving_row_breaks_a_promise_and_is_nothing_without_one() -> None:
    captures = book(trainer=replays(**MOVED), rollout=replays())
    assert gemm.broken_promises(promised(rollout="--batch-invariant on"), captures) == ()
    (broken,) = gemm.broken_promises(promised(trainer="--batch-invariant on", rollout="read back"), captures)
    assert broken.axis == "gemm.kernel"
    assert broken.text == (
        "trainer layers.1.q_proj gives other bits at M = 1 than at all rows (5 of 80 elements, and 1 more products),"
        " though batch invariance is promised (--batch-invariant on)"
    )
    gates = [Gate(name=name, equal=True, compared=1) for name in ("model.tokens", "model.weights", "model.mode")]
    reasons = judge(Facts(promises=(broken,), gates=gates)).reasons
    (reason,) = [r for r in reasons if r.axis == "gemm.kernel"]
    assert (reason.kind, reason.tier) == ("contract", "semantic")


def test_an_engine_that_moves_as_a_whole_breaks_it_too() -> None:
    moved = {"alone/decode": packed(AloneFacts(tokens=8, unequal=3, largest=0.1))}
    (broken,) = gemm.broken_promises(promised(rollout="read back"), book(rollout=replays() | moved))
    assert broken.axis == "gemm.runtime_flags"
    assert "3 of 8 log-probs move" in broken.text
    whole, row = gemm.alone(book(rollout=moved))
    assert (whole.value, whole.side, whole.note) == (3.0, "", "of 8")
    assert (row.value, row.unit, row.side, row.ok) == (3.0, "tokens", "rollout", True)


def test_a_promise_that_nothing_was_held_against_is_no_pass() -> None:
    given = promised(trainer="--batch-invariant on", rollout="read back")
    tried = replays() | {"alone/forward": packed(AloneFacts(tokens=8, unequal=0, largest=0.0))}
    kept, untried = gemm.controls(given, book(trainer=tried))
    assert (kept.ok, untried.ok, untried.got) == (True, False, "not tried in this run")
    only_full = {name: facts for name, facts in tried.items() if not name.endswith(("/1", "/64"))}
    assert [c.ok for c in gemm.controls(given, book(trainer=only_full, rollout=replays()))] == [False, False]
    assert gemm.controls(promised(), book()) == ()


def test_collectives_of_steps_are_listed_and_those_of_trials_are_not() -> None:
    tensors = {
        "collective/decode/all_reduce/shm/bfloat16/512": torch.tensor([15.0, 3.0]),
        "collective/prefill/all_reduce/shm/bfloat16/8576": torch.tensor([5.0, 5.0]),
        "collective/other/all_gather/shm/bfloat16/64": torch.tensor([1.0, 0.0]),
    }
    rows = gemm.collectives(book(rollout=tensors))
    assert [(r.phase, r.backend, r.size_bytes, r.calls, r.per_step) for r in rows] == [
        ("prefill", "shm", 8576, 5, 1.0),
        ("decode", "shm", 512, 15, 5.0),
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_page_names_the_worst_and_counts_products(verbose: bool) -> None:
    section = page.products(gemm.replay(book(trainer=replays(**MOVED))), verbose=verbose)
    assert section is not None
    items, table = section.blocks
    assert isinstance(items, Items)
    assert isinstance(table, Table)
    assert items.items[0].tail == "the pin's bits in 7 of 7 products, the same bits at every M in 5"
    assert items.items[0].mark == "warn"
    assert len(table.rows) == (21 if verbose else 3)
    if not verbose:
        line = {c.header or c.unit: cell.text for c, cell in zip(table.columns, table.rows[0], strict=True)}
        assert (line["product"], line["another"], line["most in"]) == ("q_proj", "0", "layers.1, M = 1")


def test_where_the_pin_adds_in_ascending_order_another_kernel_is_said_to_add_otherwise() -> None:
    rows = gemm.replay(book(trainer=replays(**{"layers.0.q_proj/full": dataclasses.replace(EXACT, unequal_pin=3)})))
    section = page.products(rows, ascending={"trainer"}, verbose=False)
    assert section is not None
    assert isinstance(section.blocks[0], Items)
    assert section.blocks[0].items[0].tail.endswith("K not added in ascending order (split, or by another tree) in 1")


def test_nothing_captured_shows_nothing() -> None:
    assert page.products((), verbose=True) is None
    assert page.collectives((), verbose=True) is None
    empty = book()
    assert (gemm.replay(empty), gemm.collectives(empty), gemm.sums(empty), gemm.backends(empty), gemm.alone(empty)) == ((), (), (), (), ())
