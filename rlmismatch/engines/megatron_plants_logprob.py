"""Known faults of the trainer's head and log-prob. Each acts on the native loss or head; the pin of that operation heals it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.engines.logprob_plants import merged_as_they_arrive, owner_twice
from rlmismatch.engines.megatron_model import fused_loss
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.megatron_logprob import VocabShard

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _on_loss(gpt: Any, label: str, make: Callable[[Loss], Loss]) -> Sequence[Patch]:
    return [Patch(target=gpt, name="compute_language_model_loss", make=make, pins=(), label=f"plant {label}")]


def shard_gap(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """The first row of the last rank belongs to no rank: it holds no probability."""
    return _on_loss(gpt, "shard_gap", lambda native: lambda labels, logits: native(labels, _with_row(logits, shard, -torch.inf)))


def shard_overlap(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """The first row of the last rank belongs to two ranks: the denominator counts it twice."""
    return _on_loss(gpt, "shard_overlap", lambda native: lambda labels, logits: native(labels, _with_row(logits, shard, math.log(2.0))))


def _with_row(logits_SBV: torch.Tensor, shard: VocabShard, added: float) -> torch.Tensor:
    """A copy whose logit of one row of the head is larger by `added`."""
    out = logits_SBV.float().clone()
    row = (shard.tp.size - 1) * shard.width
    if shard.start <= row < shard.start + shard.width:
        out[..., row - shard.start] += added
    return out


def double_owner(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """Two ranks supply the target's logit, and the sum over ranks holds it twice."""

    def make(native: Loss) -> Loss:
        def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            whole_SV = torch.cat(shard.tp.gathered(logits[:, 0].float()), dim=-1)
            return native(labels, logits) - owner_twice(whole_SV, labels[0])[None]

        return loss

    return _on_loss(gpt, "double_owner", make)


def shift_by_one(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """Every row of logits scores the token before the one it should."""
    return _on_loss(gpt, "shift_by_one", lambda native: lambda labels, logits: native(labels.roll(1, dims=1), logits))


def zero_grad_non_owner(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """A rank that does not own the target gets no gradient: the reduction over ranks is not differentiated."""

    def make(native: Loss) -> Loss:
        def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            owns_S = (labels[0] >= shard.start) & (labels[0] < shard.start + shard.width)
            return native(labels, torch.where(owns_S[:, None, None], logits, logits.detach()))

        return loss

    return _on_loss(gpt, "zero_grad_non_owner", make)


def merge_arrival_order(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """The ranks' parts of the denominator are merged in the order in which they come, which is another one at every call."""

    def make(native: Loss) -> Loss:
        turns = itertools.count()

        def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            own_SV = logits[:, 0].float()
            parts = shard.tp.gathered(own_SV.detach())
            parts[shard.tp.rank] = own_SV  # the one that a gradient can reach
            target_S = torch.cat(parts, dim=-1).gather(1, labels[0][:, None])[:, 0]
            return (merged_as_they_arrive(parts, next(turns)) - target_S)[None]

        return loss

    return _on_loss(gpt, "merge_arrival_order", make)


def fallback_reported_as_requested(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """Another of Megatron's losses runs than its config says: the fused one for the unfused, the unfused one for any other."""

    def make(native: Loss) -> Loss:
        def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            with fused_loss(gpt.config, "none" if gpt.config.cross_entropy_loss_fusion else "native"):
                return native(labels, logits)

        return loss

    return _on_loss(gpt, "fallback_reported_as_requested", make)


def head_row_off_by_one(gpt: Any, shard: VocabShard) -> Sequence[Patch]:
    """The head reads the hidden state of the row before."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda input, **rest: native(input=input.roll(1, dims=0), **rest)

    return [Patch(target=gpt.output_layer, name="_forward_impl", make=make, pins=(), label="plant head_row_off_by_one")]
