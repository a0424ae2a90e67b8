"""What training needs beside the log-prob: the gradient of the logits, and the entropy of the distribution, over a sharded vocabulary.

With x the scaled logits, M and L of all tiles (kernels/logprob) and p = exp((x - M) - L):

    d/dlogits of sum_t g_t * logp_t  =  g_t * (onehot(target_t) - p_t) / temperature        on every rank, owner of the target or not
    entropy_t  =  -sum_v p log p  =  L - (sum_j exp(m_j - M) * (w_j + (m_j - M) * s_j)) / exp(L)

where tile j of `WIDTH` columns has maximum m_j, s_j = sum exp(x - m_j) and w_j = sum (x - m_j) * exp(x - m_j). Tiles are folded in
global order, so that neither gradient nor entropy depends on where the shard boundaries lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation
from rlmismatch.kernels.logprob.partials import WIDTH, Shard, TargetCheck, VocabPartials, join, require_tiled

__all__ = ["WIDTH", "EntropyPartials", "Impl", "Normaliser", "dlogits", "entropy", "entropy_partials", "merge_entropy", "normaliser"]


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """Of one row over the whole vocabulary: its largest scaled logit M, and L = log sum exp(x - M). [T] each."""

    max_T: torch.Tensor
    logsum_T: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class EntropyPartials:
    """What one rank knows of its shard's entropy, tile by tile; J tiles, the first of which is global tile `first_tile`."""

    max_TJ: torch.Tensor
    sumexp_TJ: torch.Tensor
    weighted_TJ: torch.Tensor  # sum of (x - max) * exp(x - max)
    first_tile: int


def normaliser(parts: Sequence[VocabPartials], *, vocab_size: int, impl: Impl) -> Normaliser:
    """M and L of every row, from every rank's `logprob.partials`, rank 0 first: the ones that the forward subtracted, bit for bit."""
    joined = join(parts, vocab_size=vocab_size)
    module = implementation("logprob", impl, joined.max_TJ, joined.sumexp_TJ)
    max_T, logsum_T = module.normaliser(joined.max_TJ, joined.sumexp_TJ)
    return Normaliser(max_T=max_T, logsum_T=logsum_T)


def dlogits(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    grad_T: torch.Tensor,
    *,
    normaliser: Normaliser,
    vocab_start: int,
    vocab_size: int,
    impl: Impl,
    temperature: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    targets_checked: bool = False,
) -> torch.Tensor:
    """[T, Vlocal] in `out_dtype`: gradient of ``sum(grad_T * logp_T)`` by this rank's logits; 0 in columns of padding.

    logits_TV: [T, Vlocal], the columns from `vocab_start` on, in bf16, fp16 or fp32. targets_T: global ids. grad_T: float32 [T], one
    grad_output a row. The result is computed in float32 (float64 for reference) whatever the logits are, and rounded once.
    Raises ValueError for shapes that do not fit, ContractError for a target outside the vocabulary, unless the caller has checked
    the targets.
    """
    shard = Shard.of(vocab_start=vocab_start, local_width=logits_TV.shape[1], vocab_size=vocab_size)
    check = None if targets_checked else TargetCheck(targets_T, rows=logits_TV.shape[0], vocab_size=vocab_size)
    if grad_T.shape != targets_T.shape or grad_T.dtype != torch.float32:
        raise ValueError(f"grad_output must be float32 {tuple(targets_T.shape)}, got {grad_T.dtype} {tuple(grad_T.shape)}")
    module = implementation("logprob_backward", impl, logits_TV, targets_T, grad_T)
    out_TV: torch.Tensor = module.dlogits(
        logits_TV,
        targets_T.long() - shard.start,
        grad_T,
        normaliser.max_T,
        normaliser.logsum_T,
        columns=shard.columns,
        temperature=temperature,
        out_dtype=out_dtype,
    )
    if check:
        check.require()
    return out_TV


def entropy(logits_TV: torch.Tensor, *, vocab_size: int, impl: Impl, temperature: float = 1.0) -> torch.Tensor:
    """float32 [T], nats: entropy of the softmax of the first `vocab_size` columns, after temperature."""
    part = entropy_partials(logits_TV, vocab_start=0, vocab_size=vocab_size, impl=impl, temperature=temperature)
    return merge_entropy([part], vocab_size=vocab_size, impl=impl)


def entropy_partials(
    logits_TV: torch.Tensor, *, vocab_start: int, vocab_size: int, impl: Impl, temperature: float = 1.0
) -> EntropyPartials:
    """One rank's part; columns at or above `vocab_size` are not read. Raises ValueError if the shard cuts a tile."""
    shard = Shard.of(vocab_start=vocab_start, local_width=logits_TV.shape[1], vocab_size=vocab_size)
    module = implementation("logprob_backward", impl, logits_TV)
    max_TJ, sumexp_TJ, weighted_TJ = module.entropy_tiles(logits_TV, columns=shard.columns, temperature=temperature)
    return EntropyPartials(max_TJ=max_TJ, sumexp_TJ=sumexp_TJ, weighted_TJ=weighted_TJ, first_tile=shard.first_tile)


def merge_entropy(parts: Sequence[EntropyPartials], *, vocab_size: int, impl: Impl) -> torch.Tensor:
    """float32 [T], nats, from every rank's `entropy_partials`, rank 0 first. Raises ContractError if the tiles leave a gap or overlap."""
    require_tiled([(p.first_tile, p.max_TJ.shape[1]) for p in parts], vocab_size=vocab_size)
    max_TJ, sumexp_TJ, weighted_TJ = (
        torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("max_TJ", "sumexp_TJ", "weighted_TJ")
    )
    module = implementation("logprob_backward", impl, max_TJ)
    out_T: torch.Tensor = module.fold_entropy(max_TJ, sumexp_TJ, weighted_TJ)
    return out_T
