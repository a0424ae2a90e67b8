"""Triton kernels of `attention_backward` that go row by row: delta and the lse in base 2, and dsinks."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.attention.order import MAX_HEAD_DIM
from rlmismatch.kernels.common.triton import exp, widen

_DELTA_ROWS = 16
_SINK_TOKENS = 1024


def rows(out_THD: torch.Tensor, dout_THD: torch.Tensor, lse_HT: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(delta, lse in base 2) of every row, float32 [Hkv, T, group]: the rows of a query tile lie side by side."""
    tokens, heads, head_dim = out_THD.shape
    delta_KTG, lse_KTG = (torch.empty((kv_heads, tokens, heads // kv_heads), dtype=torch.float32, device=out_THD.device) for _ in "dl")
    _delta_kernel[(triton.cdiv(tokens * heads, _DELTA_ROWS),)](
        out_THD,
        dout_THD,
        lse_HT,
        delta_KTG,
        lse_KTG,
        tokens,
        *out_THD.stride(),
        *dout_THD.stride(),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=MAX_HEAD_DIM,
        BLOCK_R=_DELTA_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return delta_KTG, lse_KTG


def dsinks(sinks_H: torch.Tensor, lse_HT: torch.Tensor, delta_KTG: torch.Tensor) -> torch.Tensor:
    """float32 [Hq]"""
    kv_heads, tokens, group = delta_KTG.shape
    dsinks_H = torch.empty(kv_heads * group, dtype=torch.float32, device=delta_KTG.device)
    _dsinks_kernel[(kv_heads * group,)](
        widen(sinks_H), lse_HT, delta_KTG, dsinks_H, tokens, GROUP=group, BLOCK_T=_SINK_TOKENS, num_warps=4, enable_fp_fusion=False
    )
    return dsinks_H


@triton.jit(do_not_specialize=("tokens",))
def _delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    lse_log2_ptr,
    tokens,
    stride_ot,
    stride_oh,
    stride_od,
    stride_gt,
    stride_gh,
    stride_gd,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Order: one reduction over the row, of fixed width."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = r // HEADS, r % HEADS
    d = tl.arange(0, BLOCK_D)
    live_R = r < tokens * HEADS
    mask = live_R[:, None] & (d < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + (token * stride_ot + head * stride_oh)[:, None] + d[None, :] * stride_od, mask=mask, other=0.0)
    dout = tl.load(dout_ptr + (token * stride_gt + head * stride_gh)[:, None] + d[None, :] * stride_gd, mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    at = (head // GROUP * tokens + token) * GROUP + head % GROUP
    tl.store(delta_ptr + at, delta, mask=live_R)
    lse = tl.load(lse_ptr + head * tokens + token, mask=live_R, other=0.0)
    tl.store(lse_log2_ptr + at, lse * 1.4426950408889634, mask=live_R)


@triton.jit(do_not_specialize=("tokens",))
def _dsinks_kernel(sink_ptr, lse_ptr, delta_ptr, dsink_ptr, tokens, GROUP: tl.constexpr, BLOCK_T: tl.constexpr):
    """Order: BLOCK_T sums over every BLOCK_T-th token, ascending; then one reduction of fixed width. Programs (head)."""
    head = tl.program_id(0)
    sink = tl.load(sink_ptr + head).to(tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for first in range(0, tokens, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        lse = tl.load(lse_ptr + head * tokens + t, mask=t < tokens, other=float("inf"))
        delta = tl.load(delta_ptr + (head // GROUP * tokens + t) * GROUP + head % GROUP, mask=t < tokens, other=0.0)
        total += exp(sink - lse) * delta
    tl.store(dsink_ptr + head, -tl.sum(total, axis=0))
