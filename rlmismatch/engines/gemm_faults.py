"""The arithmetic of planted faults in products, the same on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

# What an honest adapter of a side that promises batch invariance reports.
SAYS_INVARIANT: Final = {("gemm.kernel", "batch_invariant"): True, ("gemm.runtime_flags", "batch_invariant"): True}


def other_dtype(dtype: str) -> torch.dtype:
    """A dtype that a side was not asked to compute in."""
    return torch.bfloat16 if dtype == "float16" else torch.float16


def split_in_two(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """One row's product as it is; that of several rows as two halves of K, each rounded to x's dtype, added in it. x: [..., K]."""
    if x.numel() == x.shape[-1]:
        return product(x, weight_NK)
    half = x.shape[-1] // 2
    return product(x[..., :half], weight_NK[:, :half]) + product(x[..., half:], weight_NK[:, half:])


def under_autocast(device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The `make` of a patch that runs what it replaces under bfloat16 autocast."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                return native(*args, **kwargs)

        return cast

    return make
