"""The sum of a row-parallel layer's partials over its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["Impl", "fold"]


def fold(partials: Sequence[torch.Tensor], *, impl: Impl, out_dtype: torch.dtype) -> torch.Tensor:
    """The sum of `partials` (rank 0 first, equal shapes, any dtypes), rounded once to `out_dtype`.

    Partials are upcast (float64 in reference, float32 in triton) and joined in rank order by `pairwise_tree`; with
    `gemm.row_partial`'s results the upper levels of one tree over all of K. One rank: the rounding alone. A row's bits do
    not depend on other rows. Raises ValueError if there is no partial or the shapes differ.
    """
    if not partials:
        raise ValueError("a sum over ranks needs at least one partial")
    if len({p.shape for p in partials}) > 1:
        raise ValueError(f"partials differ in shape: {[tuple(p.shape) for p in partials]}")
    module = implementation("reduce", impl, *partials)
    out: torch.Tensor = module.fold(partials, out_dtype=out_dtype)
    return out
