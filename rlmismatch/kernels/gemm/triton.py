"""Triton kernel of `gemm`. A tile is chosen by M alone and moves no bit: see `_Tile`."""

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


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in `out_dtype`."""
    return _launch(x_MK, weight_NK, bias_N, chunks=1, out_dtype=out_dtype)


def row_partial(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, chunks: int) -> torch.Tensor:
    """Float32 [..., N], unrounded."""
    return _launch(x_MK, weight_NK, None, chunks=chunks, out_dtype=torch.float32)


def _launch(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, chunks: int, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype == torch.float64:
        raise ValueError("the Triton kernel accumulates in float32; float64 is the reference's")
    N, K = weight_NK.shape
    x_MK, w_NK = widen(x.reshape(-1, K)), widen(weight_NK)
    M = x_MK.shape[0]
    out_MN = torch.empty((M, N), dtype=storage(out_dtype), device=x.device)
    if M:
        tile = _INTERPRETER if INTERPRETED.value else next(t for most, t in _TILES[x.element_size()] if most is None or most >= M)
        grid = (triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)
        _gemm_kernel[grid](
            x_MK,
            w_NK,
            out_MN if bias_N is None else bias_N.float(),
            out_MN,
            M,
            N,
            x_MK.stride(0),
            x_MK.stride(1),
            w_NK.stride(0),
            w_NK.stride(1),
            WIDTH=K // chunks,
            CHUNKS=chunks,
            HAS_BIAS=bias_N is not None,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=min(tile.k, max(16, triton.next_power_of_2(K // chunks))),
            GROUP_M=_GROUP_M,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out_MN.to(out_dtype).view(*x.shape[:-1], N)


@triton.jit
def _gemm_kernel(
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
    CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Order: each chunk of WIDTH from zero over ascending k; the chunks by the pairwise tree ((0+1)+(2+3))+..; + bias; one rounding."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + program % (GROUP_M * tiles_n) % group_m
    tile_n = program % (GROUP_M * tiles_n) // group_m

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the edge repeat the last one and are never stored, which spares the loads a mask.
    x_ptr += tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_xm
    w_ptr += tl.minimum(n, N - 1).to(tl.int64)[None, :] * stride_wn

    acc = _tree(x_ptr, w_ptr, 0, stride_xk, stride_wk, WIDTH, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _tree(
    x_ptr, w_ptr, first, stride_xk, stride_wk, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The pairwise tree over chunks first .. first + CHUNKS - 1, depth first: at most log2(CHUNKS) + 1 accumulators are alive."""
    if CHUNKS == 1:
        acc = _chunk(x_ptr, w_ptr, first * WIDTH, stride_xk, stride_wk, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        left = _tree(x_ptr, w_ptr, first, stride_xk, stride_wk, WIDTH, CHUNKS // 2, BLOCK_M, BLOCK_N, BLOCK_K)
        right = _tree(x_ptr, w_ptr, first + CHUNKS // 2, stride_xk, stride_wk, WIDTH, CHUNKS // 2, BLOCK_M, BLOCK_N, BLOCK_K)
        acc = left + right
    return acc


@triton.jit
def _chunk(
    x_ptr, w_ptr, first_k, stride_xk, stride_wk, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Order: ascending k from zero. Products of columns first_k .. first_k + WIDTH - 1; what is behind WIDTH counts as zero."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (first_k + k)[None, :] * stride_xk
    w_ptrs = w_ptr + (first_k + k)[:, None] * stride_wk
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
    return acc
