"""Known faults of the rollout's head and log-prob. Each acts on what the engine does natively; the pin of that operation heals it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.engines.logprob_plants import merged_as_they_arrive
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_live import LiveModel

Native = Callable[..., Any]


def _on_softmax(live: LiveModel, label: str, make: Callable[[Native], Native]) -> Sequence[Patch]:
    return [Patch(target=live.sampler, name="compute_logprobs", make=make, pins=(), label=label)]


def pad_rows_included(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The padded rows of the head, which hold zeros, are counted in the denominator."""
    pads = int(live.model.lm_head.num_embeddings_padded) - live.vocab_size

    def make(native: Native) -> Native:
        def softmax(logits: torch.Tensor) -> torch.Tensor:
            logp: torch.Tensor = native(torch.nn.functional.pad(logits, (0, pads)))
            return logp[:, : logits.shape[1]].contiguous()

        return softmax

    return _on_softmax(live, "pad_rows_included", make)


def shard_gap(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The first row of the last rank belongs to no rank: it holds no probability."""
    return _on_softmax(live, "shard_gap", lambda native: lambda logits: native(_with_row(live, logits, -torch.inf)))


def shard_overlap(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The first row of the last rank belongs to two ranks: the denominator counts it twice."""
    return _on_softmax(live, "shard_overlap", lambda native: lambda logits: native(_with_row(live, logits, math.log(2.0))))


def _with_row(live: LiveModel, logits_TV: torch.Tensor, added: float) -> torch.Tensor:
    """A copy whose logit of one row of the head is larger by `added`."""
    out = logits_TV.float().clone()
    out[:, (live.tp.size - 1) * live.head_shard_width] += added
    return out


def merge_arrival_order(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The ranks' parts of the denominator are merged in the order in which they come, which is another one at every call."""
    turns = itertools.count()

    def make(native: Native) -> Native:
        def softmax(logits: torch.Tensor) -> torch.Tensor:
            parts = torch.split(logits, live.head_shard_width, dim=1)
            return logits.float() - merged_as_they_arrive(parts, next(turns))[:, None]

        return softmax

    return _on_softmax(live, "merge_arrival_order", make)


def fallback_reported_as_requested(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The log-softmax is another one than the sampler's own, and the sampler says nothing of it: float64, rounded once."""
    return _on_softmax(live, "fallback_reported_as_requested", lambda native: lambda logits: logits.double().log_softmax(dim=-1).float())


def double_owner(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """Two ranks supply the target's logit, and the sum over ranks holds it twice."""

    def make(native: Native) -> Native:
        def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
            out = native(logprobs, num_logprobs, token_ids)
            twice_T = out.logprobs[:, 0] + (out.logprobs[:, 0] - logprobs.amax(dim=1))
            return out._replace(logprobs=torch.cat([twice_T[:, None], out.logprobs[:, 1:]], dim=1))

        return gather

    return [Patch(target=live.sampler, name="gather_logprobs", make=make, pins=(), label="double_owner")]


def shift_by_one(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """Every token of a prompt is scored with the logits of the row before."""

    def make(native: Native) -> Native:
        return lambda logprobs, num_logprobs, token_ids: native(logprobs.roll(1, dims=0), num_logprobs, token_ids)

    return [Patch(target=live.sampler, name="gather_logprobs", make=make, pins=(), label="shift_by_one")]


def head_row_off_by_one(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The head reads the hidden state of the row before."""

    def make(native: Native) -> Native:
        return lambda lm_head, x_TH, bias=None: native(lm_head, x_TH.roll(1, dims=0), bias)

    processor = live.model.logits_processor
    target, name = (processor, "_apply_head") if hasattr(processor, "_apply_head") else (live.model.lm_head.quant_method, "apply")
    return [Patch(target=target, name=name, make=make, pins=(), label="head_row_off_by_one")]
