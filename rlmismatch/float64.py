"""Products, means and log-softmax in float64 by operations that no engine puts its own in the place of.

vLLM's batch-invariant mode registers kernels for aten::bmm, mean.dim and _log_softmax (before Hopper mm, addmm, matmul and linear too) in
its whole process: bmm and mm refuse float64, mean and log-softmax silently answer in float32. What is exact here must not depend on that.
"""

from __future__ import annotations

import math

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of [..., M, K] and [..., K, N] with equal leading dimensions, in their dtype."""
    batch = math.prod(a.shape[:-2])
    a_BMK, b_BKN = a.reshape(batch, *a.shape[-2:]), b.reshape(batch, *b.shape[-2:])
    out_BMN = torch.baddbmm(a.new_zeros(1, 1, 1), a_BMK, b_BKN, beta=0)  # what it adds to is not read
    return out_BMN.view(*a.shape[:-1], b.shape[-1])


def mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension, which is kept."""
    return x.sum(dim=-1, keepdim=True) / x.shape[-1]


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension. A row of -inf alone is NaN, as torch's is."""
    below = x - x.amax(dim=-1, keepdim=True)
    return below - below.exp().sum(dim=-1, keepdim=True).log()
