"""Linear layers in a fixed order: forward, the gradients of both operands, and one rank's unrounded share of a sum that spans ranks.

For `triton` every element of every product below is a chain of float32 additions in an order that its length alone decides, so its
bits depend neither on the other rows and columns, on the tile, on strides, nor (shares) on the tensor-parallel size.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from rlmismatch.errors import UsageError
from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["CHUNKS", "Impl", "chunk_count", "grad_input", "grad_input_partial", "grad_weight", "linear", "row_linear", "row_partial"]

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
    A workspace of up to chunks x M x N floats holds what one program does not join itself.
    Raises UsageError if this rank's columns are not a whole subtree.
    """
    _check(x_MK, weight_NK)
    chunks = _local_chunks(x_MK.shape[-1], k_total)
    module = implementation("gemm", impl, x_MK, weight_NK)
    out: torch.Tensor = module.row_partial(x_MK, weight_NK, chunks=chunks)
    return out


def row_linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, impl: Impl, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """A row-parallel layer of one rank, rounded once: the bits of `reduce.fold` over any number of `row_partial`s, in one step.

    x_MK: [..., K], weight_NK: [N, K], same dtype. Returns contiguous [..., N] in `out_dtype` (default: x's dtype).
    """
    _check(x_MK, weight_NK)
    module = implementation("gemm", impl, x_MK, weight_NK)
    out: torch.Tensor = module.row_partial(x_MK, weight_NK, chunks=chunk_count(x_MK.shape[-1]), out_dtype=out_dtype or x_MK.dtype)
    return out


def grad_input(dy_MN: torch.Tensor, weight_NK: torch.Tensor, *, impl: Impl, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dX = ``dy @ weight``: the gradient of `linear` by x where this rank owns all of N, as in a row-parallel layer.

    dy_MN: [..., N], weight_NK: [N, K], same dtype. Returns contiguous [..., K] in `out_dtype` (default: dy's dtype). The sum runs over
    ascending N; its bits depend neither on M nor on how K is sharded.
    """
    return linear(dy_MN, weight_NK.T, impl=impl, out_dtype=out_dtype)


def grad_input_partial(dy_MN: torch.Tensor, weight_NK: torch.Tensor, *, n_total: int, impl: Impl) -> torch.Tensor:
    """This rank's share of dX in a column-parallel layer, where the sum over N spans the ranks; `reduce.fold` joins the shares.

    dy_MN: [..., N], weight_NK: [N, K]: this rank's N = n_total / TP consecutive rows of the weight. Returns [..., K], unrounded, with the
    order and the promise of `row_partial`, N in the place of K. A fused weight is one matrix only if its shards are consecutive
    rows of it: sum over q, k, v (or gate, up) apart where an engine interleaves them.
    """
    return row_partial(dy_MN, weight_NK.T, k_total=n_total, impl=impl)


def grad_weight(dy_MN: torch.Tensor, x_MK: torch.Tensor, *, impl: Impl, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """dW = ``dy.T @ x``: the gradient of `linear` by its weight over the tokens of one call.

    dy_MN: [..., N], x_MK: [..., K]: equal leading dims, same dtype. Returns contiguous [N, K] in `out_dtype`. The sum runs over ascending
    tokens (the leading dims flattened). Its bits depend neither on how N or K is sharded nor on tokens of zero gradient at the end, such as
    padding; they do depend on the tokens' order and on which of them share a microbatch. Adding to a main_grad is the caller's.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    if dy_MN.shape[:-1] != x_MK.shape[:-1] or dy_MN.dim() < 2:
        raise ValueError(f"dy {tuple(dy_MN.shape)} does not fit x {tuple(x_MK.shape)}: their tokens differ")
    if dy_MN.dtype != x_MK.dtype:
        raise ValueError(f"dy is {dy_MN.dtype} and x is {x_MK.dtype}")
    module = implementation("gemm", impl, dy_MN, x_MK)
    out: torch.Tensor = module.grad_weight(dy_MN.flatten(0, -2), x_MK.flatten(0, -2), out_dtype=out_dtype)
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
