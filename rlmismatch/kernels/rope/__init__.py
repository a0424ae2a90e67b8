"""Rotary position embedding, half-split (NeoX) layout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["Impl", "Rotated", "rotary"]


class Rotated(NamedTuple):
    """Rotated queries and keys, contiguous, in the shapes and dtypes of the operands."""

    q_THD: torch.Tensor
    k_THD: torch.Tensor


def rotary(
    q_THD: torch.Tensor, k_THD: torch.Tensor, positions_T: torch.Tensor, inv_freq: torch.Tensor, *, impl: Impl, scale: float = 1.0
) -> Rotated:
    """Rotate the first ``2 * len(inv_freq)`` dims of every head by ``position * inv_freq``; the rest of a head is copied.

    q_THD: [T, Hq, D], k_THD: [T, Hkv, D], any strides. positions_T: [T] integers. inv_freq: float32 [rotary_dim / 2], radians a token, as
    the checkpoint gives it. scale: factor on cos and sin (YaRN's attention factor). Dims i and i + rotary_dim / 2 are a pair.
    Angle, cos and sin stay float32 (triton) or float64 (reference) and are never rounded to the model dtype; one rounding at the end.
    """
    tokens, _, head_dim = q_THD.shape
    if k_THD.shape[0] != tokens or k_THD.shape[2] != head_dim or positions_T.shape != (tokens,):
        raise ValueError(f"q {tuple(q_THD.shape)}, k {tuple(k_THD.shape)} and positions {tuple(positions_T.shape)} do not fit")
    if inv_freq.dtype != torch.float32 or inv_freq.dim() != 1 or not 0 < 2 * inv_freq.numel() <= head_dim:
        raise ValueError(f"inv_freq must be float32 of at most {head_dim // 2} elements, got {inv_freq.dtype} {tuple(inv_freq.shape)}")
    if positions_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions_T.dtype}")
    module = implementation("rope", impl, q_THD, k_THD, positions_T, inv_freq)
    q, k = (module.rotary(x, positions_T, inv_freq, scale=scale) for x in (q_THD, k_THD))
    return Rotated(q_THD=q, k_THD=k)
