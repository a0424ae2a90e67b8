"""``rlmismatch logprob`` on both real engines: what a clean run measures, and what knobs on one side come to."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from rlmismatch.engines.collective_order import AS_SENT, OWN_FIRST, RING_DOWN
from tests.cli_runs import MASK, QUICK, TINY, TP2, Done, run, side_by_side

FIXED = ("--reduce", "allgather_partials_fixed_merge")
TP4 = ("--ckpt", "fixtures/tiny-qwen3-kv4", "--trainer-tp", "4", "--rollout-tp", "4")
FORWARD_REDUCE = ("--waive", "gemm.forward_reduce:order", "--waive", "gemm.forward_reduce:acc_dtype")
RUNS: Mapping[str, tuple[str, ...]] = {
    # First, as it takes longest. The rollout's shards of 288 columns cut tiles of 64, and the trainer's last rank holds padding alone.
    "four ranks": (*MASK, *TP4, *FIXED, *FORWARD_REDUCE),
    "clean": (*MASK, *FIXED),
    "padded": (),
    "raw": (*MASK, "--temperature", "0.6", "--rollout.logprobs-mode", "raw_logprobs"),
    "refused": (*MASK, "--trainer-impl", "mcore_te_fused", "--merge-order", "nccl_algo"),
    "cold": (*MASK, "--temperature", "0.001"),
    "one sided": (*MASK, "--trainer.head-dtype", "fp32"),
    "cut alike": (*MASK, "--temperature", "0.7", "--top-k", "8", "--top-p", "0.999"),
}
pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> Iterator[Mapping[str, Future[Done]]]:
    folder = tmp_path_factory.mktemp("logprob")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5]}\n{"token_ids": [7, 9, 11]}\n')
    every = {**RUNS, "two tokens": (*MASK, "--prompts", str(prompts), "--max-new-tokens", "1")}
    jobs = {
        name: functools.partial(
            run, "logprob", "--ckpt", TINY, *TP2, *QUICK, *options, out=folder / name.replace(" ", "-"), python=preloaded
        )
        for name, options in every.items()
    }
    with side_by_side(jobs) as started:
        yield started


def measure(done: Done, axis: str, words: str, side: str = "") -> dict[str, Any]:
    (row,) = [m for m in done.report["measures"] if m["axis"] == axis and words in m["what"] and m["side"] == side]
    return row


def test_a_clean_run_measures_every_axis_within_its_limits(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["clean"].result().exits(0)
    assert len(done.report["axes"]) == 11
    rows = done.report["measures"]
    names = "provenance vocab_padding vocab_shards reduce precision transform_chain selected_gather head_gemm fusion backward"
    assert {m["axis"] for m in rows} == {f"logprob.{name}" for name in names.split()}
    status = {a["axis"]: a["status"] for a in done.report["axes"]}
    assert status.pop("logprob.merge_order") == "structural zero"  # at TP2 there is no order
    assert set(status.values()) == {"measured"}
    over = [m["what"] for m in rows if m["limit"] is not None and not abs(m["value"]) <= m["limit"]]
    assert over == []
    assert {k["status"] for k in done.report["knobs"]} == {"applied"}
    mixed = measure(done, "logprob.precision", "trainer head fp32, rollout head bf16")["value"]
    low = measure(done, "logprob.precision", "trainer head bf16, rollout head bf16")["value"]
    assert mixed > 10 * low  # one side raised alone is worse than both low
    said = {c["field"]: c["trainer"]["value"] for c in done.report["contract"] if c["axis"] == "logprob.backward"}
    assert said["dlogits"] == "softmax minus one-hot, float32"
    assert said["autograd_path"] == ["kernels.logprob_backward"]  # a merge of ours scores without autograd
    fused = measure(done, "logprob.backward", "mcore_native_fused", "trainer")
    assert "cast to bfloat16" in fused["note"]
    assert fused["value"] > 100 * measure(done, "logprob.backward", "mcore_unfused", "trainer")["value"]


def test_tokens_that_both_sides_cut_off_alike_are_no_defect(runs: Mapping[str, Future[Done]]) -> None:
    """A probability of 0 has a log of -inf: 0 times it, or it minus itself, is not a number."""
    done = runs["cut alike"].result().exits(0)
    assert {pair["unequal"] for pair in done.report["closure"]} == {0}
    assert measure(done, "logprob.backward", "entropy (mask) against float64", "trainer")["value"] < 3e-6
    (vocab,) = {
        c["trainer"]["value"] for c in done.report["contract"] if (c["axis"], c["field"]) == ("logprob.vocab_shards", "global_vocab")
    }
    assert vocab == 1100


def test_a_sequence_of_two_tokens_has_its_row_in_the_probe(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["two tokens"].result().exits(0)
    # The sampled row of such a prefill has the same shape; its logits would explain no recorded value.
    assert measure(done, "logprob.transform_chain", "recorded values explained by: raw", "rollout")["value"] < 1e-6


def test_counted_padding_is_named_with_its_bias(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["padded"].result().exits(4)
    assert done.reasons[0]["axis"] == "logprob.vocab_padding"
    assert measure(done, "logprob.vocab_padding", "bias of counting", "trainer")["value"] < 0
    assert measure(done, "logprob.vocab_padding", "closed form", "trainer")["value"] <= 1e-7


def test_raw_log_probs_beside_a_temperature_are_explained(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["raw"].result().exits(4)
    assert done.reasons[0]["axis"] == "logprob.transform_chain"
    explained = measure(done, "logprob.transform_chain", "explained by", "rollout")
    assert explained["what"].endswith(": raw")
    assert explained["note"] == "rollout: raw; trainer: temperature(0.6)"


def test_a_cold_chain_is_recognised_by_logits_as_large_as_it_makes_them(runs: Mapping[str, Future[Done]]) -> None:
    """Over 0.001 logits are some 1e4, which float32 holds to 1e-3: both sides round, and no contract is broken."""
    done = runs["cold"].result().exits(0)
    values = {(c["axis"], c["field"]): (c["trainer"]["value"], c["rollout"]["value"]) for c in done.report["contract"]}
    assert values["logprob.transform_chain", "transform_chain"] == (["temperature(0.001)"],) * 2
    assert values["logprob.vocab_padding", "vocab_padding_policy"] == ("mask", "mask")
    assert values["logprob.selected_gather", "single_owner"] == (True, True)


def test_what_an_engine_cannot_take_is_no_pass(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["refused"].result().exits(5)
    refused = {(k["knob"], k["side"]) for k in done.report["knobs"] if k["status"] == "unsupported"}
    assert refused == {("logprob.trainer_impl", "trainer"), ("logprob.merge_order", "rollout")}


def test_four_ranks_of_both_engines_close_and_merge_in_one_order(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["four ranks"].result().exits(0)
    assert [row["unequal"] for row in done.report["closure"]] == [0, 0, 0]
    said = {f"{c['axis']}:{c['field']}": c for c in done.report["contract"]}
    for side in ("trainer", "rollout"):
        assert said["logprob.reduce:order"][side]["value"] == "tiles of fixed width by global index"
        assert said["logprob.merge_order:merge_order"][side]["value"] == "global_vocab_shard_index"
    # The row-parallel sums have two orders and two dtypes, and both are read from the live collectives.
    for field, trainer, rollout in (("order", RING_DOWN, OWN_FIRST), ("acc_dtype", AS_SENT, "float32")):
        found = said[f"gemm.forward_reduce:{field}"]
        assert {found[side]["evidence"] for side in ("trainer", "rollout")} == {"read"}
        assert (found["trainer"]["value"], found["rollout"]["value"], found["outcome"]) == (trainer, rollout, "waived")
    assert "in 6 orders of arrival" in measure(done, "logprob.merge_order", "shards", "trainer")["what"]
    assert measure(done, "logprob.vocab_shards", "tiles of 32")["value"] == 0.0


def test_a_head_raised_on_one_side_is_not_comparable(runs: Mapping[str, Future[Done]]) -> None:
    done = runs["one sided"].result().exits(4)
    assert done.report["verdict"]["word"] == "NOT COMPARABLE"
    assert done.reasons[0]["axis"] == "logprob.precision"
