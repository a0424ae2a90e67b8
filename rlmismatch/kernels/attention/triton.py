"""Triton kernel of `attention`: one body for dense and paged K and V, whole rows or splits apart."""

import functools
import importlib
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.attention.order import LOG2_E, SPLIT, Scores, Segment, kv_tile
from rlmismatch.kernels.attention.triton_fold import finish, join, row_sum, step
from rlmismatch.kernels.attention.triton_merge import block_d, merge
from rlmismatch.kernels.common.triton import INTERPRETED, TL_DTYPE, is_hopper, round_to, storage, tanh, widen

# Below as many programs the splits of a row run in programs of their own. The interpreter runs one after another anyhow.
_FEW_PROGRAMS = 0 if INTERPRETED.value else 4 * 132


def causal(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    bounds: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in q's dtype, lse float32 [Hq, T])."""
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    segments = tuple(Segment(start, end - start, 0, start, 0, end - start) for start, end in itertools.pairwise(bounds))
    # Dense K and V are a cache whose only block is the whole batch.
    return _rows(q_THD, widen(k_THD).unsqueeze(0), widen(v_THD).unsqueeze(0), None, segments, scores, sinks_H)


def paged(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_SN: torch.Tensor,
    bounds: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal`, K and V read through the block table."""
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    segments = tuple(
        Segment(start, end - start, length - (end - start), 0, 0, length)
        for (start, end), length in zip(itertools.pairwise(bounds), lengths, strict=True)
    )
    if INTERPRETED.value:
        k_cache, v_cache, table_SN = _pages_in_use(k_cache, v_cache, table_SN, lengths)
    return _rows(q_THD, k_cache, v_cache, table_SN, segments, scores, sinks_H)


def partials(
    q_THD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, segment: Segment, *, scores: Scores, split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out float32 [J, T, Hq, D], lse float32 [J, Hq, T])."""
    return _splits(q_THD, widen(k_NHD).unsqueeze(0), widen(v_NHD).unsqueeze(0), None, (segment,), scores, split)


def _pages_in_use(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table_SN: torch.Tensor, lengths: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 copies of the blocks that the sequences own, strided like the originals, and the table that points into them.

    The interpreter would copy an engine's whole cache, every call.
    """
    block_size = k_cache.shape[1]
    table_SN = table_SN[: len(lengths)].long()
    used_SN = torch.arange(table_SN.shape[1])[None, :] * block_size < torch.tensor(lengths)[:, None]
    pages, compact = torch.unique(table_SN[used_SN], return_inverse=True)
    table_SN = torch.zeros_like(table_SN).masked_scatter(used_SN, compact)
    k, v = (torch.empty_like(c[: len(pages)], dtype=torch.float32).copy_(c[pages]) for c in (k_cache, v_cache))
    return k, v, table_SN


@functools.lru_cache(maxsize=256)
def _on_device(segments: tuple[Segment, ...], device: torch.device) -> torch.Tensor:
    """[S, 6] int32, never written: the layers of one step share it, and only the first waits for the copy."""
    return torch.tensor(segments, dtype=torch.int32).to(device)


def _rows(
    q_THD: torch.Tensor,
    k_NBHD: torch.Tensor,
    v_NBHD: torch.Tensor,
    table_SN: torch.Tensor | None,
    segments: tuple[Segment, ...],
    scores: Scores,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole rows: every split in one program where there are rows enough to fill the GPU, else one program a split and a merge."""
    if table_SN is None and is_hopper():
        hopper = importlib.import_module("rlmismatch.kernels.attention.triton_hopper")  # Gluon is not in every Triton
        if hopper.fits(q_THD, k_NBHD[0], v_NBHD[0], scores):
            longest = max((s.rows for s in segments), default=0)
            return hopper.dense(q_THD, k_NBHD[0], v_NBHD[0], _on_device(segments, q_THD.device), longest, scores, sinks_H)
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_NBHD.shape[2]
    block_m, _, _ = _tile(segments, heads // kv_heads, q_THD.element_size(), head_dim)
    blocks = triton.cdiv(max((s.rows for s in segments), default=0), block_m // (heads // kv_heads))
    if blocks * kv_heads * len(segments) < _FEW_PROGRAMS and _split_count(segments, scores, SPLIT)[1] > 1:
        return merge(*_splits(q_THD, k_NBHD, v_NBHD, table_SN, segments, scores, SPLIT), sinks_H, out_dtype=q_THD.dtype)
    out_THD = torch.empty(q_THD.shape, dtype=storage(q_THD.dtype), device=q_THD.device)
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=q_THD.device)
    _launch(q_THD, k_NBHD, v_NBHD, table_SN, segments, scores, sinks_H, out_THD, lse_HT, split=SPLIT, first_split=0, splits=1, apart=False)
    return out_THD.to(q_THD.dtype), lse_HT


def _splits(
    q_THD: torch.Tensor,
    k_NBHD: torch.Tensor,
    v_NBHD: torch.Tensor,
    table_SN: torch.Tensor | None,
    segments: tuple[Segment, ...],
    scores: Scores,
    split: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partials of all splits that hold a key of some segment."""
    tokens, heads, head_dim = q_THD.shape
    first, splits = _split_count(segments, scores, split)
    out_JTHD = torch.empty((splits, tokens, heads, head_dim), dtype=torch.float32, device=q_THD.device)
    lse_JHT = torch.empty((splits, heads, tokens), dtype=torch.float32, device=q_THD.device)
    _launch(
        q_THD,
        k_NBHD,
        v_NBHD,
        table_SN,
        segments,
        scores,
        None,
        out_JTHD,
        lse_JHT,
        split=split,
        first_split=first,
        splits=splits,
        apart=True,
    )
    return out_JTHD, lse_JHT


def _split_count(segments: tuple[Segment, ...], scores: Scores, split: int) -> tuple[int, int]:
    """(first split that holds a key, number of splits from there to the last)."""
    first = min((s.kv_start // split for s in segments), default=0)
    return first, max((triton.cdiv(s.kv_end, split) for s in segments), default=1) - first


def _launch(
    q_THD: torch.Tensor,
    k_NBHD: torch.Tensor,
    v_NBHD: torch.Tensor,
    table_SN: torch.Tensor | None,
    segments: tuple[Segment, ...],
    scores: Scores,
    sinks_H: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    split: int,
    first_split: int,
    splits: int,
    apart: bool,
) -> None:
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_NBHD.shape[2]
    group = heads // kv_heads
    block_m, warps, stages = _tile(segments, group, q_THD.element_size(), head_dim)
    blocks = triton.cdiv(max((s.rows for s in segments), default=0), block_m // group)
    if not blocks * splits:
        return
    q = widen(q_THD)
    _attention_kernel[(blocks * splits, kv_heads, len(segments))](
        q,
        k_NBHD,
        v_NBHD,
        out,
        lse,
        None if sinks_H is None else widen(sinks_H),
        _on_device(segments, q.device),
        table_SN,
        0 if table_SN is None else table_SN.stride(0),
        0 if table_SN is None else table_SN.stride(1),
        tokens,
        first_split,
        splits,
        *q.stride(),
        *k_NBHD.stride(),
        *v_NBHD.stride(),
        LOG2_E if scores.soft_cap else scores.scale * LOG2_E,
        scores.scale / scores.soft_cap if scores.soft_cap else 0.0,
        scores.soft_cap or 0.0,
        scores.window or 0,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim),
        GROUP=group,
        HEADS=heads,
        PAGE=0 if table_SN is None else k_NBHD.shape[1],
        TILE=kv_tile(head_dim, q_THD.dtype),
        SPLIT=split,
        APART=apart,
        CAPPED=scores.soft_cap is not None,
        WINDOWED=scores.window is not None,
        dtype=TL_DTYPE[q_THD.dtype],
        BLOCK_M=block_m,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=q_THD.dtype == torch.float32,  # a float32 dot is a chain of fused multiply-adds
    )


def _tile(segments: Sequence[Segment], group: int, element_size: int, head_dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, warps, stages): query rows (tokens times heads of a group) a program; no row's order of additions depends on it."""
    smallest = max(16, triton.next_power_of_2(group))
    rows = group * max((s.rows for s in segments), default=0)
    if INTERPRETED.value:
        return max(64, smallest), 4, 1
    if element_size == 4:  # a float32 dot takes the FMA units, where larger tiles spill
        return smallest, 4, 2
    if rows <= 16:
        return 16, 4, 2
    if rows <= 64 or head_dim > 128:
        return max(64, smallest), 4, 2
    return max(128, smallest), 8, 2


@triton.jit(do_not_specialize=("first_split", "splits", "window", "tokens"))
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    segment_ptr,
    table_ptr,
    stride_table_s,
    stride_table_n,
    tokens,
    first_split,
    splits,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kn,
    stride_kb,
    stride_kh,
    stride_kd,
    stride_vn,
    stride_vb,
    stride_vh,
    stride_vd,
    to_log2,
    to_cap,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    APART: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Order: splits ascending; in a split KV tiles [0, W), [W, 2W), .. ascending; in a tile q k over ascending d, weights v by position.

    Programs (query block and split, KV head, segment), the longest rows first. APART: one split a program, its partial stored as it is;
    else all of them, merged from (0, sink) or (0, -inf) on. A tile behind a row's own position leaves that row's state bit for bit as
    it was (factor 1, terms 0), so how many tiles a program visits for the sake of its last row is no row's business.
    """
    segment_ptr += tl.program_id(2) * 6
    rows = tl.load(segment_ptr + 1)
    query_blocks = tl.cdiv(rows, BLOCK_M // GROUP)
    block = tl.program_id(0)
    split = 0
    if APART:
        split = first_split + block % splits
        block = block // splits
    if block >= query_blocks:
        return
    done = (query_blocks - 1 - block) * (BLOCK_M // GROUP)
    rows = tl.minimum(rows - done, BLOCK_M // GROUP)
    first_row = tl.load(segment_ptr) + done
    first_position = tl.load(segment_ptr + 2) + done
    kv_row = tl.load(segment_ptr + 3)
    start = tl.load(segment_ptr + 4)
    end = tl.minimum(tl.load(segment_ptr + 5), first_position + rows)
    if WINDOWED:
        start = tl.maximum(start, first_position - window + 1)
    if APART:
        start = tl.maximum(start, split * SPLIT)
        end = tl.minimum(end, split * SPLIT + SPLIT)
    kv_head = tl.program_id(1)

    # GROUP query heads share the K and V of one KV head: a tile row is one head of one token.
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live_M = (query < BLOCK_M // GROUP) & (query < rows)
    row = (first_row + query).to(tl.int64)
    position = first_position + query
    d = tl.arange(0, BLOCK_D)
    q_mask = live_M[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :] * stride_qd, mask=q_mask, other=0.0)

    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    origin = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    whole = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    whole_lse = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    if sink_ptr is not None:
        whole_lse = tl.load(sink_ptr + head, mask=live_M, other=-float("inf")).to(tl.float32)
    for tile in range(start // TILE, tl.cdiv(tl.maximum(end, 0), TILE)):
        n = tile * TILE + tl.arange(0, TILE)
        # Slots outside [start, end) may hold anything, NaN too: they are read as zero.
        held = (n >= start) & (n < end)
        kv_mask = held[:, None] & (d < HEAD_DIM)[None, :]
        if PAGE > 0:
            page = tl.load(table_ptr + tl.program_id(2) * stride_table_s + n // PAGE * stride_table_n, mask=held, other=0).to(tl.int64)
            k_offset = page * stride_kn + (n % PAGE) * stride_kb
            v_offset = page * stride_vn + (n % PAGE) * stride_vb
        else:
            k_offset = (kv_row + n).to(tl.int64) * stride_kb
            v_offset = (kv_row + n).to(tl.int64) * stride_vb
        k = tl.load(k_ptr + k_offset[:, None] + d[None, :] * stride_kd, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + v_offset[:, None] + d[None, :] * stride_vd, mask=kv_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            score = tanh(score * to_cap) * soft_cap
        seen = held[None, :] & (n[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (n[None, :] > position[:, None] - window)
        score = tl.where(seen, score, -float("inf"))
        weight, decay, origin = step(score, origin, to_log2)
        total = tl.fma(total, decay, row_sum(weight))
        acc = tl.dot(round_to(weight, dtype).to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        if not APART and (tile + 1) % (SPLIT // TILE) == 0:
            part, part_lse = finish(acc, origin, total)
            whole, whole_lse = join(whole, whole_lse, part, part_lse)
            acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            total = tl.zeros((BLOCK_M,), dtype=tl.float32)
            origin = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)

    part, part_lse = finish(acc, origin, total)
    if APART:
        whole, whole_lse = part, part_lse
        out_ptr += (split - first_split).to(tl.int64) * tokens * HEADS * HEAD_DIM
        lse_ptr += (split - first_split).to(tl.int64) * tokens * HEADS
    else:
        whole, whole_lse = join(whole, whole_lse, part, part_lse)
    out_ptrs = out_ptr + (row * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptrs, whole.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(lse_ptr + head * tokens + row, whole_lse, mask=live_M)
