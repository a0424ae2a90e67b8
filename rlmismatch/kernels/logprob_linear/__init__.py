"""Head and log-prob in one: from hidden rows to the targets' log-probs and back, with no more than a block of the logits alive.

A composition of `gemm`, `logprob` and `logprob_backward`, a block of the head's rows at a time. An element of a GEMM depends on no other
column and a tile on no other tile, so the log-probs have the bits of the path that holds all logits, whatever the block.

The gradients are sums over blocks in ascending order: ``dhidden = sum_b dlogits_b @ W_b`` and ``dweight_b = dlogits_b^T @ hidden``, by
`gemm`, in float64 (reference) or float32 (triton), rounded once at the end. dlogits enter them in the dtype of the hidden rows, rounded
once, as an autograd graph through logits of that dtype would hand them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlmismatch.kernels import gemm, logprob, logprob_backward
from rlmismatch.kernels.common.dispatch import Impl
from rlmismatch.kernels.logprob import WIDTH, VocabPartials
from rlmismatch.kernels.logprob.partials import require_targets
from rlmismatch.kernels.logprob_backward import Normaliser

__all__ = ["Gradients", "Impl", "backward", "partials", "selected"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Of ``sum(grad_T * logp_T)``, this rank's part: dhidden is to be summed over the ranks. float32."""

    dhidden_TH: torch.Tensor
    dweight_VH: torch.Tensor


def selected(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    impl: Impl,
    block_size: int = 16384,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """float32 [T], nats: log-softmax of ``hidden @ weight.T`` at the targets. Bit for bit `logprob.selected` of `gemm.linear`."""
    part = partials(
        hidden_TH,
        weight_VH,
        targets_T,
        vocab_start=0,
        vocab_size=vocab_size,
        impl=impl,
        block_size=block_size,
        logits_dtype=logits_dtype,
        temperature=temperature,
    )
    return logprob.merge([part], vocab_size=vocab_size, impl=impl)


def partials(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    impl: Impl,
    block_size: int = 16384,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
) -> VocabPartials:
    """One rank's part, for `logprob.merge`. hidden_TH: [T, H]. weight_VH: this rank's rows of the head, from row `vocab_start` on.

    block_size: rows of the head a time, a multiple of the tile width. logits_dtype: what a logit is rounded to (default: as `hidden_TH`);
    float32 leaves it as it was accumulated. Raises ValueError for a block that cuts a tile.
    """
    require_targets(targets_T, rows=hidden_TH.shape[0], vocab_size=vocab_size)
    found = [
        logprob.partials(
            block, targets_T, vocab_start=start, vocab_size=vocab_size, impl=impl, temperature=temperature, targets_checked=True
        )
        for start, block in _blocks(hidden_TH, weight_VH, vocab_start, block_size, impl, logits_dtype)
    ]
    owns_BT = torch.stack([p.owns_T for p in found])
    owner_1T = owns_BT.int().argmax(dim=0, keepdim=True)
    return VocabPartials(
        max_TJ=torch.cat([p.max_TJ for p in found], dim=1),
        sumexp_TJ=torch.cat([p.sumexp_TJ for p in found], dim=1),
        target_T=torch.stack([p.target_T for p in found]).gather(0, owner_1T)[0],
        owns_T=owns_BT.any(dim=0),
        first_tile=found[0].first_tile,
    )


def backward(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    grad_T: torch.Tensor,
    *,
    normaliser: Normaliser,
    vocab_start: int,
    vocab_size: int,
    impl: Impl,
    block_size: int = 16384,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
) -> Gradients:
    """Gradients by hidden rows and head, logits computed anew a block at a time. normaliser: `logprob_backward.normaliser` of all ranks."""
    require_targets(targets_T, rows=hidden_TH.shape[0], vocab_size=vocab_size)
    wide = torch.float64 if impl == "reference" else torch.float32
    dhidden_TH = torch.zeros(hidden_TH.shape, dtype=wide, device=hidden_TH.device)
    dweight_VH = torch.empty(weight_VH.shape, dtype=torch.float32, device=hidden_TH.device)
    first = 0
    for start, block_TV in _blocks(hidden_TH, weight_VH, vocab_start, block_size, impl, logits_dtype):
        dlogits_TV = logprob_backward.dlogits(
            block_TV,
            targets_T,
            grad_T,
            normaliser=normaliser,
            vocab_start=start,
            vocab_size=vocab_size,
            impl=impl,
            temperature=temperature,
            out_dtype=hidden_TH.dtype,
            targets_checked=True,
        )
        rows = slice(first, first + block_TV.shape[1])
        dhidden_TH += gemm.grad_input(dlogits_TV, weight_VH[rows], impl=impl, out_dtype=wide)
        dweight_VH[rows] = gemm.grad_weight(dlogits_TV, hidden_TH, impl=impl)
        first += block_TV.shape[1]
    return Gradients(dhidden_TH=dhidden_TH.float(), dweight_VH=dweight_VH)


def _blocks(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, vocab_start: int, block_size: int, impl: Impl, logits_dtype: torch.dtype | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """(global id of the first column, logits [T, columns]) of every block of the head's rows, ascending; one empty block of no row."""
    if block_size < 1 or block_size % WIDTH:
        raise ValueError(f"a block of {block_size} columns cuts tiles of {WIDTH}")
    for first in range(0, max(1, weight_VH.shape[0]), block_size):
        rows_VH = weight_VH[first : first + block_size]
        yield vocab_start + first, gemm.linear(hidden_TH, rows_VH, impl=impl, out_dtype=logits_dtype)
