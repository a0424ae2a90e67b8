"""Specification of `norm`: float64 inside, a rounding before and after the weight."""

from __future__ import annotations

import torch

from rlmismatch import float64
from rlmismatch.kernels.common.rounding import round_once


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., N] in `out_dtype` (default: x's); float64 has no rounding anywhere."""
    dtype = out_dtype or x.dtype
    x = x.double()
    unit = x / torch.sqrt(float64.mean(x.square()) + eps)
    return round_once(round_once(unit, dtype).double() * weight.double(), dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, residual sum) in `out_dtype` (default: x's); float64 has no rounding anywhere."""
    total = round_once(x.double() + residual.double(), out_dtype or x.dtype)
    return rms_norm(total, weight, eps), total
