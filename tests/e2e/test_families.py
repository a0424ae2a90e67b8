"""The family commands on the real engines: every axis of the family has a row, and a knob does what it says on both sides."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from rlmismatch import axes
from tests.cli_runs import MASK, QUICK, TINY, TP2, Done, run, selected, side_by_side

pytestmark = pytest.mark.engines

REDUCES = ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits")
BASE = ("--ckpt", TINY, *MASK, *QUICK)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemm": ("gemm", (*BASE, *TP2)),
    "gemm, knobs": ("gemm", (*BASE, *TP2, "--kernel", "triton", "--forward-reduce", "rank_order")),
    "attention": ("attention", BASE),
    "attention, knobs": ("attention", (*BASE, "--attention", "off", "--rope", "unfused_fp32")),
    "attention, rounded": ("attention", (*BASE, *TP2, "--accum-dtype", "bf16", "--backend-candidate", "sdpa")),
    "attention, rounded on one side": ("attention", (*BASE, "--rollout.downcast-at", "per_block", "--backend-candidate", "flashinfer")),
    "attention, cp2": (
        "attention",
        (*BASE, *TP2, "--sp", "--cp", "2", "--cp-partition", "contiguous", "--waive", "attention.provenance:context_parallel_size"),
    ),
    "one axis": ("probe", (*BASE, "--axis", "model.norm")),
    **{f"logprob, {reduce}": ("logprob", (*BASE, *TP2, "--reduce", reduce)) for reduce in REDUCES},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> Iterator[Mapping[str, Future[Done]]]:
    """The selected runs, started; each is awaited by its own test."""
    folder, chosen = tmp_path_factory.mktemp("families"), selected(request, "name")
    cases = {
        key: functools.partial(run, command, *options, out=folder / key.replace(", ", "-"), python=preloaded)
        for key, (command, options) in RUNS.items()
        if key in chosen
    }
    with side_by_side(cases) as started:
        yield started


def rows(done: Done) -> dict[str, dict[str, Any]]:
    return {row["axis"]: row for row in done.report["axes"]}


def statuses(done: Done) -> dict[str, str]:
    return {axis: row["status"] for axis, row in rows(done).items()}


def knobs(done: Done) -> set[tuple[str, str, str, str]]:
    return {(k["knob"], k["side"], k["actual"], k["status"]) for k in done.report["knobs"]}


def on_both_sides(**values: str) -> set[tuple[str, str, str, str]]:
    return {(name, side, value, "applied") for name, value in values.items() for side in ("trainer", "rollout")}


def closed(done: Done) -> None:
    """Clean, and every control among them that each pin in force ran: closure bit-equal, native bits back."""
    done.exits(0)
    assert {row["unequal"] for row in done.report["closure"]} == {0}
    assert len(done.report["closure"]) >= 3


@pytest.mark.parametrize("name", ["gemm"])
def test_gemm(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert list(rows(done)) == [axis.id for axis in axes.family("gemm")]
    assert {statuses(done)[axis] for axis in ("gemm.runtime_flags", "rollout.all_reduce_backend")} == {"measured"}
    not_built = {axis.id for axis in axes.family("gemm") if axis.built == "not_built"}
    assert {axis for axis, status in statuses(done).items() if status == "not built"} == not_built
    for axis in ("gemm.kernel", "gemm.forward_reduce"):
        row = rows(done)[axis]
        assert (row["status"], row["ratio"]) == ("measured", "trainer/prefill")
        assert row["alone"] > 0
        assert row["last"] >= 0
    assert rows(done)["gemm.kernel"]["local"] > 0
    # What no gradient was taken for: the sum of dX has no order at TP2, as the live layer shows; the way into main_grad is not known.
    sum_, wgrad = rows(done)["gemm.dgrad_reduce"], rows(done)["gemm.wgrad_accumulate"]
    assert (sum_["status"], sum_["contract"]) == ("structural zero", "equal")
    assert sum_["why"] == "trainer TP2 with equal payload and accumulate dtype: one addition, no order"
    assert (wgrad["status"], wgrad["contract"], wgrad["why"]) == ("not run", "not applicable", "not measured: --grads")
    assert done.report["knobs"] == []


@pytest.mark.parametrize("name", ["gemm, knobs"])
def test_gemm_knobs_hold_their_pins_in_every_arm(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert knobs(done) == on_both_sides(**{"gemm.kernel": "triton", "gemm.forward_reduce": "rank_order"})
    assert (statuses(done)["gemm.kernel"], statuses(done)["gemm.forward_reduce"]) == ("pinned", "pinned")
    held = next(c for c in done.report["contract"] if (c["axis"], c["field"]) == ("gemm.forward_reduce", "engine"))
    assert {held[side]["value"] for side in ("trainer", "rollout")} == {"rank_order"}  # not what the engines would do by themselves


@pytest.mark.parametrize("name", ["attention"])
def test_attention(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert list(rows(done)) == [axis.id for axis in axes.family("attention")]
    materialization = rows(done)["attention.materialization"]
    assert (materialization["status"], materialization["ratio"]) == ("measured", "prefill/decode")
    assert materialization["alone"] is not None
    for axis in ("attention.rope", "attention.precision"):
        row = rows(done)[axis]
        assert (row["status"], row["ratio"]) == ("measured", "trainer/prefill")
        assert min(row["local"], row["alone"], row["last"]) > 0


@pytest.mark.parametrize("name", ["attention, knobs"])
def test_attention_off_is_our_kernel_in_both_engines(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert knobs(done) == on_both_sides(**{"attention": "off", "attention.rope": "unfused_fp32"})
    assert statuses(done)["attention.precision"] == statuses(done)["attention.rope"] == "pinned"
    assert done.ratio("trainer/prefill")["mean_abs"] > 0  # the other operations are native
    assert done.ratio("prefill/decode")["mean_abs"] == 0


@pytest.mark.parametrize("name", [key for key in RUNS if key.startswith("logprob")])
def test_each_way_to_reduce_is_what_both_engines_do(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert list(rows(done)) == [axis.id for axis in axes.family("logprob")]
    assert knobs(done) == on_both_sides(**{"logprob.reduce": name.removeprefix("logprob, ")})
    assert statuses(done)["logprob.reduce"] in ("measured", "pinned")
    assert rows(done)["logprob.reduce"]["contract"] == "equal"


@pytest.mark.parametrize("name", ["one axis"])
def test_one_axis_by_name(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    closed(done)
    assert list(rows(done)) == ["model.norm"]
    row = rows(done)["model.norm"]
    assert row["status"] == "measured"
    assert min(row["local"], row["alone"], row["last"]) > 0


@pytest.mark.parametrize("name", ["attention, cp2"])
def test_attention_under_context_parallelism(name: str, runs: Mapping[str, Future[Done]]) -> None:
    """Four trainer ranks against two of the rollout: unequal CP is accepted by name, what follows from it with it, and it closes."""
    done = runs[name].result()
    closed(done)
    waived = {f"{c['axis']}:{c['field']}" for c in done.report["contract"] if c["outcome"] == "waived"}
    merge = {f"attention.merge_order:{field}" for field in ("global_block_index", "acc_dtype", "merge_order", "cp_partition")}
    assert waived == {"attention.provenance:context_parallel_size", *merge}
    assert any("attention is ours (the pin) in every arm" in note for note in done.report["notes"])
    assert next(side["cp"] for side in done.report["header"]["sides"] if side["side"] == "trainer") == 2


@pytest.mark.parametrize("name", ["attention, rounded"])
def test_the_pins_arithmetic_is_turned_on_both_sides_and_still_closes(name: str, runs: Mapping[str, Future[Done]]) -> None:
    """Rounded running sums lie at absolute positions: prefill, chunks and decode, and both engines, give one number."""
    done = runs[name].result()
    closed(done)
    asked = {"attention.accum_dtype": "bf16", "attention.backend_candidate": "sdpa"}
    assert knobs(done) == on_both_sides(**asked)
    assert rows(done)["attention.precision"]["status"] == "pinned"
    readings = {(c["axis"], c["field"]): c for c in done.report["contract"]}
    assert readings["attention.precision", "accum_dtype"]["trainer"]["value"] == "bfloat16"
    assert readings["attention.backend_reuse", "backend_capability"]["outcome"] == "equal"
    measured = {(m["side"], m["what"]): m for m in done.report["measures"] if m["axis"].startswith("attention.")}
    # What ran in every arm is named by its roundings.
    for side in ("trainer", "rollout"):
        ran = {what for s, what in measured if s == side}
        named = [what for what in ran if what.startswith("explained best by")]
        assert named == ["explained best by: scores float32, probabilities float32, a cast per 16 keys"]
        assert {f"sdpa, {form}: mean error over mean size" for form in ("full", "chunked", "decode")} <= ran


@pytest.mark.parametrize("name", ["attention, rounded on one side"])
def test_the_pins_arithmetic_on_one_side_breaks_the_contract(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result().exits(4)
    said = {(r["axis"], r["text"].split(" ")[0]) for r in done.reasons if r["kind"] == "contract"}
    assert ("attention.precision", "downcast_at") in said
    assert ("attention.backend_reuse", "backend_capability") in said  # FlashInfer is not here: what it can do is not known
    refused = [k for k in done.report["knobs"] if k["knob"] == "attention.backend_candidate"]
    assert {(k["side"], k["status"], k["reason"]) for k in refused} == {
        (side, "unsupported", "FlashInfer needs a GPU") for side in ("trainer", "rollout")
    }
