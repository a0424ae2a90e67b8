"""Specification of `reduce`: float64 additions in rank order, one rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.kernels.common.tree import pairwise_tree


def fold(partials: Sequence[torch.Tensor], *, out_dtype: torch.dtype) -> torch.Tensor:
    """The partials' sum in `out_dtype`; float64 is unrounded."""
    return round_once(pairwise_tree([p.double() for p in partials], torch.add), out_dtype)
