"""The trainer's sum over ranks behind a row-parallel layer, other than its own choice: what the knob forward_reduce puts in its place.

Megatron reduce-scatters over the sequence under sequence parallelism, and all-reduces without. Each sum here has the gradient of the one
that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from rlmismatch.engines import gemm_knobs
from rlmismatch.engines.protocol import Impl, SideConfig
from rlmismatch.kernels import reduce
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.hooks import Patch

Sum = Callable[[torch.Tensor], torch.Tensor]
TRIAL_ROWS: Final = (1, 8, 64)  # of a rank: a backend may choose its algorithm by size, and a decode step's differs from a prefill's


def refused(config: SideConfig) -> str:
    """Why this trainer's sum cannot be replaced; empty where it can."""
    return "Transformer Engine sums inside its own module" if config.trainer_spec == "te" else ""


def replacements(config: SideConfig, tp: TpGroup) -> list[Patch]:
    """The hook that has the asked-for sum in the place of Megatron's, for the model's life; none where that is what it does anyway.

    The embedding sums by the same function, exactly: one rank has the row, the others zeros.
    """
    wanted = gemm_knobs.row_sum(config)
    if tp.size == 1 or refused(config) or wanted in ("native", "reduce_scatter" if config.sp else "all_reduce"):
        return []
    from megatron.core.tensor_parallel import layers

    name = "reduce_scatter_to_sequence_parallel_region" if config.sp else "reduce_from_tensor_model_parallel_region"
    summed = in_rank_order(tp, sp=config.sp, impl=config.impl) if wanted == "rank_order" else _other_collective(tp, sp=config.sp)

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda input_, *args, **kwargs: summed(input_.contiguous())

    return [Patch(target=layers, name=name, make=make, pins=(), label=f"row-parallel sum by {wanted}")]


def live(tp: TpGroup, *, hidden: int, sp: bool) -> Sum:
    """[N] partials -> their sum by what the row-parallel layers call, N a multiple of `hidden`; this rank's slice of it under SP."""
    from megatron.core.tensor_parallel import layers

    summed = layers.reduce_scatter_to_sequence_parallel_region if sp else layers.reduce_from_tensor_model_parallel_region
    return lambda x_N: summed(x_N.view(-1, 1, hidden), group=tp.group).flatten()


def _other_collective(tp: TpGroup, *, sp: bool) -> Sum:
    return by_all_reduce(tp) if sp else by_reduce_scatter(tp)


def by_all_reduce(tp: TpGroup) -> Sum:
    """[S, B, H] partials -> this rank's slice of their sum [S / TP, B, H], by Megatron's all-reduce."""
    from megatron.core.tensor_parallel import mappings

    def summed(partial_SBH: torch.Tensor) -> torch.Tensor:
        whole = mappings.reduce_from_tensor_model_parallel_region(partial_SBH, group=tp.group)
        own: torch.Tensor = mappings.scatter_to_sequence_parallel_region(whole, group=tp.group)
        return own

    return summed


def by_reduce_scatter(tp: TpGroup) -> Sum:
    """[S, B, H] partials -> their whole sum, by Megatron's reduce-scatter and its all-gather. S is filled up to a multiple of TP."""
    from megatron.core.tensor_parallel import mappings

    def summed(partial_SBH: torch.Tensor) -> torch.Tensor:
        length = partial_SBH.shape[0]
        padded = torch.nn.functional.pad(partial_SBH, (0, 0, 0, 0, 0, -length % tp.size))
        own = mappings.reduce_scatter_to_sequence_parallel_region(padded, group=tp.group)
        whole: torch.Tensor = mappings.gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=tp.group)
        return whole[:length]

    return summed


def in_rank_order(tp: TpGroup, *, sp: bool, impl: Impl) -> Sum:
    """[S, B, H] partials -> their sum in rank order, rounded once to their dtype; this rank's slice of it under sequence parallelism."""

    class RankOrder(torch.autograd.Function):
        """Backward: the gradient of a sum is each partial's; under sequence parallelism the ranks' slices of it are gathered."""

        @staticmethod
        def forward(ctx: Any, partial_SBH: torch.Tensor) -> torch.Tensor:
            whole = reduce.fold(tp.gathered(partial_SBH), impl=impl, out_dtype=partial_SBH.dtype)
            return whole.chunk(tp.size)[tp.rank].contiguous() if sp else whole

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.cat(tp.gathered(grads[0])) if sp else grads[0]

    def summed(partial_SBH: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = RankOrder.apply(partial_SBH)  # type: ignore[no-untyped-call]
        return out

    return summed
