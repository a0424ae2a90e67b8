"""``rlmismatch gemm`` on both real engines: what a clean run measures, what forced sums and flags come to, and a promise that is broken."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from tests.cli_runs import MASK, MID, QUICK, TINY, TP2, Done, run, side_by_side

BOTH_LOW = ("--trainer.bf16-reduced-precision-reduction", "off", "--rollout.bf16-reduced-precision-reduction", "off")
FLAGS = ("--deterministic-mode", "on", "--tf32", "off", *BOTH_LOW)
TP2_SP = ("--tensor-parallel-size", "2", "--sequence-parallel", "on")
OWN_SUMS = ("--trainer.forward-reduce", "rank_order", "--rollout.forward-reduce", "reduce_scatter")
RUNS: Mapping[str, tuple[str, ...]] = {
    "forced": ("--ckpt", TINY, *TP2_SP, "--all-reduce-backend", "gloo", "--forward-reduce", "all_reduce", *FLAGS, "--grads"),
    "one sided": ("--ckpt", TINY, *TP2, *OWN_SUMS, "--all-reduce-backend", "custom", "--trainer.batch-invariant", "on"),
    "promised": ("--ckpt", MID, "--rollout.batch-invariant", "on"),
}
pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> Iterator[Mapping[str, Future[Done]]]:
    folder = tmp_path_factory.mktemp("gemm")
    jobs = {
        name: functools.partial(run, "gemm", *MASK, *QUICK, *options, out=folder / name.replace(" ", "-"), python=preloaded)
        for name, options in RUNS.items()
    }
    with side_by_side(jobs) as started:
        yield started


def knobs(done: Done) -> dict[tuple[str, str], tuple[str, str]]:
    """(knob, side) -> (actual, status)."""
    return {(k["knob"].removeprefix("gemm."), k["side"]): (k["actual"], k["status"]) for k in done.report["knobs"]}


def readings(done: Done, axis: str, side: str) -> dict[str, Any]:
    return {c["field"]: c[side]["value"] for c in done.report["contract"] if c["axis"] == axis}


def test_what_was_asked_for_ran_and_is_read_back(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["forced"].result().exits(0)
    assert set(knobs(done).values()) == {("gloo", "applied"), ("on", "applied"), ("off", "applied"), ("all_reduce", "applied")}
    sums = [c for c in done.report["collectives"] if c["op"] == "all_reduce"]
    assert {(c["backend"], c["per_step"]) for c in sums if c["phase"] == "decode"} == {("gloo", 5.0)}  # an embedding, two layers
    assert {c["backend"] for c in sums} == {"gloo"}
    decode, prefill = ({c["size_bytes"] for c in sums if c["phase"] == phase} for phase in ("decode", "prefill"))
    assert max(decode) < max(prefill)
    assert readings(done, "rollout.all_reduce_backend", "rollout")["actual_backends"] == {"decode": ["gloo"], "prefill": ["gloo"]}
    trainer = readings(done, "gemm.runtime_flags", "trainer")
    assert (trainer["deterministic_mode"], trainer["nccl_algo"]) == (True, "Ring (one fixed choice)")
    assert trainer["bf16_reduced_precision_reduction"] is False
    assert readings(done, "gemm.forward_reduce", "trainer")["collective"] == "all_reduce, then this rank's rows"


def test_every_product_and_sum_is_measured(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["forced"].result()
    statuses = {row["axis"]: row["status"] for row in done.report["axes"]}
    built = ("gemm.runtime_flags", "gemm.kernel", "gemm.forward_reduce", "rollout.all_reduce_backend")
    assert {statuses[axis] for axis in built} == {"measured"}
    products = {(r["side"], r["product"]) for r in done.report["replay"]}
    assert len(products) == 2 * (2 * 7 + 1)
    whole = [r for r in done.report["replay"] if r["rows"] == "full"]
    assert all(r["count"] and r["native_error"] <= 1.1 * r["pin_error"] for r in whole)
    # Columns are joined over the ranks: q has 8 heads of 32, k 2 of them.
    count = {r["product"]: r["count"] for r in whole if r["side"] == "trainer"}
    assert count["layers.0.q_proj"] == 4 * count["layers.0.k_proj"]
    measures = {(m["axis"], m["side"]): m for m in done.report["measures"]}
    assert {side for axis, side in measures if axis == "gemm.forward_reduce"} == {"", "trainer", "rollout"}
    low, high = (
        next(m["value"] for m in done.report["measures"] if m["what"] == f"error of the sum, {p} payload") for p in ("bfloat16", "float32")
    )
    assert low > 1e3 * high > 0
    assert "gloo, 4 rows: error of the sum" in {m["what"] for m in done.report["measures"]}
    assert not [m["what"] for m in done.report["measures"] if m["limit"] is not None and not abs(m["value"]) <= m["limit"]]


def test_gradients_are_a_row_a_parameter_and_three_that_share_the_drift(runs: Mapping[str, Future[Done]]) -> None:
    """Six axes, and what the gradients' drift is made of: nine rows, of a run as a user starts it."""
    done = runs["forced"].result().exits(0)
    axes = {row["axis"]: row for row in done.report["axes"]}
    assert {axis: row["status"] for axis, row in axes.items()} == {
        "gemm.runtime_flags": "measured",
        "gemm.kernel": "measured",
        "gemm.dgrad_reduce": "structural zero",
        "gemm.forward_reduce": "measured",
        "gemm.wgrad_accumulate": "measured",
        "rollout.all_reduce_backend": "measured",
    }
    assert {row["contract"] for axis, row in axes.items() if "_reduce" in axis or "_acc" in axis} == {"equal", "recorded"}
    info = done.report["gradients"]
    players = {p["player"]: p for p in info["players"]}
    assert list(players) == ["ops", "dgrad_reduce", "wgrad_accumulate"]
    assert (players["dgrad_reduce"]["share"], players["dgrad_reduce"]["why"]) == (None, "structural zero: at most one addition")
    assert players["ops"]["share"] + players["wgrad_accumulate"]["share"] == pytest.approx(1)
    wgrad = axes["gemm.wgrad_accumulate"]
    assert wgrad["ratio"] == "gradient"
    assert (wgrad["alone"], wgrad["last"]) == tuple(players["wgrad_accumulate"][k] for k in ("alone", "last"))
    assert wgrad["alone"] > wgrad["last"] > 0

    parameters = info["rows"]
    assert len({r["parameter"] for r in parameters}) == len(parameters) == 25
    assert len({r["digest"] for r in parameters}) == len(parameters)
    assert sum(r["elements"] for r in parameters) == info["elements"]
    assert sum(r["unequal"] for r in parameters) == info["unequal"] > 0
    assert [r["relative_l2"] for r in parameters] == sorted((r["relative_l2"] for r in parameters), reverse=True)
    assert 1e-3 < info["relative_l2"] < 0.1
    assert info["microbatches"] == 4
    own = {c["name"]: c["ok"] for c in done.report["controls"] if "gradient" in c["name"]}
    assert (len(own), set(own.values())) == (3, {True})


