"""Linear layers: the whole product (`linear`) and one rank's unrounded share of a row-parallel one (`row_partial`)."""

from __future__ import annotations

import math
from typing import Final

import torch

from rlmismatch.errors import UsageError
from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["CHUNKS", "Impl", "chunk_count", "linear", "row_partial"]

CHUNKS: Final = 8  # chunks of a row-parallel K where 8 divides it; the largest tensor-parallel size with the same bits


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, impl: Impl, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` with one rounding at the end; the bias is added before it.

    x_MK: [..., K]. weight_NK: [N, K], same dtype as x. bias_N: [N]. Returns contiguous [..., N] in `out_dtype` (default: x's dtype).
    triton: every element is one float32 accumulator over ascending K, so its bits depend neither on M, N nor on the tile.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    _check(x_MK, weight_NK)
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ValueError(f"bias {tuple(bias_N.shape)} does not fit weight {tuple(weight_NK.shape)}")
    module = implementation("gemm", impl, x_MK, weight_NK, bias_N)
    out: torch.Tensor = module.linear(x_MK, weight_NK, bias_N, out_dtype=out_dtype or x_MK.dtype)
    return out


def row_partial(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, k_total: int, impl: Impl) -> torch.Tensor:
    """This rank's share of a row-parallel layer's sum over K, unrounded; `reduce.fold` joins the ranks' shares.

    x_MK: [..., K], weight_NK: [N, K]: this rank's K = k_total / TP consecutive columns, same dtype. Returns [..., N]: float64
    (reference) or float32 (triton). A bias belongs behind the fold.

    The order of additions is a property of k_total alone. K is cut into `chunk_count(k_total)` equal chunks; each chunk is summed
    ascending from zero; the chunks are joined by `pairwise_tree`. A rank owns an aligned run of 2^m chunks, which is a
    subtree, and `reduce.fold` continues with the upper levels of the same tree: the same additions on the same operands at
    every tensor-parallel size that divides the number of chunks, hence the same bits. Nothing is rounded between the two.
    The chunks are computed side by side, in a workspace of chunks x M x N floats.
    Raises UsageError if this rank's columns are not a whole subtree.
    """
    _check(x_MK, weight_NK)
    chunks = _local_chunks(x_MK.shape[-1], k_total)
    module = implementation("gemm", impl, x_MK, weight_NK)
    out: torch.Tensor = module.row_partial(x_MK, weight_NK, chunks=chunks)
    return out


def chunk_count(k_total: int) -> int:
    """Chunks of a row-parallel K: 8, or the largest power of two below it that divides `k_total`. TP must divide it."""
    return math.gcd(CHUNKS, k_total)


def _local_chunks(k_local: int, k_total: int) -> int:
    chunks = chunk_count(k_total)
    tp = k_total // k_local if k_local and k_total % k_local == 0 else 0
    if tp == 0 or chunks % tp:
        raise UsageError(
            "row-parallel-shard-is-no-subtree",
            f"a row-parallel layer with K {k_total} has {chunks} chunks; a rank with {k_local} columns does not own an equal share of them",
            hint=f"use a tensor-parallel size that divides {chunks}",
        )
    return chunks // tp


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> None:
    if weight_NK.dim() != 2 or x_MK.dim() < 1 or x_MK.shape[-1] != weight_NK.shape[1]:
        raise ValueError(f"x {tuple(x_MK.shape)} does not fit weight {tuple(weight_NK.shape)}")
    if x_MK.dtype != weight_NK.dtype:
        raise ValueError(f"x is {x_MK.dtype} and weight is {weight_NK.dtype}")
