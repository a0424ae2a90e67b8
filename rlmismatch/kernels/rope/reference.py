"""Specification of `rope`: float64 angles of the float32 frequencies, one rounding."""

from __future__ import annotations

import torch

from rlmismatch.kernels.common.rounding import round_once


def rotary(
    x_THD: torch.Tensor, positions_T: torch.Tensor, inv_freq: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Contiguous [T, H, D] in `out_dtype` (default: x's); float64 is unrounded."""
    angle_T1F = positions_T.double()[:, None, None] * inv_freq.double()
    cos, sin = angle_T1F.cos() * scale, angle_T1F.sin() * scale
    x, half = x_THD.double(), inv_freq.numel()
    first, second, tail = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, tail], dim=-1)
    return round_once(rotated, out_dtype or x_THD.dtype)
