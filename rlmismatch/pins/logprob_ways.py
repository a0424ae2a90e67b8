"""A log-prob over vocabulary shards in every way that a knob can ask for, in plain torch, the same for both engines.

These are arms, not the pin: each differs from the pin in the one thing its knob names, so that the report can say what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist

from rlmismatch.errors import ContractError
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.transforms import Chain

Reduce = Literal["allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits"]
Gather = Literal["masked_sum_allreduce", "local_gather"]
Accum = Literal["fp32", "bf16"]
Downcast = Literal["final_write", "per_partial"]
REDUCES: Final[tuple[Reduce, ...]] = get_args(Reduce)
_BLOCK: Final = 64  # columns after which a bf16 sum is rounded


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the ranks' shards become one log-prob a row."""

    reduce: Reduce
    gather: Gather
    accum: Accum = "fp32"
    downcast: Downcast = "final_write"


def blocks(x: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """`x` in runs of `rows` rows, the last one shorter; one empty run of an empty tensor."""
    return [x[i : i + rows] for i in range(0, max(1, x.shape[0]), rows)]


def selected(shard_TV: torch.Tensor, targets_T: torch.Tensor, *, start: int, way: Way, tp: TpGroup) -> torch.Tensor:
    """float32 [T]: the targets' log-probs, equal on all ranks. Collective.

    shard_TV: float32 [T, V of this rank], transformed, columns that do not count cut off or -inf. targets_T: global ids.
    start: global id of the first column. A row with a NaN gives NaN. Raises ContractError for a target without exactly one owner.
    """
    # One column of -inf: a rank whose shard is padding alone has a maximum too.
    shard_TV = torch.nn.functional.pad(shard_TV, (0, 1), value=-torch.inf)
    if way.reduce == "allgather_logits":
        shard_TV, start, tp = _gathered_row(shard_TV, tp), 0, TpGroup(group=tp.group, size=1, rank=0)
    local_T = targets_T - start
    owns_T = (local_T >= 0) & (local_T < shard_TV.shape[1] - 1)
    _require_one_owner(owns_T, targets_T, tp)
    logit_T = shard_TV.gather(1, local_T.where(owns_T, 0)[:, None])[:, 0]
    max_T = shard_TV.amax(dim=1)
    if way.reduce == "allgather_partials_fixed_merge":
        max_RT = torch.stack(tp.gathered(max_T))
        sum_RT = torch.stack(tp.gathered(_sumexp(shard_TV, max_T, way)))
        max_T = max_RT.amax(dim=0)
        total_T = torch.zeros_like(max_T)
        for rank in range(tp.size):
            total_T = _rounded(total_T + sum_RT[rank] * _exp_below(max_RT[rank], max_T), way.accum)
    else:
        max_T = _all_reduced(max_T, dist.ReduceOp.MAX, tp)
        total_T = _all_reduced(_sumexp(shard_TV, max_T, way), dist.ReduceOp.SUM, tp)
    target_T = _target(logit_T - max_T, owns_T, way, tp)
    return target_T - _rounded(total_T.log(), way.accum)


def comparable(logp_T: torch.Tensor) -> torch.Tensor:
    """`logp_T` with 0 for a token that a transform cut off: -inf on two sides is no difference, on one it is still a large one."""
    return logp_T.masked_fill(logp_T == -torch.inf, 0.0)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Of a fused linear loss: columns of the head, and rows, that are alive at a time."""

    block_size: int
    chunk_size: int


def linear_selected(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    start: int,
    chain: Chain,
    tiling: Tiling,
    tp: TpGroup,
) -> torch.Tensor:
    """float32 [T]: the targets' log-probs by an online softmax in float32 from hidden rows: no logit is rounded. Collective.

    weight_VH: this rank's rows of the head that count. Raises ValueError for a chain that needs a whole row of logits, ContractError for
    a target without exactly one owner.
    """
    if not chain.elementwise:
        raise ValueError(f"a fused linear loss sees a block of columns at a time, {chain} needs the row")
    out = []
    for x_TH, t_T in zip(blocks(hidden_TH, tiling.chunk_size), blocks(targets_T, tiling.chunk_size), strict=True):
        max_T, sum_T, logit_T = _online(x_TH.float(), weight_VH, t_T - start, chain, tiling.block_size)
        owns_T = (t_T >= start) & (t_T < start + weight_VH.shape[0])
        _require_one_owner(owns_T, t_T, tp)
        top_T = _all_reduced(max_T, dist.ReduceOp.MAX, tp)
        total_T = _all_reduced(sum_T * _exp_below(max_T, top_T), dist.ReduceOp.SUM, tp)
        way = Way(reduce="allreduce_partials", gather="masked_sum_allreduce")
        out.append(_target(logit_T - top_T, owns_T, way, tp) - total_T.log())
    return torch.cat(out)


def _online(
    x_TH: torch.Tensor, weight_VH: torch.Tensor, local_T: torch.Tensor, chain: Chain, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(running maximum, running sum of exp below it, target's logit or 0) over the rows of `weight_VH`, float32 [T] each."""
    max_T = x_TH.new_full((x_TH.shape[0],), -torch.inf)
    sum_T, logit_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
    first = 0
    for block_VH in blocks(weight_VH, block_size) if len(weight_VH) else ():  # a rank may hold padding alone
        logits_TV = chain.apply(x_TH @ block_VH.float().T)
        top_T = torch.maximum(max_T, logits_TV.amax(dim=1))
        sum_T = sum_T * _exp_below(max_T, top_T) + _exp_below(logits_TV, top_T[:, None]).sum(dim=1)
        here_T = (local_T >= first) & (local_T < first + block_VH.shape[0])
        found_T = logits_TV.gather(1, (local_T - first).where(here_T, 0)[:, None])[:, 0]
        max_T, logit_T, first = top_T, found_T.where(here_T, logit_T), first + block_VH.shape[0]
    return max_T, sum_T, logit_T


def _sumexp(x_TV: torch.Tensor, max_T: torch.Tensor, way: Way) -> torch.Tensor:
    """Sum of exp(x - max) over this rank's columns, float32 [T]; with bf16 the running sum is rounded block by block."""
    exp_TV = _exp_below(x_TV, max_T[:, None])
    if way.accum == "fp32":
        total_T = exp_TV.sum(dim=1)
    else:
        total_T = torch.zeros_like(max_T)
        for block_VT in blocks(exp_TV.T, _BLOCK):
            total_T = _rounded(total_T + block_VT.sum(dim=0), "bf16")
    return _rounded(total_T, "bf16" if way.downcast == "per_partial" else "fp32")


def _exp_below(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(x - top); a rank without any probability (-inf below -inf) adds nothing."""
    return torch.exp(x - top.masked_fill(top == -torch.inf, 0.0))


def _require_one_owner(owns_T: torch.Tensor, targets_T: torch.Tensor, tp: TpGroup) -> None:
    """A target outside the vocabulary would be scored with a logit of 0, one of two owners with twice its own. Collective."""
    owners_T = torch.stack(tp.gathered(owns_T.to(torch.uint8))).sum(dim=0)
    wrong = (owners_T != 1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ContractError(
            "target-without-one-owner",
            f"target {int(targets_T[row])} of row {row} lies in the vocabulary shards of {int(owners_T[row])} ranks",
            hint="ignored positions must be left out, not scored; shards must cover the vocabulary once",
        )


def _target(shifted_T: torch.Tensor, owns_T: torch.Tensor, way: Way, tp: TpGroup) -> torch.Tensor:
    if way.gather == "masked_sum_allreduce":
        return _all_reduced(shifted_T.where(owns_T, 0.0), dist.ReduceOp.SUM, tp)
    owner_1T = torch.stack(tp.gathered(owns_T.to(torch.uint8))).argmax(dim=0, keepdim=True)
    return torch.stack(tp.gathered(shifted_T)).gather(0, owner_1T)[0]


def _gathered_row(shard_TV: torch.Tensor, tp: TpGroup) -> torch.Tensor:
    """The columns of all ranks, rank 0 first, and one column of -inf. Ranks may hold different numbers of columns."""
    own = shard_TV.shape[1] - 1
    widths = [int(w) for w in tp.gathered(torch.tensor([own], device=shard_TV.device))]
    padded_TV = torch.nn.functional.pad(shard_TV, (0, max(widths) - own), value=-torch.inf)
    parts = [part[:, :width] for part, width in zip(tp.gathered(padded_TV), widths, strict=True)]
    return torch.nn.functional.pad(torch.cat(parts, dim=1), (0, 1), value=-torch.inf)


def _rounded(x: torch.Tensor, accum: Accum) -> torch.Tensor:
    return x.bfloat16().float() if accum == "bf16" else x


def _all_reduced(x_T: torch.Tensor, op: dist.ReduceOp.RedOpType, tp: TpGroup) -> torch.Tensor:
    out_T = x_T.clone()
    if tp.size > 1:
        dist.all_reduce(out_T, op=op, group=tp.group)
    return out_T
