"""Triton kernels of `attention_backward`: dk and dv by key tile, dq by query tile."""

import functools
import importlib
import itertools

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.attention.order import LOG2_E, Scores
from rlmismatch.kernels.attention_backward import triton_rows
from rlmismatch.kernels.common.triton import INTERPRETED, TL_DTYPE, is_hopper, round_to, storage, tanh, widen


def causal_backward(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    dout_THD: torch.Tensor,
    bounds: tuple[int, ...],
    *,
    scores: Scores,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv in q's dtype, dsinks float32 [Hq] or None)."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_THD.shape[1]
    group = heads // kv_heads
    dtype = q_THD.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=storage(dtype), device=x.device) for x in (q_THD, k_THD, v_THD))
    if not tokens:
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None if sinks_H is None else torch.zeros_like(sinks_H, dtype=torch.float32)
    q, k, v, dout, lse_HT = widen(q_THD), widen(k_THD), widen(v_THD), widen(dout_THD), lse_HT.contiguous()
    delta_KTG, lse_KTG = triton_rows.rows(widen(out_THD), dout, lse_HT, kv_heads)
    dsinks_H = None if sinks_H is None else triton_rows.dsinks(sinks_H, lse_HT, delta_KTG)
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    starts = _on_device(bounds, q.device)
    if is_hopper():
        hopper = importlib.import_module("rlmismatch.kernels.attention_backward.triton_hopper")  # Gluon is not in every Triton
        if hopper.fits(q, k, scores):
            return *hopper.gradients(q, k, v, dout, lse_KTG, delta_KTG, starts, longest, scores), dsinks_H
    operands = (q, k, v, dout, lse_KTG, delta_KTG, starts, tokens, *q.stride(), *k.stride(), *v.stride(), *dout.stride())
    numbers = (
        LOG2_E if scores.soft_cap else scores.scale * LOG2_E,
        scores.scale / scores.soft_cap if scores.soft_cap else 0.0,
        scores.soft_cap or 0.0,
        scores.scale,
        scores.window or 0,
    )
    form = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "GROUP": group,
        "HEADS": heads,
        "CAPPED": scores.soft_cap is not None,
        "WINDOWED": scores.window is not None,
        "dtype": TL_DTYPE[dtype],
        "enable_fp_fusion": dtype == torch.float32,
    }
    rows, keys, warps, stages = _tile(group, dtype, head_dim)
    tile = {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
    _dkdv_kernel[(triton.cdiv(longest, keys), kv_heads, len(bounds) - 1)](*operands, dk, dv, *numbers, **form, **tile)
    _dq_kernel[(triton.cdiv(longest, rows // group), kv_heads, len(bounds) - 1)](*operands, dq, *numbers, **form, **tile)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks_H


@functools.lru_cache(maxsize=64)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[S + 1] int32, never written: the layers of one step share it."""
    return torch.tensor(bounds, dtype=torch.int32).to(device)


def _tile(group: int, dtype: torch.dtype, head_dim: int) -> tuple[int, int, int, int]:
    """(query rows, keys, warps, stages). Both sizes are part of the order of additions: the kind of the operands alone chooses them."""
    smallest = max(16, triton.next_power_of_2(group))
    if INTERPRETED.value:
        return max(64, smallest), 64, 4, 1
    if dtype.itemsize == 4:
        return smallest, 32, 4, 1
    return (max(64, smallest), 128, 8, 2) if head_dim <= 128 else (max(64, smallest), 64, 8, 1)


@triton.jit
def _weights(score, lse_log2, to_log2, to_cap, soft_cap, CAPPED: tl.constexpr):
    """(softmax weights, factor on the gradient of the raw score) of a tile of raw scores, as if every key were seen."""
    slope = tl.full(score.shape, 1.0, dtype=tl.float32)
    if CAPPED:
        bent = tanh(score * to_cap)
        slope = 1.0 - bent * bent
        score = bent * soft_cap
    return tl.exp2(tl.fma(score, to_log2, -lse_log2)), slope


@triton.jit(do_not_specialize=("tokens", "window"))
def _dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    start_ptr,
    tokens,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_gt,
    stride_gh,
    stride_gd,
    dk_ptr,
    dv_ptr,
    to_log2,
    to_cap,
    soft_cap,
    scale,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Order: query tiles descending; in a tile the tokens, in a token the heads of the group ascending.

    Programs (key tile, KV head, sequence).
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    sequence_start = tl.load(start_ptr + tl.program_id(2))
    length = tl.load(start_ptr + tl.program_id(2) + 1) - sequence_start
    first_key = tl.program_id(0) * BLOCK_N
    if first_key >= length:
        return
    kv_head = tl.program_id(1)
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    key_row = (sequence_start + n).to(tl.int64)
    key_mask = (n < length)[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + (key_row * stride_kt + kv_head * stride_kh)[:, None] + d[None, :] * stride_kd, mask=key_mask, other=0.0)
    v = tl.load(v_ptr + (key_row * stride_vt + kv_head * stride_vh)[:, None] + d[None, :] * stride_vd, mask=key_mask, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + m % GROUP
    last_token = length
    if WINDOWED:
        last_token = tl.minimum(length, first_key + BLOCK_N - 1 + window)
    tiles = tl.cdiv(last_token, TOKENS)
    for step in range(tiles - first_key // TOKENS):
        tile = tiles - 1 - step
        position = tile * TOKENS + m // GROUP
        live_M = (m // GROUP < TOKENS) & (position < length)
        row = (sequence_start + position).to(tl.int64)
        q_mask = live_M[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + (row * stride_qt + head * stride_qh)[:, None] + d[None, :] * stride_qd, mask=q_mask, other=0.0)
        dout = tl.load(dout_ptr + (row * stride_gt + head * stride_gh)[:, None] + d[None, :] * stride_gd, mask=q_mask, other=0.0)
        at_row = (kv_head * tokens + row) * GROUP + m % GROUP
        lse = tl.load(lse_ptr + at_row, mask=live_M, other=0.0)
        delta = tl.load(delta_ptr + at_row, mask=live_M, other=0.0)
        score = tl.dot(k, tl.trans(q), input_precision="ieee")
        weight, slope = _weights(score, lse[None, :], to_log2, to_cap, soft_cap, CAPPED)
        # Only a tile at an edge has keys or rows to hide; elsewhere the mask would change nothing.
        if WINDOWED or BLOCK_M % GROUP or tile * TOKENS < first_key + BLOCK_N or (tile + 1) * TOKENS > length:
            seen = live_M[None, :] & (n[:, None] <= position[None, :])
            if WINDOWED:
                seen = seen & (n[:, None] > position[None, :] - window)
            weight = tl.where(seen, weight, 0.0)
        dv = tl.dot(round_to(weight, dtype).to(q.dtype), dout, dv, input_precision="ieee")
        dweight = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dscore = weight * (dweight - delta[None, :])
        if CAPPED:
            dscore = dscore * slope
        dk = tl.dot(round_to(dscore, dtype).to(q.dtype), q, dk, input_precision="ieee")
    at = (key_row * (HEADS // GROUP) + kv_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=key_mask)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=key_mask)


@triton.jit(do_not_specialize=("tokens", "window"))
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    start_ptr,
    tokens,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_gt,
    stride_gh,
    stride_gd,
    dq_ptr,
    to_log2,
    to_cap,
    soft_cap,
    scale,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Order: key tiles ascending, each summed by itself over its keys, ascending.

    Programs (query tile, the longest rows first, KV head, sequence).
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    sequence_start = tl.load(start_ptr + tl.program_id(2))
    length = tl.load(start_ptr + tl.program_id(2) + 1) - sequence_start
    first_position = (tl.cdiv(length, TOKENS) - 1 - tl.program_id(0)) * TOKENS
    if first_position < 0:
        return
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + m % GROUP
    position = first_position + m // GROUP
    live_M = (m // GROUP < TOKENS) & (position < length)
    row = (sequence_start + position).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    q_mask = live_M[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (row * stride_qt + head * stride_qh)[:, None] + d[None, :] * stride_qd, mask=q_mask, other=0.0)
    dout = tl.load(dout_ptr + (row * stride_gt + head * stride_gh)[:, None] + d[None, :] * stride_gd, mask=q_mask, other=0.0)
    at_row = (kv_head * tokens + row) * GROUP + m % GROUP
    lse = tl.load(lse_ptr + at_row, mask=live_M, other=0.0)
    delta = tl.load(delta_ptr + at_row, mask=live_M, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    end = tl.minimum(length, first_position + TOKENS)
    start = 0
    if WINDOWED:
        start = tl.maximum(first_position - window + 1, 0)
    for tile in range(start // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key_row = (sequence_start + n).to(tl.int64)
        key_mask = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + (key_row * stride_kt + kv_head * stride_kh)[:, None] + d[None, :] * stride_kd, mask=key_mask, other=0.0)
        v = tl.load(v_ptr + (key_row * stride_vt + kv_head * stride_vh)[:, None] + d[None, :] * stride_vd, mask=key_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        weight, slope = _weights(score, lse[:, None], to_log2, to_cap, soft_cap, CAPPED)
        if WINDOWED or BLOCK_M % GROUP or tile * BLOCK_N + BLOCK_N > first_position or first_position + TOKENS > length:
            seen = live_M[:, None] & (n[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > position[:, None] - window)
            weight = tl.where(seen, weight, 0.0)
        dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dscore = weight * (dweight - delta[:, None])
        if CAPPED:
            dscore = dscore * slope
        part = tl.dot(round_to(dscore, dtype).to(k.dtype), k, input_precision="ieee")
        dq = tl.fma(part, 1.0, dq)  # Triton takes a plain sum for the product's accumulator: another order
    at = (row * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)
