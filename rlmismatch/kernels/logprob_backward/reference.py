"""Specification of `logprob_backward`: float64 inside, one rounding to float32."""

from __future__ import annotations

import torch

from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.kernels.logprob.partials import WIDTH, tile_count


def dlogits(
    logits_TV: torch.Tensor,
    local_T: torch.Tensor,
    grad_T: torch.Tensor,
    max_T: torch.Tensor,
    logsum_T: torch.Tensor,
    *,
    columns: int,
    temperature: float,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``grad * (onehot - p) / temperature`` in the first `columns` columns, 0 in the others: [T, V] in `out_dtype`."""
    x_TV = logits_TV[:, :columns].double() / temperature
    grad_TV = -torch.exp((x_TV - max_T.double()[:, None]) - logsum_T.double()[:, None])
    owns_T = (local_T >= 0) & (local_T < columns)
    rows_T = owns_T.nonzero()[:, 0]
    grad_TV[rows_T, local_T[rows_T]] += 1.0
    grad_TV *= grad_T.double()[:, None] / temperature
    return round_once(torch.nn.functional.pad(grad_TV, (0, logits_TV.shape[1] - columns)), out_dtype)


def entropy_tiles(logits_TV: torch.Tensor, *, columns: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(max, sum of e, sum of (x - max) * e), e = exp(x - max), of every tile of the first `columns` columns: float64 [T, J] each."""
    pad = tile_count(columns) * WIDTH - columns
    x_TV = torch.nn.functional.pad(logits_TV[:, :columns].double() / temperature, (0, pad), value=-torch.inf)
    x_TJW = x_TV.view(logits_TV.shape[0], tile_count(columns), WIDTH)
    max_TJ = x_TJW.amax(dim=-1)
    below_TJW = x_TJW - max_TJ.masked_fill(max_TJ == -torch.inf, 0.0)[..., None]
    exp_TJW = torch.exp(below_TJW)
    # A column of probability 0 adds 0: -inf * 0 is not a number.
    return max_TJ, exp_TJW.sum(dim=-1), (below_TJW.masked_fill(below_TJW == -torch.inf, 0.0) * exp_TJW).sum(dim=-1)


def fold_entropy(max_TJ: torch.Tensor, sumexp_TJ: torch.Tensor, weighted_TJ: torch.Tensor) -> torch.Tensor:
    """float32 [T] from all tiles in global order."""
    below_TJ = max_TJ - max_TJ.amax(dim=1, keepdim=True)
    scale_TJ = torch.exp(below_TJ)
    total_T = (scale_TJ * sumexp_TJ).sum(dim=1)
    finite_TJ = below_TJ.masked_fill(below_TJ == -torch.inf, 0.0)
    weighted_T = (scale_TJ * (weighted_TJ + finite_TJ * sumexp_TJ)).sum(dim=1)
    return round_once(torch.log(total_T) - weighted_T / total_T, torch.float32)
