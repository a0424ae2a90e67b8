"""Runs real trainers on two GPUs for test_megatron_cp_gpu.py: two processes over NCCL, every engine in turn, results to one file.

    python tests/gpu/megatron_cp_runs.py CHECKPOINT FOLDER

The results go to FOLDER/results.pt. A trainer without context parallelism runs twice, once per process. Nothing is judged here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.megatron_model import have_transformer_engine
from rlmismatch.engines.protocol import Arm, SideConfig
from rlmismatch.pins.spec import PINS
from rlmismatch.tokens import Sequence

# 10 tokens, which divide by 2 CP into no equal chunks, and enough for several KV splits.
SEQUENCES = tuple(
    Sequence(id=name, prompt_ids=tuple((7 * i + 3) % 1000 for i in range(p)), response_ids=tuple((i * i + 11) % 1000 for i in range(r)))
    for name, p, r in (("short", 4, 6), ("long", 6, 395))
)
EVERY = frozenset(PINS)
FORWARD = ("forward",)
ARMS = (
    Arm(id="native", paths=FORWARD),
    Arm(id="native again", paths=FORWARD),
    Arm(id="pinned", pins=EVERY, paths=FORWARD),
    Arm(id="local", paths=FORWARD, probe="local"),
)
CP2: dict[str, Any] = {"cp": 2}
SETUPS: dict[str, dict[str, Any]] = {
    "local": {},
    "local zigzag": CP2,
    "local contiguous": {**CP2, "cp_partition": "contiguous"},
}
TE = {"trainer_spec": "te"}
TE_SETUPS: dict[str, dict[str, Any]] = {
    "te": TE,
    **{f"te {travels}": {**TE, **CP2, "cp_comm_type": travels} for travels in ("p2p", "all_gather", "a2a")},
    "te p2p, other tokens": {**TE, **CP2, "plants": ("cp_contiguous_vs_zigzag",)},
}


def work(rank: int, checkpoint: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    out: dict[str, Any] = {}
    for name, changes in {**SETUPS, **(TE_SETUPS if have_transformer_engine() else {})}.items():
        config = SideConfig(side="trainer", engine="megatron", ckpt=checkpoint, device="cuda", impl="triton", **changes)
        engine = MegatronEngine(config, rank=rank, local_rank=rank)
        try:
            engine.load()
            out[name] = {arm.id: engine.run(arm, SEQUENCES) for arm in ARMS}
            probe = Arm(id="attention", pins=EVERY - {"attention"}, paths=FORWARD, probe="attention")
            out[name] |= {"attention": engine.run(probe, SEQUENCES[1:]), "readings": engine.readings()}
        finally:
            engine.close()
    if rank == 0:
        torch.save(out, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1], Path(sys.argv[2])), nprocs=2)  # type: ignore[no-untyped-call]
