"""The trainer's gradients on GPUs, local spec, Triton kernels: what tests/gradients shows on the CPU.

Chain: the pinned gradient repeats itself and is near the float64 reference's -> it is the same at TP1, TP2, TP2+SP, TP4 and TP4+SP.
Where ranks outnumber the GPUs they share them, each a host of its own to NCCL.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fixtures.make import write
from fixtures.recipes import FIXTURES
from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.protocol import Arm, SideConfig
from rlmismatch.pins.spec import PINS
from rlmismatch.tokens import Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NAME = "mid-qwen3"
SEQUENCES = tuple(
    Sequence(id=name, prompt_ids=tuple((7 * i + 3) % 1000 for i in range(p)), response_ids=tuple((i * i + 11) % 1000 for i in range(r)))
    for name, p, r in (("short", 1, 4), ("long", 6, 95))
)
SETUPS: Mapping[str, Mapping[str, Any]] = {
    "tp1": {},
    "float64": {"impl": "reference"},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "tp4sp": {"tp": 4, "sp": True},
}
FORWARD = ("forward",)


def run_setups(rank: int, world: int, folder: str) -> None:
    local_rank = rank % torch.cuda.device_count()
    if world > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    out = {}
    for name, fields in SETUPS.items():
        config: dict[str, Any] = {"impl": "triton", "device": "cuda", "vocab_padding_policy": "mask", "grads": True, **fields}
        if config.get("tp", 1) != world:
            continue
        engine = MegatronEngine(
            SideConfig(side="trainer", engine="megatron", ckpt=f"{folder}/{NAME}", **config), rank=rank, local_rank=local_rank
        )
        try:
            engine.load()
            out[name] = {
                "grads": engine.run(Arm(id="grads", paths=FORWARD, probe="grads"), SEQUENCES),
                "pinned": engine.run(Arm(id="all", pins=frozenset(PINS), paths=FORWARD), SEQUENCES),
                "readings": engine.readings(),
            }
        finally:
            engine.close()
    if rank == 0:
        torch.save(out, f"{folder}/results{world}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs() -> Mapping[str, Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, NAME).mkdir()
        write(FIXTURES[NAME], Path(folder, NAME))
        out: dict[str, Any] = {}
        for world in (1, 2, 4):
            mp.spawn(run_setups, args=(world, folder), nprocs=world)  # type: ignore[no-untyped-call]
            out |= torch.load(f"{folder}/results{world}.pt", weights_only=False)
        return out


def digests(run: Mapping[str, Any]) -> dict[str, bytes]:
    return {k: bytes(v.tolist()) for k, v in run["grads"].boundaries.items() if k.startswith("digest/")}


def total(run: Mapping[str, Any], players: str) -> torch.Tensor:
    """Sums of STATISTICS over all parameters."""
    return torch.stack([v for k, v in run["grads"].boundaries.items() if k.startswith(f"of/{players}/")]).sum(dim=0)


def test_the_pinned_gradient_repeats_itself_and_is_of_what_was_scored(runs: Mapping[str, Any]) -> None:
    for name, run in runs.items():
        four = name in ("tp4", "tp4sp")  # there the order of the sum of dX is a player, too
        assert total(run, "ops+dgrad_reduce+wgrad_accumulate" if four else "ops+wgrad_accumulate")[1] == 0
        scored = torch.cat(list(run["pinned"].scores["forward"].values()))
        assert torch.equal(run["grads"].boundaries["logprob/pinned"], scored)


def test_the_native_gradient_drifts_by_rounding(runs: Mapping[str, Any]) -> None:
    sums = total(runs["tp1"], "native")
    assert 1e-4 < float((sums[4] / sums[2]).sqrt()) < 0.1


def test_triton_and_float64_pins_have_one_norm(runs: Mapping[str, Any]) -> None:
    """Their forwards round alike but for a few elements, so norms agree to rounding."""
    norms = [float(total(runs[name], "native")[2].sqrt()) for name in ("tp1", "float64")]
    assert abs(norms[0] / norms[1] - 1) < 1e-2


def test_accumulation_is_read_from_the_live_trainer(runs: Mapping[str, Any]) -> None:
    fields = runs["tp1"]["readings"]["gemm.wgrad_accumulate"]
    assert [fields[f].value for f in ("accum_dtype", "main_grad_dtype", "fusion")] == ["float32", "float32", False]


SHARDED = ("tp2", "tp2sp", "tp4", "tp4sp")


def test_the_pinned_gradient_is_one_at_every_tp(runs: Mapping[str, Any]) -> None:
    one = digests(runs["tp1"])
    differing = {name: [k for k in one if one[k] != digests(runs[name])[k]] for name in SHARDED}
    assert differing == {name: [] for name in SHARDED}
    assert runs["tp2"]["readings"]["gemm.dgrad_reduce"]["acc_dtype"].value == "float32"


def test_of_four_ranks_the_order_of_the_sum_of_dx_shows(runs: Mapping[str, Any]) -> None:
    """Elements of the native gradient that move where dX is summed in rank order, not as NCCL does. Two ranks have no order."""
    orders = {name: [v for k, v in runs[name]["grads"].boundaries.items() if k.startswith("order/")] for name in SHARDED}
    assert orders["tp2"] == orders["tp2sp"] == []
    assert all(sum(float(v[1]) for v in orders[name]) > 0 for name in ("tp4", "tp4sp"))
