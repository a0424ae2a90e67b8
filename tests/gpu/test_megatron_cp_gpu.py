"""Context parallelism on two GPUs: Transformer Engine's ring, all-gather and all-to-all beside our fixed fold.

Chain: all pinned, every way to share the sequence scores as one rank does, bit for bit -> what its own attention adds is what it moves ->
the contract says of each way what it merges, and in which dtype. Numbers are printed (pytest -s) beside what is asserted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmismatch.engines.protocol import ArmResult
from tests.gpu import megatron_cp_runs
from tests.gpu.megatron_cp_runs import SEQUENCES, SETUPS, TE_SETUPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]

ROOT = Path(__file__).parents[2]
SHARED = [name for name in (*SETUPS, *TE_SETUPS) if name not in ("local", "te", "te p2p, other tokens")]
TE_SHARED = [name for name in SHARED if name.startswith("te")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("context-parallel")
    checkpoint = ROOT / "fixtures/mid-qwen3"
    command = [sys.executable, megatron_cp_runs.__file__, str(checkpoint), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: Mapping[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return results


def of(runs: Mapping[str, Any], setup: str) -> Mapping[str, Any]:
    if setup not in runs:
        pytest.skip("transformer_engine does not import here")
    found: Mapping[str, Any] = runs[setup]
    return found


def scores(result: ArmResult) -> torch.Tensor:
    return torch.cat([result.scores["forward"][s.id] for s in SEQUENCES])


@pytest.mark.parametrize("setup", SHARED)
def test_all_pinned_the_scores_are_those_of_one_rank(runs: Mapping[str, Any], setup: str) -> None:
    assert torch.equal(scores(of(runs, setup)["pinned"]), scores(runs["local"]["pinned"]))
    assert torch.equal(scores(runs[setup]["native again"]), scores(runs[setup]["native"]))


@pytest.mark.parametrize("setup", TE_SHARED)
def test_its_own_attention_is_close_to_one_ranks_and_to_float64(runs: Mapping[str, Any], setup: str) -> None:
    """Natively only attention is shared: the rest of the drift from CP1 is what its merge and its backend add."""
    moved = (scores(of(runs, setup)["native"]) - scores(runs["te"]["native"])).abs()
    errors = {name: [x for x in runs[name]["local"].local if x.pin == "attention"] for name in (setup, "te")}
    means = {name: sum(x.native_vs_fp64_mean for x in found) / len(found) for name, found in errors.items()}
    pin = sum(x.pin_vs_fp64_mean for x in errors[setup]) / len(errors[setup])
    print(f"\n{setup}: mean {moved.mean():.3g}, max {moved.max():.3g} nats from CP1; attention {means}, our fold {pin:.3g} from float64")
    assert float(moved.max()) < 0.5
    assert means[setup] < 4 * means["te"]


@pytest.mark.parametrize("setup", TE_SHARED)
def test_the_contract_says_what_is_merged(runs: Mapping[str, Any], setup: str) -> None:
    merge = of(runs, setup)["readings"]["attention.merge_order"]
    assert merge["cp_comm_type"].value == setup.removeprefix("te ")
    assert merge["cp_partition"].value == "zigzag"
    print(f"\n{setup}: { ({name: reading.value for name, reading in merge.items()}) }")
    if setup == "te p2p":
        assert merge["acc_dtype"].value in ("bfloat16", "float32")
        assert merge["merge_order"].value.startswith("ring")
        assert runs[setup]["readings"]["attention.lse"]["lse_base"].value == "e"
    else:
        assert merge["merge_order"].value is None
        assert "nothing is merged across ranks" in merge["merge_order"].source


def test_ranks_that_hold_other_tokens_are_found(runs: Mapping[str, Any]) -> None:
    planted = of(runs, "te p2p, other tokens")
    assert planted["readings"]["attention.merge_order"]["cp_partition"].value == "contiguous"
    assert float((scores(planted["native"]) - scores(runs["te p2p"]["native"])).abs().max()) > 0.5


@pytest.mark.parametrize("setup", ["local", "te"])
def test_candidates_and_the_backward_are_measured(runs: Mapping[str, Any], setup: str) -> None:
    tensors = of(runs, setup)["attention"].boundaries
    found = {key.split("/")[1] for key in tensors if key.startswith("backend/")}
    print(f"\n{setup}: candidates {sorted(found)}; {runs[setup]['attention'].notes}")
    for key, facts in tensors.items():
        if key.startswith("backend/"):
            print(f"  {key}: {[float(f'{x:.3g}') for x in facts.tolist()]}")
            assert facts[3] < 2.0**-6 * facts[4], key
        if key.startswith("backward/"):
            print(f"  {key}: {[float(f'{x:.3g}') for x in facts.tolist()]}")
            assert abs(float(facts[3]) - 1.0) < 2.0**-8, key
    assert "sdpa" in found
    assert {key.rsplit(".", 1)[-1] for key in tensors if key.startswith("backward/native/")} == {"dq", "dk", "dv"}
