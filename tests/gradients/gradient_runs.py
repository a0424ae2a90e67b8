"""Takes gradients of real trainers for test_megatron_gradients.py; every rank of one group runs every set-up in turn.

With fewer tensor-parallel ranks than processes the others are data-parallel copies, whose gradients Megatron averages: of two or four
equal numbers, exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlmismatch.engines.megatron import MegatronEngine
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.spec import PINS
from tests.engines.megatron_runs import SEQUENCES, count_run

FORWARD = ("forward",)
TWO = {  # name -> (checkpoint, SideConfig fields)
    **{f"{ckpt} {name}": (ckpt, fields) for ckpt in ("tiny-qwen3", "tiny-llama", "tiny-mistral", "variant-qwen2-bias") for name, fields in (
        ("tp1", {"tp": 1}), ("tp2", {"tp": 2}), ("tp2sp", {"tp": 2, "sp": True}),
    )},
    "fused": ("tiny-qwen3", {"tp": 2, "knobs": {"gemm.wgrad_accumulate": "fused"}}),
    "explicit": ("tiny-qwen3", {"tp": 2, "knobs": {"gemm.wgrad_accumulate": "explicit"}}),
    "bf16 main_grad": ("tiny-qwen3", {"tp": 1, "plants": ("wgrad_bf16_accumulate",)}),
    "not reduced, SP": ("tiny-qwen3", {"tp": 2, "sp": True, "plants": ("dgrad_not_reduced",)}),
    "float32": ("tiny-qwen3", {"tp": 2, "dtype": "float32"}),
}  # fmt: skip
FOUR = {
    "tp1": ("tiny-qwen3-kv4", {"tp": 1}),
    "tp4": ("tiny-qwen3-kv4", {"tp": 4}),
    "tp4sp": ("tiny-qwen3-kv4", {"tp": 4, "sp": True}),
    "rank order": ("tiny-qwen3-kv4", {"tp": 4, "knobs": {"gemm.dgrad_reduce": "rank_order"}}),
    "shared heads": ("tiny-qwen3", {"tp": 4}),
}


def taken(tp: TpGroup, folder: Path, runs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """name -> result of the probe, readings, and whether native bits were back behind it; on one rank."""
    out = {}
    for name, (checkpoint, fields) in runs.items():
        config = SideConfig(
            side="trainer", engine="megatron", ckpt=str(folder / checkpoint), vocab_padding_policy="mask", grads=True, **fields
        )
        engine = MegatronEngine(config, rank=tp.rank, local_rank=tp.rank)
        try:
            engine.load()
            count_run("trainer megatron", tp.rank)
            pins = frozenset(PINS)
            before, pinned = scores(engine.run(Arm(id="native", paths=FORWARD), SEQUENCES)), engine.run(
                Arm(id="all", pins=pins, paths=FORWARD), SEQUENCES
            )  # fmt: skip
            result = engine.run(Arm(id="grads", paths=FORWARD, probe="grads"), SEQUENCES)
            after = scores(engine.run(Arm(id="again", paths=FORWARD), SEQUENCES))
            out[name] = {
                "result": result,
                "readings": engine.readings(),
                "back": torch.equal(before, after) and torch.equal(before, scores(result)),
                "pinned": scores(pinned),
            }
        finally:
            engine.close()
    return out


def scores(result: ArmResult) -> torch.Tensor:
    return torch.cat(list(result.scores["forward"].values()))
