"""What a run is checked for before any engine starts: how ranks share the GPUs of a host."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from rlmismatch import inputs
from rlmismatch.errors import UsageError
from rlmismatch.settings import Settings
from tests.cli_runs import TINY

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs of 100 GiB, on paper."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
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
    with pytest.raises(UsageError, match="GPUs enough for 4 ranks: 2"):
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


@pytest.mark.usefixtures("gpus")
def test_what_ranks_of_one_gpu_hold_decides_whether_both_sides_fit() -> None:
    checkpoint = SimpleNamespace(num_bytes=120 * GIB)  # 30 GiB a rank, beside 40 for the rollout and 10 to work in
    for share, fits in ((False, True), (True, False)):
        asked = dataclasses.replace(settings(4, 4, share=share), oracle="off")
        assert inputs._fit_beside(asked, checkpoint, 2 if share else None) is fits  # type: ignore[arg-type]


def test_a_cpu_run_shares_nothing() -> None:
    assert inputs.prepare(Settings(command="probe", ckpt=TINY, trainer_tp=2, device="cpu")).ranks_per_gpu(2) == 1
