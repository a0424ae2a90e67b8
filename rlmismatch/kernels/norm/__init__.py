"""RMSNorm over the last dim, and the residual addition in front of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["AddNormOut", "Impl", "add_rms_norm", "rms_norm"]


class AddNormOut(NamedTuple):
    """`y`: the norm of the residual sum; `residual`: that sum. Both have the shape and dtype of x."""

    y: torch.Tensor
    residual: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: Impl) -> torch.Tensor:
    """``round(round(x / sqrt(mean(x^2) + eps)) * weight)``, contiguous, in the shape and dtype of `x`.

    x: [..., N]; weight: [N], any dtype. Inner arithmetic is float32 (triton) or float64 (reference). The rounding before the weight is
    that of Hugging Face's LlamaRMSNorm and Qwen3RMSNorm; torch.nn.RMSNorm rounds once. A row's bits do not depend on other rows.
    """
    _check(x, weight)
    module = implementation("norm", impl, x, weight)
    out: torch.Tensor = module.rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: Impl) -> AddNormOut:
    """The residual sum ``round(x + residual)`` and `rms_norm` of that rounded sum.

    x, residual: [..., N] of one dtype; weight: [N]. Fused engine kernels may normalise the unrounded sum; this does not.
    """
    _check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    module = implementation("norm", impl, x, residual, weight)
    y, total = module.add_rms_norm(x, residual, weight, eps)
    return AddNormOut(y=y, residual=total)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
