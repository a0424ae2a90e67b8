"""The trainer's log-prob arithmetic: what a run asks of the native loss, and the other ways to join the vocabulary shards.

Shapes, per rank: S sequence, B = 1 batch, H hidden, V columns of this rank's shard of the padded vocabulary, J tiles of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.nn import functional

from rlmismatch.kernels import logprob
from rlmismatch.kernels.logprob import reference as logprob_fp64
from rlmismatch.kernels.logprob.partials import tile_count
from rlmismatch.pins import logprob_ways
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.logprob_ways import Way, blocks
from rlmismatch.transforms import Chain

Impl = Literal["reference", "triton"]
Padding = Literal["include", "mask"]
# none: Megatron's unfused loss. native, te: its fused ones. The last two are ours: rows, or hidden rows, a chunk at a time.
Fusion = Literal["none", "native", "te", "chunked_linear_ce", "slime_vocab_parallel"]
NATIVE_WAY: Final = Way(reduce="allreduce_partials", gather="masked_sum_allreduce")
FIXED_MERGE: Final = Way(reduce="allgather_partials_fixed_merge", gather="local_gather")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What one arm asks of the native loss. The defaults are Megatron's own behaviour and need no hook."""

    padding: Padding = "include"
    chain: Chain = Chain()  # noqa: RUF009 - frozen
    way: Way = NATIVE_WAY
    fusion: Fusion = "none"
    block_size: int = 512  # columns a time in chunked_linear_ce
    chunk_size: int = 64  # rows a time in chunked_linear_ce and slime_vocab_parallel

    @property
    def forward_only(self) -> bool:
        """Whether the loss is one of ours, which scores without autograd."""
        return self.way != NATIVE_WAY or self.fusion in ("chunked_linear_ce", "slime_vocab_parallel")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What a run asks of the head's GEMM. The defaults are Megatron's own behaviour and need no hook."""

    dtype: torch.dtype | None = None  # of the operands and of the logits; None: the model's
    rows: int | None = None  # rows a GEMM; None: all rows of a sequence


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

    def counted(self, padding: Padding) -> int:
        """Columns of the whole vocabulary that enter the denominator."""
        return self.padded_vocab_size if padding == "include" else self.vocab_size


@dataclass(frozen=True, kw_only=True)
class HeadInput:
    """What the head of this forward read: hidden rows [S, H] and this rank's weight [V, H], in the dtype of its GEMM."""

    hidden_SH: torch.Tensor
    weight_VH: torch.Tensor


def native_loss(
    native: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    labels_BS: torch.Tensor,
    logits_SBV: torch.Tensor,
    *,
    settings: LossSettings,
    shard: VocabShard,
    impl: Impl,
    head: HeadInput | None = None,
) -> torch.Tensor:
    """float32 [B, S]: minus the log-prob of each label under `settings`. `logits_SBV` is left as it is.

    native: Megatron's own loss, fused or not as its config says, which is run unless `settings` ask for arithmetic it does not have.
    head: needed for chunked_linear_ce, which starts from the hidden rows.
    """
    labels_S, logits_SV = labels_BS[0], logits_SBV[:, 0]
    counted = shard.counted(settings.padding)
    if settings.fusion == "chunked_linear_ce":
        if head is None:
            raise ValueError("a fused linear loss needs the head's input")
        own_VH = head.weight_VH[: shard.columns(shard.tp.rank, counted)]
        tiling = logprob_ways.Tiling(block_size=settings.block_size, chunk_size=settings.chunk_size)
        return -logprob_ways.linear_selected(
            head.hidden_SH, own_VH, labels_S, start=shard.start, chain=settings.chain, tiling=tiling, tp=shard.tp
        )[None]
    if settings.fusion == "slime_vocab_parallel":
        prepared_SV = _prepared(logits_SV, settings, shard)
        rows = settings.chunk_size
        chunks = zip(blocks(prepared_SV, rows), blocks(labels_S, rows), strict=True)
        return -torch.cat([_joined(x_SV.float(), t_S, counted, NATIVE_WAY, shard) for x_SV, t_S in chunks])[None]
    if settings.way == FIXED_MERGE:
        return -merged_logprob(logits_SV, labels_S, counted, chain=settings.chain, shard=shard, impl=impl)[None]
    prepared_SV = _prepared(logits_SV, settings, shard)
    if settings.way == NATIVE_WAY and settings.fusion == "te":
        return _finite_loss(native, labels_BS, prepared_SV)
    if settings.way == NATIVE_WAY:
        return native(labels_BS, prepared_SV[:, None])
    return -_joined(prepared_SV.float(), labels_S, counted, settings.way, shard)[None]


