"""Triton kernel of `rope`."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, cos, sin, storage, widen

_ROWS = 1024 if INTERPRETED.value else 16


def rotary(x_THD: torch.Tensor, positions_T: torch.Tensor, inv_freq: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Contiguous [T, H, D] in x's dtype."""
    tokens, heads, head_dim = x_THD.shape
    half = inv_freq.numel()
    x = widen(x_THD)
    out_THD = torch.empty(x_THD.shape, dtype=storage(x_THD.dtype), device=x_THD.device)
    out_THD[..., 2 * half :] = x[..., 2 * half :]
    if tokens and heads:
        _rotary_kernel[(triton.cdiv(tokens * heads, _ROWS),)](
            x,
            positions_T,
            inv_freq,
            out_THD,
            tokens * heads,
            positions_T.stride(0),
            *x.stride(),
            scale,
            HEADS=heads,
            HEAD_DIM=head_dim,
            HALF=half,
            BLOCK_R=_ROWS,
            BLOCK_F=triton.next_power_of_2(half),
            enable_fp_fusion=False,
        )
    return out_THD.to(x_THD.dtype)


@triton.jit
def _rotary_kernel(
    x_ptr,
    position_ptr,
    inv_freq_ptr,
    out_ptr,
    rows,
    stride_position,
    stride_t,
    stride_h,
    stride_d,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Order: none to choose, every element is one difference or sum of two products. One row is one head of one token."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.arange(0, BLOCK_F)
    mask = (r < rows)[:, None] & (f < HALF)[None, :]
    t = (r // HEADS).to(tl.int64)
    position = tl.load(position_ptr + t * stride_position, mask=r < rows, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq_ptr + f, mask=f < HALF, other=0.0)[None, :]
    c = cos(angle) * scale
    s = sin(angle) * scale
    x_ptrs = x_ptr + t[:, None] * stride_t + (r % HEADS)[:, None] * stride_h + f[None, :] * stride_d
    first = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + HALF * stride_d, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + r.to(tl.int64)[:, None] * HEAD_DIM + f[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptrs, (first * c - second * s).to(dtype), mask=mask)
    tl.store(out_ptrs + HALF, (second * c + first * s).to(dtype), mask=mask)
