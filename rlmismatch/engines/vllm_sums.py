"""The rollout's sums over ranks, other than the engine's own choice: what a knob puts in its place, and how each is run on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from rlmismatch.engines import gemm_knobs
from rlmismatch.engines.protocol import Impl, SideConfig
from rlmismatch.engines.vllm_collectives import CollectiveLog
from rlmismatch.kernels import reduce
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.hooks import Patch

Sum = Callable[[torch.Tensor], torch.Tensor]
TRIAL_ROWS: Final = (1, 8, 64)  # times the ranks: the all-reduce is chosen by payload, and a decode step's differs from a prefill's


def replacements(config: SideConfig, tp: TpGroup, communicator: Any, log: CollectiveLog) -> list[Patch]:
    """The hook that has another sum in the place of vLLM's all-reduce, where the knobs ask for one; it stays for the engine's life."""
    sum_ = wanted(config, tp)
    if tp.size == 1 or sum_ in ("native", "all_reduce"):
        return []
    summed = in_rank_order(tp, config.impl) if sum_ == "rank_order" else by_reduce_scatter(communicator)
    return [log.replaced_all_reduce(sum_, summed)]


def wanted(config: SideConfig, tp: TpGroup) -> gemm_knobs.Sum:
    """How the rollout is to sum its partials, by either of the two knobs that say so."""
    if gemm_knobs.all_reduce_backend(config) == "rank_order" and not gemm_knobs.backend_refused(config, tp=tp.size):
        return "rank_order"
    return gemm_knobs.row_sum(config)


def in_rank_order(tp: TpGroup, impl: Impl) -> Sum:
    """Partials [M, N] -> their sum in rank order, added in float32 (triton) or float64 (reference), rounded once to their dtype."""
    return lambda x_MN: reduce.fold(tp.gathered(x_MN), impl=impl, out_dtype=x_MN.dtype)


def by_reduce_scatter(communicator: Any) -> Sum:
    """Partials [M, N] -> their sum by vLLM's reduce-scatter over rows and its all-gather. Rows are filled up to a multiple of the ranks."""

    def summed(x_MN: torch.Tensor) -> torch.Tensor:
        rows = x_MN.shape[0]
        padded = torch.nn.functional.pad(x_MN, (0, 0, 0, -rows % communicator.world_size))
        own = communicator.reduce_scatter(padded, dim=0)
        whole: torch.Tensor = communicator.all_gather(own.contiguous(), dim=0)
        return whole[:rows]

    return summed