def _finite_loss(
    native: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], labels_BS: torch.Tensor, prepared_SV: torch.Tensor
) -> torch.Tensor:
    """Transformer Engine's loss, which is NaN on a rank that sees -inf alone: padding, or tokens that a transform cut off.

    It is given the lowest finite number, whose exp() below any logit is the same 0; a label that was cut off is inf again afterwards.
    """
    lowest = torch.finfo(prepared_SV.dtype).min
    loss_BS = native(labels_BS, prepared_SV.clamp_(min=lowest)[:, None])
    return loss_BS.masked_fill(loss_BS > -lowest / 2, torch.inf)


def _joined(prepared_SV: torch.Tensor, labels_S: torch.Tensor, counted: int, way: Way, shard: VocabShard) -> torch.Tensor:
    own = prepared_SV[:, : shard.columns(shard.tp.rank, counted)]
    return logprob_ways.selected(own, labels_S, start=shard.start, way=way, tp=shard.tp)


def _prepared(logits_SV: torch.Tensor, settings: LossSettings, shard: VocabShard) -> torch.Tensor:
    """A copy of this rank's logits as the loss is to see them: Megatron's loss overwrites float32 logits.

    They are transformed in float32: in the model dtype every step would round the logits once more.
    """
    chain, counted = settings.chain, shard.counted(settings.padding)
    if chain.elementwise:
        prepared_SV = chain.apply(logits_SV.float()) if chain.steps else logits_SV.clone()
    else:
        whole_SV = torch.cat(shard.tp.gathered(logits_SV), dim=-1).float()[:, :counted]
        missing = shard.padded_vocab_size - counted
        whole_SV = functional.pad(chain.apply(whole_SV), (0, missing), value=-torch.inf)
        prepared_SV = whole_SV[:, shard.start : shard.start + shard.width].contiguous()
    if settings.padding == "mask":
        prepared_SV[:, shard.real_width :] = -torch.inf
    return prepared_SV


def merged_logprob(
    logits_SV: torch.Tensor, targets_S: torch.Tensor, vocab_size: int, *, chain: Chain, shard: VocabShard, impl: Impl
) -> torch.Tensor:
    """float32 [S]: fixed-width tiles of every rank, gathered and merged in global tile order; columns from `vocab_size` on never enter."""
    temperature = chain.only_temperature
    if temperature is None:
        logits_SV, temperature = _pinned_chain(logits_SV, vocab_size, chain, shard), 1.0
    parts = gathered_partials(logits_SV, targets_S, vocab_size, temperature=temperature, shard=shard, impl=impl)
    return logprob.merge(parts, vocab_size=vocab_size, impl=impl)


def gathered_partials(
    logits_SV: torch.Tensor, targets_S: torch.Tensor, vocab_size: int, *, temperature: float, shard: VocabShard, impl: Impl
) -> list[logprob.VocabPartials]:
    """Every rank's fixed-width tiles of its shard, rank 0 first, on every rank. Collective."""
    own = logprob.partials(logits_SV, targets_S, vocab_start=shard.start, vocab_size=vocab_size, impl=impl, temperature=temperature)
    tiles = [tile_count(shard.columns(rank, vocab_size)) for rank in range(shard.tp.size)]
    most = max(tiles)
    max_RSJ, sumexp_RSJ = (shard.tp.gathered(functional.pad(x_SJ, (0, most - x_SJ.shape[1]))) for x_SJ in (own.max_TJ, own.sumexp_TJ))
    targets_RS, owns_RS = shard.tp.gathered(own.target_T), shard.tp.gathered(own.owns_T.to(torch.uint8))
    return [
        logprob.VocabPartials(
            max_TJ=max_RSJ[rank][:, :count],
            sumexp_TJ=sumexp_RSJ[rank][:, :count],
            target_T=targets_RS[rank],
            owns_T=owns_RS[rank].bool(),
            first_tile=rank * shard.width // logprob.WIDTH,
        )
        for rank, count in enumerate(tiles)
    ]


def _pinned_chain(logits_SV: torch.Tensor, vocab_size: int, chain: Chain, shard: VocabShard) -> torch.Tensor:
    """This rank's columns after `chain`, float32, in float64 inside: torch's float32 tanh has other bits at another column."""
    whole_SV = torch.cat(shard.tp.gathered(logits_SV), dim=-1)[:, :vocab_size].double()
    whole_SV = functional.pad(chain.apply(whole_SV), (0, shard.padded_vocab_size - vocab_size), value=-torch.inf)
    return whole_SV[:, shard.start : shard.start + shard.width].float().contiguous()


def exact_logprob(logits_SV: torch.Tensor, targets_S: torch.Tensor, *, chain: Chain, shard: VocabShard) -> torch.Tensor:
    """Unrounded float64 [S] over the real vocabulary, from the logits of all ranks."""
    whole_SV = torch.cat(shard.tp.gathered(logits_SV), dim=-1)[:, : shard.vocab_size].double()
    logp_SV = logprob_fp64.log_softmax_fp64(chain.apply(whole_SV), vocab_size=shard.vocab_size)
    return logp_SV.gather(1, targets_S[:, None].long())[:, 0]
