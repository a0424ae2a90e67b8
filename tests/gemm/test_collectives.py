"""What ran among a communicator's ways to sum, and in which phase of the engine: counted where the calls are made."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmismatch.engines.vllm_collectives import Call, CollectiveLog
from rlmismatch.pins.hooks import installed


class _Backend:
    disabled = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Custom:
    disabled = False

    def should_custom_ar(self, x: torch.Tensor) -> bool:
        return x.numel() < 4

    def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


class _Communicator:
    """Sums the smallest payloads by one backend, small ones by another, large ones in torch, as vLLM's CUDA communicator does."""

    def __init__(self, group: Any) -> None:
        self.device_group = group
        self.pynccl_comm = _Backend()
        self.ca_comm = _Custom()
        self.symm_mem_comm: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.ca_comm.should_custom_ar(x):
            return self.ca_comm.custom_all_reduce(x)
        if x.numel() < 8:
            return self.pynccl_comm.all_reduce(x)
        if x.numel() < 100:
            dist.all_reduce(x, group=self.device_group)
        return x


class _Runner:
    """A step runs one all-reduce a token."""

    def __init__(self, communicator: _Communicator) -> None:
        self.communicator = communicator

    def execute_model(self, scheduled: Any) -> None:
        self.communicator.all_reduce(torch.zeros(scheduled.total, dtype=torch.bfloat16))


def step(new: dict[str, int], cached: dict[str, int]) -> Any:
    requests = [SimpleNamespace(req_id=name) for name in new]
    return SimpleNamespace(scheduled_new_reqs=requests, num_scheduled_tokens=new | cached, total=sum((new | cached).values()))


@pytest.fixture
def communicator(tmp_path: Any) -> Iterator[_Communicator]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield _Communicator(dist.group.WORLD)
    dist.destroy_process_group()


def test_calls_are_counted_by_phase_backend_and_size(communicator: _Communicator) -> None:
    log, runner = CollectiveLog(communicator), _Runner(communicator)
    with installed(log.patches(runner)):
        runner.execute_model(step({"a": 5}, {}))  # a prefill
        runner.execute_model(step({"b": 1}, {}))  # a prefill of one token
        runner.execute_model(step({}, {"a": 1, "b": 1}))
        runner.execute_model(step({"c": 7}, {"a": 1}))
        before = log.calls.copy()
        communicator.all_reduce(torch.zeros(4))  # outside of any step
        with log.uncounted():
            communicator.all_reduce(torch.zeros(4))
    communicator.all_reduce(torch.zeros(4))  # no longer looked at

    def call(phase: Any, backend: str, size: int, dtype: str = "bfloat16") -> Call:
        return Call(phase=phase, op="all_reduce", backend=backend, dtype=dtype, size_bytes=size)

    assert log.calls == {
        call("prefill", "nccl", 10): 1,
        call("prefill", "custom", 2): 1,
        call("decode", "custom", 4): 1,
        call("mixed", "gloo", 16): 1,
        call("other", "nccl", 16, "float32"): 1,
    }
    assert log.steps == {"prefill": 2, "decode": 1, "mixed": 1}
    assert log.all_reduces(before) == {"nccl": {"16": 1}}
    assert log.all_reduces() == {"custom": {"2": 1, "4": 1}, "gloo": {"16": 1}, "nccl": {"10": 1, "16": 1}}


def test_each_backend_can_be_run_alone_and_takes_what_it_takes(communicator: _Communicator) -> None:
    ways = CollectiveLog(communicator).live_backends()
    assert list(ways) == ["custom", "nccl", "gloo"]
    x = torch.zeros(6)
    assert ways["custom"](x) is None  # too large for it
    nccl, gloo = ways["nccl"](x), ways["gloo"](x)
    assert nccl is not None
    assert gloo is not None
    assert torch.equal(nccl, torch.ones(6))
    assert torch.equal(gloo, torch.zeros(6))
    assert torch.equal(x, torch.zeros(6))


def test_another_sum_is_counted_by_its_own_name(communicator: _Communicator) -> None:
    log = CollectiveLog(communicator)
    replaced = log.replaced_all_reduce("rank_order", lambda x: communicator.pynccl_comm.all_reduce(x) * 2)
    with installed([replaced]), installed(log.patches(_Runner(communicator))):
        assert torch.equal(communicator.all_reduce(torch.zeros(4)), 2 * torch.ones(4))
    assert log.all_reduces() == {"rank_order": {"16": 1}}
    assert torch.equal(communicator.all_reduce(torch.zeros(4)), torch.ones(4))


def test_one_rank_reduces_nothing() -> None:
    log = CollectiveLog(None)
    assert log.patches(SimpleNamespace()) == []
    assert (log.all_reduces(), log.live_backends()) == ({}, {})


def test_torch_distributed_is_hooked_once_where_it_is_the_backend(communicator: _Communicator) -> None:
    """On a CPU without shared memory vLLM's backend is the module that everyone else in the process calls too."""
    bare = SimpleNamespace(dist_module=dist, device_group=communicator.device_group, all_reduce=lambda x: x)
    runner = SimpleNamespace(execute_model=lambda scheduled: None)
    labels = [patch.label for patch in CollectiveLog(bare).patches(runner)]
    assert labels[:2] == ["execute_model", "all_reduce"]
    assert all(label.startswith("torch.distributed ") for label in labels[2:])
    assert len(set(labels)) == len(labels)


def test_a_call_that_no_hook_saw_is_unknown(communicator: _Communicator) -> None:
    """A way to sum that a later vLLM may have is not taken for torch.distributed's."""
    log = CollectiveLog(communicator)
    with installed(log.patches(_Runner(communicator))):
        communicator.all_reduce(torch.zeros(100))
    assert log.all_reduces() == {"unknown": {"400": 1}}


def test_why_a_backend_ran_in_no_call(communicator: _Communicator) -> None:
    log = CollectiveLog(communicator)
    assert log.why_idle("symm_mem") == "vLLM made no symm_mem_comm"
    assert log.why_idle("custom") == "no call was one that it takes"
    communicator.ca_comm.disabled = True
    assert log.why_idle("custom") == "vLLM disabled it, its log says why"
    assert (log.why_idle("rank_order"), CollectiveLog(None).why_idle("custom")) == ("", "")


def test_a_buffer_that_the_ranks_could_not_share_sums_nothing(communicator: _Communicator) -> None:
    """vLLM keeps it where the rendezvous failed, as here, where the tensors are the CPU's."""
    group = SimpleNamespace(group_name="tp")
    communicator.symm_mem_comm = SimpleNamespace(disabled=True, buffer=torch.zeros(8), dtype=torch.float32, group=group)
    ways = CollectiveLog(communicator).live_backends()
    assert "symm_mem" not in ways
    assert ways["symm_mem two-shot"](torch.zeros(4)) is None
    assert ways["symm_mem two-shot"](torch.zeros(9)) is None  # larger than it
