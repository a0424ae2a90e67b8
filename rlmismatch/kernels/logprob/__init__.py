"""Log-probabilities in nats: of one target a row, over a whole or a sharded vocabulary, and of every token.

Every form is the same arithmetic. Logits are upcast, divided by the temperature (x), and summed tile by tile (`WIDTH` columns of the
*real* vocabulary; padding never enters) to a maximum and a sum of exponentials. All tiles of the vocabulary, in global order, are
folded to the maximum M and L = log sum exp(x - M). Then ``logp = (x - M) - L``. Where the shard boundaries lie does not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation
from rlmismatch.kernels.logprob.partials import WIDTH, Shard, TargetCheck, VocabPartials, join

__all__ = ["WIDTH", "Impl", "VocabPartials", "log_softmax", "merge", "partials", "selected"]


def selected(logits_TV: torch.Tensor, targets_T: torch.Tensor, *, vocab_size: int, impl: Impl, temperature: float = 1.0) -> torch.Tensor:
    """float32 [T]: log-softmax of the first `vocab_size` columns at the target. Bit for bit `merge` of `partials` of any sharding.

    logits_TV: [T, V >= vocab_size] in bf16, fp16 or fp32. targets_T: [T] int32 or int64. Raises ContractError for a target
    outside ``[0, vocab_size)``. NaN logits give NaN.
    """
    _check(logits_TV, temperature)
    _require_all_columns(logits_TV, vocab_size)
    module: Any = implementation("logprob", impl, logits_TV, targets_T)
    check = TargetCheck(targets_T, rows=logits_TV.shape[0], vocab_size=vocab_size)
    logp_T: torch.Tensor = module.rows(logits_TV, targets_T, columns=vocab_size, temperature=temperature)
    check.require()
    return logp_T


def partials(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    impl: Impl,
    temperature: float = 1.0,
    targets_checked: bool = False,
) -> VocabPartials:
    """One rank's part. logits_TV: [T, Vlocal], the columns from `vocab_start` on; targets_T: [T], global ids, equal on all ranks.

    Columns at or above `vocab_size` (padding rows of the head) are not read. Raises ValueError if the shard cuts a tile, ContractError for
    a target outside ``[0, vocab_size)``, on every rank alike, unless the caller has checked the targets.
    """
    _check(logits_TV, temperature)
    shard = Shard.of(vocab_start=vocab_start, local_width=logits_TV.shape[1], vocab_size=vocab_size)
    module = implementation("logprob", impl, logits_TV, targets_T)
    check = None if targets_checked else TargetCheck(targets_T, rows=logits_TV.shape[0], vocab_size=vocab_size)
    local_T = targets_T.long() - shard.start
    owns_T = (local_T >= 0) & (local_T < shard.columns)
    max_TJ, sumexp_TJ = module.tiles(logits_TV, columns=shard.columns, temperature=temperature)
    target_T = module.gather(logits_TV, local_T, owns_T, temperature=temperature)
    if check:
        check.require()
    return VocabPartials(max_TJ=max_TJ, sumexp_TJ=sumexp_TJ, target_T=target_T, owns_T=owns_T, first_tile=shard.first_tile)


def merge(parts: Sequence[VocabPartials], *, vocab_size: int, impl: Impl) -> torch.Tensor:
    """float32 [T]: the targets' log-probabilities from every rank's `partials`, rank 0 first.

    Raises ContractError if the tiles leave a gap or overlap, or a row does not have exactly one owner.
    """
    joined = join(parts, vocab_size=vocab_size)
    module = implementation("logprob", impl, joined.max_TJ, joined.sumexp_TJ)
    logp_T: torch.Tensor = module.selected(joined.target_T, *module.normaliser(joined.max_TJ, joined.sumexp_TJ))
    return logp_T


def log_softmax(logits_TV: torch.Tensor, *, vocab_size: int, impl: Impl, temperature: float = 1.0) -> torch.Tensor:
    """float32 [T, vocab_size]: every token's log-probability; at a target, bit for bit what `selected` returns."""
    _check(logits_TV, temperature)
    _require_all_columns(logits_TV, vocab_size)
    module: Any = implementation("logprob", impl, logits_TV)
    normaliser = module.normaliser(*module.tiles(logits_TV, columns=vocab_size, temperature=temperature))
    logp_TV: torch.Tensor = module.log_softmax(logits_TV, *normaliser, columns=vocab_size, temperature=temperature)
    return logp_TV


def _check(logits_TV: torch.Tensor, temperature: float) -> None:
    if logits_TV.dim() != 2 or not logits_TV.is_floating_point():
        raise ValueError(f"logits must be [T, V] floats, got {tuple(logits_TV.shape)} {logits_TV.dtype}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _require_all_columns(logits_TV: torch.Tensor, vocab_size: int) -> None:
    if logits_TV.dim() != 2 or not 0 < vocab_size <= logits_TV.shape[1]:
        raise ValueError(f"logits {tuple(logits_TV.shape)} do not hold a vocabulary of {vocab_size}")
