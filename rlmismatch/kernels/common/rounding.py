"""float64 to a model dtype in one rounding."""

from __future__ import annotations

import torch


def round_once(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` (float64) rounded once, to nearest even, to `dtype`; `x` itself for float64.

    torch converts float64 to bfloat16 and float16 by way of float32, which is two roundings: one result in about 10^5 then lies on
    the wrong side of a tie. Here the step to float32 rounds to odd (Boldo and Melquiond, 2008), after which the second
    rounding cannot see a false tie: float32 has more than two bits more than either dtype.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"expected float64, got {x.dtype}")
    if dtype == torch.float64:
        return x
    nearest = x.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    widened = nearest.to(torch.float64)
    away_from_zero = (widened.abs() > x.abs()).to(torch.int32)
    inexact = ((widened != x) & ~torch.isnan(x)).to(torch.int32)
    odd = (nearest.view(torch.int32) - away_from_zero) | inexact
    return odd.view(torch.float32).to(dtype)
