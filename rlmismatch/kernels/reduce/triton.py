"""Triton kernel of `reduce`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, storage, widen

_BLOCK = 65536 if INTERPRETED.value else 1024
_AT_ONCE = 8  # partials of one launch; a power of two, so that a launch's partials are a subtree


def fold(partials: Sequence[torch.Tensor], *, out_dtype: torch.dtype) -> torch.Tensor:
    """The partials' sum in `out_dtype`, contiguous."""
    if out_dtype == torch.float64:
        raise ValueError("the Triton kernel adds in float32; float64 is the reference's")
    parts = [widen(p).contiguous() for p in partials]
    while len(parts) > _AT_ONCE:
        parts = [_sum(parts[i : i + _AT_ONCE], torch.float32) for i in range(0, len(parts), _AT_ONCE)]
    return _sum(parts, out_dtype)


def _sum(parts: list[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(parts[0].shape, dtype=storage(out_dtype), device=parts[0].device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _sum_kernel[grid](tuple(parts), out, out.numel(), PARTS=len(parts), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out.to(out_dtype)


@triton.jit
def _sum_kernel(part_ptrs, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Order: the pairwise tree over ranks, ((0 + 1) + (2 + 3)) + 4 for five of them; float32; one rounding."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _subtree(part_ptrs, i, i < count, 0, PARTS)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def _subtree(part_ptrs, i, mask, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Order: the left subtree is the largest power of two of parts that leaves some for the right one."""
    if PARTS == 1:
        total = tl.load(part_ptrs[FIRST] + i, mask=mask, other=0.0).to(tl.float32)
    else:
        LEFT: tl.constexpr = 4 if PARTS > 4 else 2 if PARTS > 2 else 1
        total = _subtree(part_ptrs, i, mask, FIRST, LEFT) + _subtree(part_ptrs, i, mask, FIRST + LEFT, PARTS - LEFT)
    return total
