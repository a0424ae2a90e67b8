"""Specification of `swiglu`: float64 inside, one rounding."""

from __future__ import annotations

import torch

from rlmismatch.kernels.common.rounding import round_once


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., I] in `out_dtype` (default: gate's); float64 is unrounded."""
    out = torch.nn.functional.silu(gate.double()) * up.double()
    return round_once(out, out_dtype or gate.dtype)
