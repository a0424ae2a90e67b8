"""Runs real trainers under context parallelism for test_megatron_cp.py: four processes, every engine in turn, results to one file.

    python tests/engines/megatron_cp_runs.py CHECKPOINT FOLDER

The results go to FOLDER/results.pt. A trainer on fewer than four ranks runs once per set of ranks. Nothing is judged here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.protocol import Arm, SideConfig
from rlmismatch.pins.spec import PINS
from tests.engines.megatron_runs import SEQUENCES, count_run, slug_of

FORWARD = ("forward",)
EVERY = frozenset(PINS)
SETUPS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "zigzag": {"tp": 2, "cp": 2},
    "contiguous": {"tp": 2, "cp": 2, "cp_partition": "contiguous"},
    "sp": {"tp": 2, "cp": 2, "sp": True},
    "cp4": {"cp": 4},
    "plant": {"tp": 2, "cp": 2, "plants": ("cp_contiguous_vs_zigzag",)},
}
ARMS = (
    Arm(id="native", paths=FORWARD),
    Arm(id="pinned", pins=EVERY, paths=FORWARD),
    Arm(id="local", paths=FORWARD, probe="local"),
    Arm(id="boundary", pins=EVERY, paths=FORWARD, probe="boundary"),
    Arm(id="logits", pins=EVERY - {"head_gemm", "logprob"}, paths=FORWARD, probe="logits"),
    Arm(id="native again", paths=FORWARD),
)
REFUSED = (  # (what is wrong, SideConfig fields)
    ("context-parallel-does-not-fit", {"cp": 2, "cp_comm_type": "p2p"}),
    ("plant-without-effect", {"plants": ("cp_contiguous_vs_zigzag",)}),
    ("plant-without-effect", {"cp": 2, "cp_partition": "contiguous", "plants": ("cp_contiguous_vs_zigzag",)}),
    ("plant-without-effect", {"cp": 2, "plants": ("attention_bf16_accumulate",)}),
)


def with_gradient(engine: MegatronEngine) -> str:
    """What attention says to a caller that wants a gradient: the exchange of K and V has none."""
    x_sBHD = torch.zeros(2, 1, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        return slug_of(lambda: engine.gpt.decoder.layers[0].self_attention.core_attention(x_sBHD, x_sBHD, x_sBHD, None))


def stale_copies(engine: MegatronEngine, rank: int) -> Mapping[str, str]:
    """The digests once one rank has let go of what all were given: a norm, which every rank holds, and a shard, which its CP peers hold."""
    if rank == 3:
        with torch.no_grad():
            engine.gpt.decoder.layers[1].mlp.linear_fc2.weight[0, 0] += 1
    if rank == 1:
        with torch.no_grad():
            engine.gpt.decoder.layers[0].input_layernorm.weight[0] += 1
    return engine.weight_digests()


def work(rank: int, checkpoint: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    out: dict[str, Any] = {"refused": []}
    for name, changes in SETUPS.items():
        engine = MegatronEngine(SideConfig(side="trainer", engine="megatron", ckpt=checkpoint, **changes), rank=rank, local_rank=rank)
        try:
            engine.load()
            count_run("trainer megatron", rank)
            out[name] = {arm.id: engine.run(arm, SEQUENCES) for arm in ARMS}
            out[name] |= {"readings": engine.readings(), "digests": engine.weight_digests()}
            if name == "zigzag":
                out["gradient"] = with_gradient(engine)
                out["stale"] = stale_copies(engine, rank)
        finally:
            engine.close()
    for _, changes in REFUSED:
        config = SideConfig(side="trainer", engine="megatron", ckpt=checkpoint, **changes)  # type: ignore[arg-type]
        out["refused"].append(slug_of(MegatronEngine(config, rank=rank, local_rank=rank).load))
    if rank == 0:
        torch.save(out, folder / "results.pt")
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1], Path(sys.argv[2])), nprocs=4)  # type: ignore[no-untyped-call]
