"""Specification of `gemm`: float64 products, one rounding."""

from __future__ import annotations

import torch

from rlmismatch import float64
from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.kernels.common.tree import pairwise_tree


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in `out_dtype`; float64 is unrounded."""
    out_MN = _product(x_MK, weight_NK)
    if bias_N is not None:
        out_MN = out_MN + bias_N.double()
    return round_once(out_MN, out_dtype)


def row_partial(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, chunks: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., N], by default float64: `chunks` equal pieces of K, each a product of its own, joined by the tree."""
    parts = [_product(x, weight) for x, weight in zip(x_MK.chunk(chunks, dim=-1), weight_NK.chunk(chunks, dim=-1), strict=True)]
    return round_once(pairwise_tree(parts, torch.add), out_dtype or torch.float64)


def grad_weight(dy_MN: torch.Tensor, x_MK: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in `out_dtype`; float64 is unrounded."""
    return round_once(float64.matmul(dy_MN.double().T, x_MK.double()), out_dtype)


def _product(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """float64 [..., N]"""
    flat_MN = float64.matmul(x_MK.double().flatten(end_dim=-2), weight_NK.double().T)
    return flat_MN.view(*x_MK.shape[:-1], len(weight_NK))
