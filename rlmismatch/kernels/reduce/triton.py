"""Triton kernel of `reduce`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.tree import pairwise_tree
from rlmismatch.kernels.common.triton import INTERPRETED, widen

_BLOCK = 65536 if INTERPRETED.value else 1024


def fold(partials: Sequence[torch.Tensor], *, out_dtype: torch.dtype) -> torch.Tensor:
    """The partials' sum in `out_dtype`, contiguous."""
    if out_dtype == torch.float64:
        raise ValueError("the Triton kernel adds in float32; float64 is the reference's")
    # The last rounding is torch's: one IEEE conversion of the finished float32 sum.
    return pairwise_tree([widen(p).contiguous() for p in partials], _add).to(out_dtype)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    if out.numel():
        _add_kernel[(triton.cdiv(out.numel(), _BLOCK),)](a, b, out, out.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


@triton.jit
def _add_kernel(a_ptr, b_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Order: one float32 addition an element, lower rank first; the tree over ranks is the host's."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, a + b, mask=i < count)
