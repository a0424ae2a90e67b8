"""Triton kernels of `gemm`. A tile is chosen by M alone and moves no bit: see `_Tile`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, storage, widen


class _Tile(NamedTuple):
    """What one program computes at a time.

    An element of the product is one float32 accumulator over ascending K, so the tile decides where an element is computed and not
    what is added to what. That tensor cores keep to it whatever the tile was measured on an H200; tests/gpu repeats the proof.
    The interpreter multiplies tiles by BLAS, which promises no such thing, so there the tile never changes.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


_INTERPRETER = _Tile(m=64, n=128, k=128, warps=4, stages=1)
# (largest M, tile), by bytes of an operand element; float32 operands take the FMA units, where larger tiles spill.
_TILES = {
    2: (
        (16, _Tile(m=16, n=64, k=256, warps=4, stages=4)),
        (64, _Tile(m=64, n=64, k=128, warps=4, stages=3)),
        (512, _Tile(m=128, n=128, k=64, warps=4, stages=3)),
        (None, _Tile(m=128, n=256, k=64, warps=8, stages=3)),
    ),
    4: (
        (16, _Tile(m=16, n=64, k=64, warps=4, stages=3)),
        (None, _Tile(m=64, n=64, k=32, warps=4, stages=3)),
    ),
}
_GROUP_M = 8  # row tiles that share one column tile's weights in L2
_JOIN_BLOCK = 65536 if INTERPRETED.value else 1024


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in `out_dtype`."""
    if out_dtype == torch.float64:
        raise ValueError("the Triton kernel accumulates in float32; float64 is the reference's")
    return _chunks(x_MK, weight_NK, bias_N, chunks=1, out_dtype=out_dtype)[0]


def row_partial(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, chunks: int) -> torch.Tensor:
    """Float32 [..., N], unrounded."""
    parts = _chunks(x_MK, weight_NK, None, chunks=chunks, out_dtype=torch.float32)
    if chunks == 1 or parts.numel() == 0:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    _join_kernel[(triton.cdiv(out.numel(), _JOIN_BLOCK),)](parts, out, out.numel(), CHUNKS=chunks, BLOCK=_JOIN_BLOCK)
    return out


def _chunks(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, chunks: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The products of `chunks` equal pieces of K, each rounded once to `out_dtype`: [chunks, ..., N]."""
    N, K = weight_NK.shape
    x_MK, w_NK = widen(x.reshape(-1, K)), widen(weight_NK)
    M = x_MK.shape[0]
    out_CMN = torch.empty((chunks, M, N), dtype=storage(out_dtype), device=x.device)
    if M:
        tile = _INTERPRETER if INTERPRETED.value else next(t for most, t in _TILES[x.element_size()] if most is None or most >= M)
        _chunk_kernel[(triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n), chunks)](
            x_MK,
            w_NK,
            out_CMN if bias_N is None else bias_N.float(),
            out_CMN,
            M,
            N,
            *x_MK.stride(),
            *w_NK.stride(),
            WIDTH=K // chunks,
            HAS_BIAS=bias_N is not None,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=min(tile.k, max(16, triton.next_power_of_2(K // chunks))),
            GROUP_M=_GROUP_M,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,  # a float32 dot is a chain of fused multiply-adds
        )
    return out_CMN.to(out_dtype).view(chunks, *x.shape[:-1], N)


@triton.jit
def _chunk_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Order: from zero over the WIDTH columns of one chunk, ascending; then the bias; one rounding. Programs (tile, chunk)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + program % (GROUP_M * tiles_n) % group_m
    tile_n = program % (GROUP_M * tiles_n) // group_m
    chunk = tl.program_id(1)

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge repeat the last one and are never stored, which spares the loads a mask.
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_xm + (chunk * WIDTH + k)[None, :] * stride_xk
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * stride_wn + (chunk * WIDTH + k)[:, None] * stride_wk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(k < WIDTH - done)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(k < WIDTH - done)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]
    out_ptrs = out_ptr + (chunk.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _join_kernel(part_ptr, out_ptr, count, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Order: the pairwise tree over chunks, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) for eight of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _subtree(part_ptr + i, i < count, tl.cast(count, tl.int64), CHUNKS)
    tl.store(out_ptr + i, total, mask=i < count)


@triton.jit
def _subtree(part_ptrs, mask, stride, CHUNKS: tl.constexpr):
    """Order: the pairwise tree over the CHUNKS (a power of two) parts that lie `stride` apart from `part_ptrs` on."""
    if CHUNKS == 1:
        total = tl.load(part_ptrs, mask=mask, other=0.0)
    else:
        left = _subtree(part_ptrs, mask, stride, CHUNKS // 2)
        right = _subtree(part_ptrs + CHUNKS // 2 * stride, mask, stride, CHUNKS // 2)
        total = left + right
    return total
