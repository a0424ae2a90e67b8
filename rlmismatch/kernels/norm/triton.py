"""Triton kernel of `norm`."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, TL_DTYPE, round_to, storage, widen


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., N] in x's dtype, contiguous."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, residual sum), [..., N] in x's dtype, contiguous."""
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    N = x.shape[-1]
    x_RN = widen(x.reshape(-1, N))
    r_RN = x_RN if residual is None else widen(residual.reshape(-1, N))
    rows = x_RN.shape[0]
    y_RN = torch.empty((rows, N), dtype=storage(x.dtype), device=x.device)
    total_RN = y_RN if residual is None else torch.empty_like(y_RN)
    if rows:
        # Everything that could move the order of a row's sum is a function of N alone.
        block = triton.next_power_of_2(N)
        block_rows = max(1, (65536 if INTERPRETED.value else 1024) // block)
        _rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
            x_RN,
            r_RN,
            weight.float(),
            y_RN,
            total_RN,
            rows,
            x_RN.stride(0),
            x_RN.stride(1),
            r_RN.stride(0),
            r_RN.stride(1),
            eps,
            N=N,
            HAS_RESIDUAL=residual is not None,
            dtype=TL_DTYPE[x.dtype],
            BLOCK_R=block_rows,
            BLOCK_N=block,
            enable_fp_fusion=False,
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        )
    return y_RN.to(x.dtype).view(x.shape), total_RN.to(x.dtype).view(x.shape)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    total_ptr,
    rows,
    stride_xr,
    stride_xn,
    stride_rr,
    stride_rn,
    eps,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Order: a row's squares by tl.sum's tree over BLOCK_N zero-padded columns, a function of N alone; float32 throughout."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    mask = (r < rows)[:, None] & (n < N)[None, :]
    r = r.to(tl.int64)[:, None]
    x = tl.load(x_ptr + r * stride_xr + n[None, :] * stride_xn, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(r_ptr + r * stride_rr + n[None, :] * stride_rn, mask=mask, other=0.0).to(tl.float32)
        x = round_to(x, dtype)
        tl.store(total_ptr + r * N + n[None, :], x.to(total_ptr.dtype.element_ty), mask=mask)
    mean = tl.div_rn(tl.sum(x * x, axis=1), N * 1.0)
    unit = round_to(tl.div_rn(x, tl.sqrt_rn(mean + eps)[:, None]), dtype)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0)
    tl.store(y_ptr + r * N + n[None, :], (unit * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)
