"""Specification of `logprob`: float64 tiles, float64 fold, one rounding to float32."""

from __future__ import annotations

import torch

from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.kernels.logprob.partials import WIDTH, tile_count

_BLOCK_ELEMENTS = 2**24  # bounds the float64 copy of a large vocabulary; rows are independent


def rows(logits_TV: torch.Tensor, targets_T: torch.Tensor, *, columns: int, temperature: float) -> torch.Tensor:
    """Log-prob of the target among the first `columns` columns, float32 [T]; NaN for one outside them."""
    max_T, logsum_T = normaliser(*tiles(logits_TV, columns=columns, temperature=temperature))
    inside_T = (targets_T >= 0) & (targets_T < columns)
    target_T = gather(logits_TV, targets_T.long(), inside_T, temperature=temperature)
    return selected(target_T, max_T, logsum_T)


def tiles(logits_TV: torch.Tensor, *, columns: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, sum of exp(x - max)) of every tile of the first `columns` columns: float64 [T, J] each."""
    pad = tile_count(columns) * WIDTH - columns
    blocks = []
    rows = max(1, _BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, max(1, logits_TV.shape[0]), rows):
        logits = logits_TV[start : start + rows, :columns]
        x_TJW = torch.nn.functional.pad(_scaled(logits, temperature), (0, pad), value=-torch.inf).view(
            logits.shape[0], tile_count(columns), WIDTH
        )
        max_TJ = x_TJW.amax(dim=-1)
        # A tile of -inf alone holds no probability: exp(-inf - 0), not exp(-inf + inf).
        shift_TJ = max_TJ.masked_fill(max_TJ == -torch.inf, 0.0)
        blocks.append((max_TJ, torch.exp(x_TJW - shift_TJ[..., None]).sum(dim=-1)))
    return torch.cat([m for m, _ in blocks]), torch.cat([s for _, s in blocks])


def gather(logits_TV: torch.Tensor, local_T: torch.Tensor, owns_T: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """The scaled logit at column `local_T` where owned, NaN elsewhere: float64 [T]."""
    target_T = torch.full(owns_T.shape, torch.nan, dtype=torch.float64, device=logits_TV.device)
    target_T[owns_T] = _scaled(logits_TV[owns_T, local_T[owns_T]], temperature)
    return target_T


def normaliser(max_TJ: torch.Tensor, sumexp_TJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, L) of all tiles in global order: the largest maximum, and log sum exp(x - M). float64 [T] each."""
    max_T = max_TJ.amax(dim=1)
    return max_T, torch.log((sumexp_TJ * torch.exp(max_TJ - max_T[:, None])).sum(dim=1))


def selected(
    target_T: torch.Tensor, max_T: torch.Tensor, logsum_T: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``(x - M) - L`` at the targets, [T] in `out_dtype`; float64 is unrounded."""
    return round_once((target_T - max_T) - logsum_T, out_dtype)


def log_softmax(
    logits_TV: torch.Tensor,
    max_T: torch.Tensor,
    logsum_T: torch.Tensor,
    *,
    columns: int,
    temperature: float,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``(x - M) - L`` of every column, [T, columns] in `out_dtype`; float64 is unrounded."""
    return round_once((_scaled(logits_TV[:, :columns], temperature) - max_T[:, None]) - logsum_T[:, None], out_dtype)


def log_softmax_fp64(logits_TV: torch.Tensor, *, vocab_size: int, temperature: float = 1.0) -> torch.Tensor:
    """Unrounded log-softmax of the first `vocab_size` columns: float64 [T, vocab_size]. Judges native log-probabilities."""
    max_T, logsum_T = normaliser(*tiles(logits_TV, columns=vocab_size, temperature=temperature))
    return log_softmax(logits_TV, max_T, logsum_T, columns=vocab_size, temperature=temperature, out_dtype=torch.float64)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.double() / temperature
