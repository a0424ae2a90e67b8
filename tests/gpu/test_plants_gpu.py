"""The plants that take two ranks, and the families whole, over NCCL: the cases of tests/faults/matrix.py as they are, on two GPUs or one.

Chain: a clean run of the same set-up exits 0 -> a plant changes one thing -> its axis is named first, at its tier.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.cli_runs import MASK, QUICK, TINY, TP2, Done, run, selected
from tests.faults.matrix import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BY_ID = {case.key: case for case in CASES if {"--trainer-tp", "--cp"} & {*case.options}}
CLEAN = {
    "probe": ("probe", "--sp"),
    "gemm": ("gemm", "--sp"),
    "gemm --grads": ("gemm", "--sp", "--grads"),
    "attention": ("attention", "--sp"),
    "logprob": ("logprob", "--sp"),
}
AT_ONCE = 1 if torch.cuda.device_count() == 1 else 3  # collectives of more runs wait for one another: six on two GPUs were slower than two
ON_GPUS = ("--device", "cuda", "--gpu-memory-fraction", "0.1", *(("--share-gpu",) if torch.cuda.device_count() == 1 else ()))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Done]]]:
    folder = tmp_path_factory.mktemp("plants")
    started = {
        name: functools.partial(run, command, "--ckpt", TINY, *MASK, *TP2, *QUICK, *options, *ON_GPUS, out=folder / name.replace(" ", "-"))
        for name, (command, *options) in CLEAN.items()
        if name in selected(request, "clean")
    }
    started |= {
        case.key: functools.partial(run, "probe", *case.command, *ON_GPUS, out=folder / case.key.replace(" ", "-"), torchrun=case.torchrun)
        for case in BY_ID.values()
        if case.key in selected(request, "case")
    }
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {name: pool.submit(start) for name, start in started.items()}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("clean", CLEAN)
def test_a_clean_run_closes(clean: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[clean].result().exits(0)
    assert done.report["closure"]
    assert {pair["unequal"] for pair in done.report["closure"]} == {0}


@pytest.mark.parametrize("case", BY_ID)
def test_a_plant_is_named_first(case: str, runs: Mapping[str, Future[Done]]) -> None:
    expected = BY_ID[case]
    done = runs[case].result().exits(0 if expected.word == "OK" else 4)
    first = done.reasons[0]
    assert (done.report["verdict"]["word"], first["axis"], first["tier"]) == (expected.word, expected.axis, expected.tier)
    assert expected.says in first["text"]
