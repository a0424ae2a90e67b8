"""What a run is checked for before any engine starts: how ranks share the GPUs of a host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch import inputs
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.engines.vllm import cuda_options
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.plan import Run
from rlmismatch.settings import Settings

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs of 100 GiB, on paper."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=100 * GIB))
    return monkeypatch


def settings(trainer: int, rollout: int, *, share: bool = True, backend: str | None = None) -> Settings:
    knobs = {} if backend is None else {"gemm.all_reduce_backend": backend}
    return Settings(command="gemm", ckpt="fixtures/tiny-qwen3-kv4", trainer_tp=trainer, rollout_tp=rollout, share_gpu=share, knobs=knobs)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("trainer", "rollout", "expected"), [(4, 4, (2, 2)), (4, 2, (2, 1)), (1, 4, (1, 2))])
def test_ranks_share_the_gpus_there_are(trainer: int, rollout: int, expected: tuple[int, int]) -> None:
    found = inputs.prepare(settings(trainer, rollout))
    assert (found.ranks_per_gpu(trainer), found.ranks_per_gpu(rollout)) == expected


@pytest.mark.usefixtures("gpus")
def test_without_the_flag_each_rank_has_its_own() -> None:
    assert inputs.prepare(settings(4, 4, share=False)).ranks_per_gpu(4) == 1  # and a worker says that there are too few


def test_under_torchrun_the_ranks_of_this_host_count(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("LOCAL_WORLD_SIZE", "2")
    assert inputs.prepare(settings(4, 4)).ranks_per_gpu(4) == 2  # left over from elsewhere: torchrun sets all three
    gpus.setenv("RANK", "0")
    gpus.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="the 2 ranks of this host have GPUs enough: 2"):
        inputs.prepare(settings(4, 4))
    gpus.setattr("torch.cuda.device_count", lambda: 1)
    assert inputs.prepare(settings(4, 4)).ranks_per_gpu(4) == 2


@pytest.mark.usefixtures("gpus")
def test_nothing_to_share_and_no_peer_to_read_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        inputs.prepare(settings(2, 1))
    assert (caught.value.slug, caught.value.hint) == ("share-gpu-not-needed", "leave it out")
    for backend in ("custom", "symm_mem", "flashinfer"):
        with pytest.raises(UsageError) as caught:
            inputs.prepare(settings(4, 4, backend=backend))
        assert caught.value.slug == "share-gpu-has-no-peers"
        assert inputs.prepare(settings(4, 2, backend=backend)).gpus == 2  # each rank of the rollout has its own
    assert inputs.prepare(settings(4, 4, backend="nccl")).gpus == 2
    compiled = dataclasses.replace(settings(4, 4), knobs={"rollout.model.compile": "inductor"})
    with pytest.raises(UsageError, match="fuses all-reduces"):
        inputs.prepare(compiled)
    assert inputs.prepare(dataclasses.replace(compiled, knobs={"rollout.model.compile": "graph"})).gpus == 2


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("bytes_", "fits"), [(80, True), (100, False)])
def test_what_ranks_of_one_gpu_hold_decides_whether_both_sides_fit(bytes_: int, fits: bool) -> None:
    """Two ranks of each side: half of the weights, 2 GiB more for two more processes, beside 40 for the rollout and 10 to work in."""
    asked = dataclasses.replace(settings(4, 4), oracle="off")
    checkpoint = SimpleNamespace(num_bytes=bytes_ * GIB)
    assert inputs._fit_beside(asked, checkpoint, 2) is fits  # type: ignore[arg-type]
    own = dataclasses.replace(asked, share_gpu=False)
    assert inputs._fit_beside(own, checkpoint, None)  # type: ignore[arg-type]  # a quarter of them, and no more processes


@pytest.mark.usefixtures("gpus")
def test_each_side_is_started_with_its_own_share(tmp_path: Path) -> None:
    asked = dataclasses.replace(settings(4, 2), oracle="float64")
    trainer, rollout, oracle = _started(asked, tmp_path)
    assert (trainer.ranks_per_gpu, rollout.ranks_per_gpu, oracle.ranks_per_gpu) == (2, 1, 1)
    assert (trainer.sharing, rollout.sharing) == ("up to 2 of 4 ranks on a GPU", "")
    assert rollout.gpu_memory_fraction == 0.4
    assert "disable_custom_all_reduce" not in cuda_options(rollout)
    _, rollout, _ = _started(dataclasses.replace(asked, rollout_tp=4), tmp_path)
    assert rollout.gpu_memory_fraction == 0.2
    assert cuda_options(rollout)["disable_custom_all_reduce"] is True


def _started(asked: Settings, folder: Path) -> list[SideConfig]:
    parts: Any = {"controller": None, "progress": None}
    run = Run(settings=asked, inputs=inputs.prepare(asked), folder=folder, command_line="", **parts)
    return [side.config for side in run._launches()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_share() -> None:
    with pytest.raises(EnvironmentUnfitError) as caught:
        inputs.prepare(settings(4, 4))
    assert (caught.value.slug, caught.value.hint) == ("no-cuda-device", "leave it out to run on the CPU")


@pytest.mark.parametrize(("recorded", "refused"), [((True, True), False), ((False, False), False), ((True, False), True)])
def test_log_probs_are_recorded_for_all_sequences_or_for_none(recorded: tuple[bool, ...], refused: bool, tmp_path: Path) -> None:
    sequences = [
        {"id": f"s{i}", "prompt_ids": [1], "response_ids": [2], **({"logprobs": [-1.0]} if r else {})} for i, r in enumerate(recorded)
    ]
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in sequences))
    given = Settings(command="probe", ckpt="fixtures/tiny-qwen3", rollout=str(path))
    if not refused:
        assert len(inputs.prepare(given).sequences) == 2
        return
    with pytest.raises(UsageError, match="1 of 2 sequences have no logprobs, the first is 's1'"):
        inputs.prepare(given)
