"""The trainer's log-prob arithmetic: what a run asks of the native loss, and the other ways to join the vocabulary shards.

Shapes, per rank: S sequence, B = 1 batch, V columns of this rank's shard of the padded vocabulary, J tiles of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch.nn import functional

from rlmismatch.kernels import logprob
from rlmismatch.kernels.logprob import reference as logprob_fp64
from rlmismatch.kernels.logprob.partials import tile_count
from rlmismatch.pins.collectives import TpGroup

Impl = Literal["reference", "triton"]
Padding = Literal["include", "mask"]
Reduce = Literal["allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits"]
REDUCES: Final[tuple[Reduce, ...]] = get_args(Reduce)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What one arm asks of the native loss. The defaults are Megatron's own behaviour and need no hook."""

    padding: Padding = "include"
    temperature: float = 1.0
    reduce: Reduce = "allreduce_partials"


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's share of the vocabulary: `width` columns on every rank, of which those from `vocab_size` on are padding."""

    tp: TpGroup
    vocab_size: int  # real
    padded_vocab_size: int

    @property
    def width(self) -> int:
        return self.padded_vocab_size // self.tp.size

    @property
    def start(self) -> int:
        return self.tp.rank * self.width

    @property
    def real_width(self) -> int:
        """Columns of this rank that are not padding."""
        return self.columns(self.tp.rank, self.vocab_size)

    def columns(self, rank: int, vocab_size: int) -> int:
        """Columns of `rank` that lie below `vocab_size`."""
        return min(max(0, vocab_size - rank * self.width), self.width)


def native_loss(
    native: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    labels_BS: torch.Tensor,
    logits_SBV: torch.Tensor,
    *,
    settings: LossSettings,
    shard: VocabShard,
    impl: Impl,
) -> torch.Tensor:
    """float32 [B, S]: minus the log-prob of each label under `settings`. `logits_SBV` is left as it is.

    native: Megatron's own loss, which is run unless `settings.reduce` asks for another way to join the shards.
    """
    labels_S = labels_BS[0]
    if settings.reduce == "allgather_partials_fixed_merge":
        counted = shard.padded_vocab_size if settings.padding == "include" else shard.vocab_size
        return -merged_logprob(logits_SBV[:, 0], labels_S, counted, temperature=settings.temperature, shard=shard, impl=impl)[None]
    prepared_SBV = _prepared(logits_SBV, settings, shard)
    if settings.reduce == "allreduce_partials":
        return native(labels_BS, prepared_SBV)
    whole_SV = torch.cat(shard.tp.gathered(prepared_SBV[:, 0].float()), dim=-1)
    return -whole_SV.log_softmax(dim=-1).gather(1, labels_S[:, None]).T


def _prepared(logits_SBV: torch.Tensor, settings: LossSettings, shard: VocabShard) -> torch.Tensor:
    """A copy of the logits as the loss is to see them: Megatron's loss overwrites float32 logits.

    They are divided in float32: in the model dtype the division would round every logit once more.
    """
    prepared_SBV = logits_SBV.clone() if settings.temperature == 1.0 else logits_SBV.float() / settings.temperature
    if settings.padding == "mask":
        prepared_SBV[..., shard.real_width :] = -torch.inf
    return prepared_SBV


def merged_logprob(
    logits_SV: torch.Tensor, targets_S: torch.Tensor, vocab_size: int, *, temperature: float, shard: VocabShard, impl: Impl
) -> torch.Tensor:
    """float32 [S]: fixed-width tiles of every rank, gathered and merged in global tile order; columns from `vocab_size` on never enter."""
    own = logprob.partials(logits_SV, targets_S, vocab_start=shard.start, vocab_size=vocab_size, impl=impl, temperature=temperature)
    tiles = [tile_count(shard.columns(rank, vocab_size)) for rank in range(shard.tp.size)]
    most = max(tiles)
    max_RSJ, sumexp_RSJ = (shard.tp.gathered(functional.pad(x_SJ, (0, most - x_SJ.shape[1]))) for x_SJ in (own.max_TJ, own.sumexp_TJ))
    targets_RS, owns_RS = shard.tp.gathered(own.target_T), shard.tp.gathered(own.owns_T.to(torch.uint8))
    parts = [
        logprob.VocabPartials(
            max_TJ=max_RSJ[rank][:, :count],
            sumexp_TJ=sumexp_RSJ[rank][:, :count],
            target_T=targets_RS[rank],
            owns_T=owns_RS[rank].bool(),
            first_tile=rank * shard.width // logprob.WIDTH,
        )
        for rank, count in enumerate(tiles)
    ]
    return logprob.merge(parts, vocab_size=vocab_size, impl=impl)


def exact_logprob(logits_SV: torch.Tensor, targets_S: torch.Tensor, *, temperature: float, shard: VocabShard) -> torch.Tensor:
    """Unrounded float64 [S] over the real vocabulary, from the logits of all ranks."""
    whole_SV = torch.cat(shard.tp.gathered(logits_SV), dim=-1)
    logp_SV = logprob_fp64.log_softmax_fp64(whole_SV, vocab_size=shard.vocab_size, temperature=temperature)
    return logp_SV.gather(1, targets_S[:, None].long())[:, 0]
