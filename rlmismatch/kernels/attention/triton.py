"""Triton kernel of `attention`: one body for dense and paged K and V."""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.attention import KV_TILE
from rlmismatch.kernels.common.triton import INTERPRETED, TL_DTYPE, exp, log, round_to, storage, widen


class _QueryBlock(NamedTuple):
    """The query rows of one program: `rows` consecutive tokens of sequence `sequence`, from row `first_row` of q, at `first_position`.

    `kv_start`: the row of the sequence's first token in dense K and V.
    """

    sequence: int
    first_row: int
    rows: int
    first_position: int
    kv_start: int


def causal(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, bounds: list[int], *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in q's dtype, lse float32 [Hq, T])."""
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    # Dense K and V are a cache whose only block is the whole batch.
    k_1THD, v_1THD = widen(k_THD).unsqueeze(0), widen(v_THD).unsqueeze(0)
    return _launch(q_THD, k_1THD, v_1THD, None, bounds, lengths, scale)


def paged(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_SN: torch.Tensor,
    bounds: list[int],
    lengths: list[int],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal`, K and V read through the block table."""
    if INTERPRETED.value:
        k_cache, v_cache, table_SN = _pages_in_use(k_cache, v_cache, table_SN, lengths)
    return _launch(q_THD, k_cache, v_cache, table_SN, bounds, lengths, scale)


def _pages_in_use(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table_SN: torch.Tensor, lengths: list[int]
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


def _launch(
    q_THD: torch.Tensor,
    k_NBHD: torch.Tensor,
    v_NBHD: torch.Tensor,
    table_SN: torch.Tensor | None,
    bounds: list[int],
    lengths: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, q_heads, head_dim = q_THD.shape
    kv_heads = k_NBHD.shape[2]
    group = q_heads // kv_heads
    longest = max((end - start for start, end in itertools.pairwise(bounds)), default=0)
    block_m, warps, stages = _tile(longest * group, group, q_THD.element_size(), head_dim)
    blocks = _query_blocks(bounds, lengths, block_m // group)
    out_THD = torch.empty(q_THD.shape, dtype=storage(q_THD.dtype), device=q_THD.device)
    lse_HT = torch.empty((q_heads, tokens), dtype=torch.float32, device=q_THD.device)
    if blocks:
        q = widen(q_THD)
        _attention_kernel[(len(blocks), kv_heads)](
            q,
            k_NBHD,
            v_NBHD,
            out_THD,
            lse_HT,
            torch.tensor(blocks, dtype=torch.int32, device=q.device),
            lse_HT if table_SN is None else table_SN,
            0 if table_SN is None else table_SN.stride(0),
            0 if table_SN is None else table_SN.stride(1),
            tokens,
            *q.stride(),
            *k_NBHD.stride(),
            *v_NBHD.stride(),
            scale,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            GROUP=group,
            HEADS=q_heads,
            PAGE=0 if table_SN is None else k_NBHD.shape[1],
            KV_TILE=KV_TILE,
            dtype=TL_DTYPE[q_THD.dtype],
            BLOCK_M=block_m,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=q_THD.dtype == torch.float32,  # a float32 dot is a chain of fused multiply-adds
        )
    return out_THD.to(q_THD.dtype), lse_HT


def _tile(rows: int, group: int, element_size: int, head_dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, warps, stages): query rows (tokens times heads of a group) a program; no row's order of additions depends on it."""
    smallest = max(16, triton.next_power_of_2(group))
    if INTERPRETED.value:
        return max(64, smallest), 4, 1
    if rows <= 16 or element_size == 4:  # a float32 dot takes the FMA units, where larger tiles spill
        return smallest, 4, 2
    if rows <= 64 or head_dim > 128:
        return max(64, smallest), 4, 2 if head_dim <= 128 else 1
    return max(128, smallest), 8, 2


def _query_blocks(bounds: list[int], lengths: list[int], block_rows: int) -> list[_QueryBlock]:
    return [
        _QueryBlock(s, start + done, min(block_rows, end - start - done), length - (end - start) + done, start)
        for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True))
        for done in range(0, end - start, block_rows)
    ]


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    block_ptr,
    table_ptr,
    stride_table_s,
    stride_table_n,
    tokens,
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
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    KV_TILE: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Order: KV tiles [0, W), [W, 2W), .. ascending; in a tile q k over ascending d, weights and weights v over ascending position.

    A tile behind a row's own position leaves that row's state bit for bit as it was (factor 1, terms 0), so how many tiles a program visits
    for the sake of its last row is no row's business. The row sum of the weights is a product with ones: tl.sum's order would
    follow the layout of the tile, the order of a dot does not. Weights enter their product as two terms of the model dtype, so their
    rounding is 2^-16 and not the model dtype's.
    """
    block_ptr += tl.program_id(0) * 5
    sequence = tl.load(block_ptr)
    first_row = tl.load(block_ptr + 1)
    rows = tl.load(block_ptr + 2)
    first_position = tl.load(block_ptr + 3)
    kv_start = tl.load(block_ptr + 4)
    kv_head = tl.program_id(1)

    # The heads that share one KV head stand side by side: one tile row is one head of one token.
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
    end = first_position + rows
    largest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, end, KV_TILE):
        n = start + tl.arange(0, KV_TILE)
        # Slots behind `end` may hold anything, NaN too: they are read as zero.
        kv_mask = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        if PAGE > 0:
            page = tl.load(table_ptr + sequence * stride_table_s + n // PAGE * stride_table_n, mask=n < end, other=0).to(tl.int64)
            k_offset = page * stride_kn + (n % PAGE) * stride_kb
            v_offset = page * stride_vn + (n % PAGE) * stride_vb
        else:
            k_offset = (kv_start + n).to(tl.int64) * stride_kb
            v_offset = (kv_start + n).to(tl.int64) * stride_vb
        k = tl.load(k_ptr + k_offset[:, None] + d[None, :] * stride_kd, mask=kv_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(n[None, :] <= position[:, None], score, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        weight = exp(score - new_largest[:, None])
        decay = exp(largest - new_largest)[:, None]
        largest = new_largest

        v = tl.load(v_ptr + v_offset[:, None] + d[None, :] * stride_vd, mask=kv_mask, other=0.0)
        ones = tl.full((KV_TILE, 16), 1.0, dtype=v.dtype)
        high = round_to(weight, dtype)
        total = tl.dot(high.to(v.dtype), ones, total * decay, input_precision="ieee")
        acc = tl.dot(high.to(v.dtype), v, acc * decay, input_precision="ieee")
        if dtype != tl.float32:
            low = round_to(weight - high, dtype).to(v.dtype)
            total = tl.dot(low, ones, total, input_precision="ieee")
            acc = tl.dot(low, v, acc, input_precision="ieee")

    weight_sum = tl.max(total, axis=1)  # sixteen equal columns
    out = tl.div_rn(acc, tl.zeros_like(acc) + weight_sum[:, None])
    out_ptrs = out_ptr + (row * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(lse_ptr + head * tokens + row, largest + log(weight_sum), mask=live_M)
