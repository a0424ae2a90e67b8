"""The trainer under context parallelism. Every engine runs once, in four processes (megatron_cp_runs.py); the tests read what they wrote.

Chain: the live ranks hold the tokens that the partition says -> all pinned, CP2 x TP2 and CP4 score as TP2 does, bit for bit, for lengths
that no number of chunks divides -> every boundary is in order of position -> ranks that hold other tokens are found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rlmismatch.engines.protocol import ArmResult
from rlmismatch.kernels.attention import SPLIT
from rlmismatch.pins.spec import boundary_names
from tests.cli_runs import ROOT, TINY
from tests.engines import megatron_cp_runs
from tests.engines.megatron_cp_runs import REFUSED
from tests.engines.megatron_runs import SEQUENCES

pytestmark = pytest.mark.engines
UNDER_CP = ("zigzag", "contiguous", "sp", "cp4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("context-parallel")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, megatron_cp_runs.__file__, str(ROOT / TINY), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: Mapping[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return results


def scores(result: ArmResult) -> torch.Tensor:
    return torch.cat([result.scores["forward"][s.id] for s in SEQUENCES])


def merge(runs: Mapping[str, Any], setup: str) -> dict[str, Any]:
    return {name: reading.value for name, reading in runs[setup]["readings"]["attention.merge_order"].items()}


@pytest.mark.parametrize("setup", UNDER_CP)
def test_all_pinned_the_scores_are_those_of_cp1(runs: Mapping[str, Any], setup: str) -> None:
    """5, 13 and 63 tokens: nothing divides by 2 CP."""
    assert torch.equal(scores(runs[setup]["pinned"]), scores(runs["tp2"]["pinned"]))
    assert not torch.equal(scores(runs[setup]["pinned"]), scores(runs[setup]["native"]))
    assert torch.equal(scores(runs[setup]["native again"]), scores(runs[setup]["native"]))
    assert runs[setup]["digests"] == runs["tp2"]["digests"]
    assert min(runs[setup]["pinned"].calls.values()) > 0


def test_a_copy_that_differs_on_any_rank_is_no_checkpoints(runs: Mapping[str, Any]) -> None:
    stale, sound = runs["stale"], runs["zigzag"]["digests"]
    assert {name for name in sound if stale[name] != sound[name]} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
    }


@pytest.mark.parametrize("setup", UNDER_CP)
def test_captures_are_in_order_of_position(runs: Mapping[str, Any], setup: str) -> None:
    found, whole = runs[setup]["boundary"].boundaries, runs["tp2"]["boundary"].boundaries
    assert tuple(found) == boundary_names(2)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in whole.items()}
    # Of native ops on equal inputs: attention is ours here, and CP4 has no sum over TP ranks.
    differ = {name.rsplit(".", 1)[-1] for name in found if not torch.equal(found[name], whole[name])}
    assert differ == {"attention"} | ({"o_proj", "down_proj", "logprob"} if setup == "cp4" else set())
    kept, kept_whole = runs[setup]["logits"].boundaries, runs["tp2"]["logits"].boundaries
    for name in ("hidden", "targets"):
        assert torch.equal(kept[name], kept_whole[name])
    assert torch.equal(kept["logits"][:, :1100], kept_whole["logits"][:, :1100])


@pytest.mark.parametrize("setup", UNDER_CP)
def test_local_probe_sees_every_token_once(runs: Mapping[str, Any], setup: str) -> None:
    local = {(x.boundary, x.pin): x for x in runs[setup]["local"].local}
    whole = {(x.boundary, x.pin): x for x in runs["tp2"]["local"].local}
    assert {key: (x.rows, x.count) for key, x in local.items()} == {key: (whole[key].rows, whole[key].count) for key in local}
    assert torch.equal(scores(runs[setup]["local"]), scores(runs[setup]["native"]))


@pytest.mark.parametrize("setup", UNDER_CP)
def test_the_contract_says_how_the_sequence_is_shared(runs: Mapping[str, Any], setup: str) -> None:
    assert merge(runs, setup) == {
        "global_block_index": "absolute position",
        "acc_dtype": "float64",
        "merge_order": "ascending global block index",
        "cp_partition": "contiguous" if setup == "contiguous" else "zigzag",
        "cp_comm_type": "all_gather",
        "split_kv_policy": f"splits of {SPLIT} tokens",
        "engine": "ContextParallelAttention",
    }
    assert runs[setup]["readings"]["attention.provenance"]["context_parallel_size"].value == (4 if setup == "cp4" else 2)
    assert all("attention is ours (the pin) in every arm" in runs[setup][arm].notes[0] for arm in ("native", "pinned"))
    # So native and pinned attention are one.
    assert {x.unequal for x in runs[setup]["local"].local if x.pin == "attention"} == {0}


def test_without_context_parallelism_nothing_is_merged(runs: Mapping[str, Any]) -> None:
    assert {name: value for name, value in merge(runs, "tp2").items() if value is not None} == {"split_kv_policy": "1"}
    assert runs["tp2"]["native"].notes == []


def test_ranks_that_hold_other_tokens_are_found(runs: Mapping[str, Any]) -> None:
    assert merge(runs, "plant")["cp_partition"] == "contiguous"
    assert float((scores(runs["plant"]["native"]) - scores(runs["zigzag"]["native"])).abs().max()) > 0.5
    assert not torch.equal(scores(runs["plant"]["pinned"]), scores(runs["tp2"]["pinned"]))  # no pin heals where the tokens are


def test_what_cannot_be_is_refused(runs: Mapping[str, Any]) -> None:
    assert runs["refused"] == [slug for slug, _ in REFUSED]
    assert runs["gradient"] == "context-parallel-forward-only"
