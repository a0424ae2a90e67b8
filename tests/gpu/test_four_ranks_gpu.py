"""Four ranks over NCCL, on four GPUs or on fewer that they share: where a sum over ranks has an order, the pins know nothing of it.

Chain: the pinned gradient of fixed tokens at TP1 -> the same at TP4, with SP or without -> every run's forms are bit-equal when pinned.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.cli_runs import MASK, Done, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CHECKPOINT = "fixtures/tiny-qwen3-kv4"
FIXED = ("--reduce", "allgather_partials_fixed_merge")
WAIVED = {
    "tp": "gemm.runtime_flags:tensor_parallel_size",
    "cp": "attention.provenance:context_parallel_size",
    "rows": "gemm.forward_reduce:order",
    "rows dtype": "gemm.forward_reduce:acc_dtype",
    "log-probs": "logprob.reduce:order",
    "merge": "logprob.merge_order:merge_order",
}
RUNS: Mapping[str, tuple[str, ...]] = {
    "tp1": ("gemm", "--grads"),
    "tp4 against tp1": ("gemm", "--grads", "--trainer-tp", "4"),
    "tp4 against tp2": ("probe", "--trainer-tp", "4", "--sp", "--rollout-tp", "2"),
    "tp4sp": ("gemm", "--grads", "--trainer-tp", "4", "--rollout-tp", "4", "--sp"),
    "rank order": ("gemm", "--trainer-tp", "4", "--rollout-tp", "4", "--sp", "--forward-reduce", "rank_order"),
    "logprob": ("logprob", "--trainer-tp", "4", "--rollout-tp", "4", "--sp", *FIXED),
    "attention": ("attention", "--trainer-tp", "4", "--rollout-tp", "4", "--sp"),
    "cp2 x tp2": ("probe", "--trainer-spec", "te", "--trainer-tp", "2", "--cp", "2", "--rollout-tp", "2"),
}
Start = Callable[[str], Done]


def ranks(options: tuple[str, ...]) -> int:
    """Of the larger side."""
    given = dict(itertools.pairwise(options))
    trainer, cp, rollout = (int(given.get(name, 1)) for name in ("--trainer-tp", "--cp", "--rollout-tp"))
    return max(trainer * cp, rollout)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Runs one of RUNS, each once; all on the tokens that the first one sampled. Contract fields are waived, so what fails is a number."""
    folder = tmp_path_factory.mktemp("four")
    waivers = [word for field in WAIVED.values() for word in ("--waive", field)]

    def begin(name: str, *more: str) -> Done:
        command, *options = RUNS[name]
        share = ("--share-gpu",) if ranks(RUNS[name]) > torch.cuda.device_count() else ()
        words = (*MASK, "--oracle", "off", "--device", "cuda", "--gpu-memory-fraction", "0.1", *options, *waivers, *share, *more)
        return run(command, "--ckpt", CHECKPOINT, *words, out=folder / name.replace(" ", "-"), timeout=840)

    @functools.cache
    def tokens() -> Path:
        sampled = [json.loads(line) for line in (started("tp1").folder / "tokens.jsonl").read_text().splitlines()]
        path = folder / "tokens.jsonl"
        path.write_text("".join(json.dumps({k: v for k, v in s.items() if k != "logprobs"}) + "\n" for s in sampled))
        return path

    @functools.cache
    def started(name: str) -> Done:
        return begin(name, "--max-new-tokens", "4") if name == "tp1" else begin(name, "--rollout", str(tokens()))

    return started


@pytest.mark.parametrize("name", RUNS)
def test_all_pinned_every_form_is_one(name: str, start: Start) -> None:
    if "te" in RUNS[name] and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    done = start(name).exits(0)
    assert len(done.report["closure"]) >= 3
    assert {pair["unequal"] for pair in done.report["closure"]} == {0}


@pytest.mark.parametrize("name", ["tp4 against tp1", "tp4sp"])
def test_the_pinned_gradient_is_that_of_one_rank(name: str, start: Start) -> None:
    digest = start("tp1").report["gradients"]["digest"]
    assert len(digest) == 64
    assert start(name).report["gradients"]["digest"] == digest


def test_the_order_of_four_shows_where_it_is_not_pinned_and_nowhere_else(start: Start) -> None:
    share = {m["what"]: m["value"] for m in start("tp4sp").report["measures"] if m["axis"] == "gemm.forward_reduce"}
    assert share["elements not as in rank order, bfloat16 payload"] > 0
    # In rank order a row's sum does not depend on where it lies in the message: the rollout's forms are one.
    assert {start("rank order").ratio(pair)["max"] for pair in ("prefill/chunked", "prefill/decode")} == {0.0}