def test_each_flag_is_flipped_in_the_live_processes_and_put_back(runs: Mapping[str, Future[Done]]) -> None:
    report = runs["forced"].result().report
    rows = [m for m in report["measures"] if m["axis"] == "gemm.runtime_flags" and m["side"]]
    for side in ("trainer", "rollout"):
        mine = {m["what"]: m for m in rows if m["side"] == side}
        flipped = {what.split()[1]: m for what, m in mine.items() if what.startswith("flipped: ") and "," not in what}
        assert set(flipped) >= {"tf32", "bf16_reduced_precision_reduction", "deterministic_algorithms", "onednn", "onednn_fp32_precision"}
        assert all("elements in 9 products at M = 8 and 64; floor 0" in m["note"] for m in flipped.values())
        # The trainer's own products take the flags that its knobs set: what is flipped is what is in force.
        assert f"flipped: deterministic_algorithms {'on → off' if side == 'trainer' else 'off → on'}" in mine
        refused = {what.split()[2]: m for what, m in mine.items() if what.startswith("not flipped: ")}
        assert {m["value"] for m in refused.values()} == {None}
        assert {"batch_invariant", "nccl_algo", "compute_dtype"} <= set(refused)
    back = [c for c in report["controls"] if c["name"].endswith("flipped flags are put back")]
    assert [c["ok"] for c in back] == [True, True]


def test_each_side_has_its_own_sum_and_what_it_cannot_have_is_no_pass(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["one sided"].result().exits(5)
    assert knobs(done) == {
        ("forward_reduce", "trainer"): ("rank_order", "applied"),
        ("batch_invariant", "trainer"): ("off", "unsupported"),
        ("forward_reduce", "rollout"): ("reduce_scatter", "applied"),
        ("all_reduce_backend", "rollout"): ("reduce_scatter", "unsupported"),
    }
    assert readings(done, "gemm.forward_reduce", "trainer")["engine"] == "rank_order"
    ran = {c["backend"] for c in done.report["collectives"] if c["op"] == "all_reduce"}
    assert ran == {"reduce_scatter"}
    assert [row["unequal"] for row in done.report["closure"]] == [0, 0, 0]  # the pins stand above either


def test_a_promise_of_batch_invariance_is_tested_in_the_live_engine(runs: Mapping[str, Future[Done]]) -> None:
    """Whether a row alone runs through another kernel than several rows do is the CPU's affair; on AVX-512 down_proj does."""
    done = runs["promised"].result()
    assert knobs(done)["batch_invariant", "rollout"] == ("off", "unsupported")
    moved = [r for r in done.report["replay"] if r["side"] == "rollout" and r["rows"] != "full" and r["unequal_full"]]
    scores = [m for m in done.report["measures"] if m["axis"] == "gemm.runtime_flags" and m["side"] == "rollout" and m["value"]]
    if not moved and not scores:
        done.exits(5)
        return
    first = done.exits(4).reasons[0]
    assert (first["axis"], first["tier"], first["kind"]) == ("gemm.kernel" if moved else "gemm.runtime_flags", "semantic", "contract")
    assert first["text"].endswith("though batch invariance is promised (--batch-invariant on)")
