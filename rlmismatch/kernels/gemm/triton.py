"""Triton kernels of `gemm`: one product of two strided matrices, A [P, K] times B [Q, K] transposed, in three ways of loading.

All add the same terms in the same order, so which of them runs moves no bit: `_descriptor_kernel` where the tensor memory
accelerator of sm_90 can load the operands, there for many rows without a bias `triton_hopper`, and `_pointer_kernel` for every
other dtype, stride, device and in the interpreter.
"""

import functools
import importlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from rlmismatch.kernels.common.triton import INTERPRETED, storage, widen
from rlmismatch.kernels.gemm.tiles import GROUP, INTERPRETER, PROGRAMS, Tile, descriptor_tile, pointer_tile, ring

_JOIN_BLOCK = 65536 if INTERPRETED.value else 1024
_SHARED_BYTES = 227 * 1024 - 1024  # of one program on sm_90, less what the barriers take
_STORED_AT_ONCE = 64 * 1024  # bytes of a tile that are staged in shared memory on their way out


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in `out_dtype`."""
    return _product(x_MK, weight_NK, bias_N, chunks=1, out_dtype=out_dtype)


def row_partial(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, chunks: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., N] in `out_dtype`, by default float32, unrounded."""
    return _product(x_MK, weight_NK, None, chunks=chunks, out_dtype=out_dtype or torch.float32)


def grad_weight(dy_MN: torch.Tensor, x_MK: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in `out_dtype`."""
    return _product(dy_MN.T, x_MK.T, None, chunks=1, out_dtype=out_dtype)


def _product(x: torch.Tensor, w_QK: torch.Tensor, bias_Q: torch.Tensor | None, *, chunks: int, out_dtype: torch.dtype) -> torch.Tensor:
    """`chunks` equal pieces of K, each summed ascending, joined by the pairwise tree, rounded once: [..., Q]."""
    if out_dtype == torch.float64:
        raise ValueError("the Triton kernel accumulates in float32; float64 is the reference's")
    Q, K = w_QK.shape
    x_PK = x.reshape(math.prod(x.shape[:-1]), K)  # K may be 0: no tokens
    P = x_PK.shape[0]
    if P == 0 or Q == 0:
        return x.new_empty((*x.shape[:-1], Q), dtype=out_dtype)
    tile = descriptor_tile(P, Q, chunks)
    loadable = not INTERPRETED.value and _has_tma() and _loadable(x_PK) and _loadable(w_QK) and Q * out_dtype.itemsize % 16 == 0
    ringed = loadable and x_PK.stride(1) == 1 and (chunks > 1 or (bias_Q is None and out_dtype == x.dtype))
    if ringed and (at := ring(P, Q, K // chunks, chunks)) is not None and (hopper := _hopper()) is not None:
        how = {"chunks": chunks, "out_dtype": out_dtype}
        out_PQ: torch.Tensor = hopper.joined(x_PK, w_QK, ring=at, **how) if chunks > 1 else hopper.one_sum(x_PK, w_QK, ring=at)
        return out_PQ.view(*x.shape[:-1], Q)
    if loadable and (chunks == 1 or K // chunks % tile.k == 0):  # a block must not reach into the next chunk
        out_GPQ = _by_descriptor(x_PK, w_QK, bias_Q, tile=tile, chunks=chunks, out_dtype=out_dtype)
    else:
        out_GPQ = _by_pointer(x_PK, w_QK, bias_Q, chunks=chunks, out_dtype=out_dtype)
    return (out_GPQ[0] if len(out_GPQ) == 1 else _join(out_GPQ, out_dtype)).to(out_dtype).view(*x.shape[:-1], Q)


@functools.cache
def _has_tma() -> bool:
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch == 90


@functools.cache
def _hopper() -> Any:
    """The module `triton_hopper`; None where this Triton has not the Gluon that it is written in: the other kernels give its bits."""
    try:
        return importlib.import_module("rlmismatch.kernels.gemm.triton_hopper")
    except (ImportError, AttributeError):
        return None


def _loadable(x_RK: torch.Tensor) -> bool:
    """Whether a tensor descriptor can describe it: half precision, one dim contiguous, the other and the base 16-byte aligned."""
    if x_RK.element_size() != 2 or x_RK.numel() == 0 or x_RK.data_ptr() % 16:
        return False
    return any(x_RK.stride(c) == 1 and _pitch(x_RK, 1 - c) % 8 == 0 for c in (0, 1))


def _pitch(x_RK: torch.Tensor, dim: int) -> int:
    """Elements from one index of `dim` to the next; torch leaves it open where there is only one."""
    return x_RK.stride(dim) if x_RK.shape[dim] > 1 else x_RK.shape[1 - dim]


def _descriptor(x_RK: torch.Tensor, rows: int, k: int) -> tuple[TensorDescriptor, bool]:
    """The view to load blocks through, and whether its rows are K."""
    R, K = x_RK.shape
    if x_RK.stride(1) == 1 and _pitch(x_RK, 0) % 8 == 0:
        return TensorDescriptor(x_RK, [R, K], [_pitch(x_RK, 0), 1], [rows, k]), False
    return TensorDescriptor(x_RK, [K, R], [_pitch(x_RK, 1), 1], [k, rows]), True


def _by_descriptor(
    x_PK: torch.Tensor, w_QK: torch.Tensor, bias_Q: torch.Tensor | None, *, tile: Tile, chunks: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """The groups' sums [groups, P, Q]: in `out_dtype` if there is one group, else in float32."""
    P, Q, K = x_PK.shape[0], *w_QK.shape
    count = min(tile.count, chunks)
    groups = chunks // count
    out_GPQ = torch.empty((groups, P, Q), dtype=out_dtype if groups == 1 else torch.float32, device=x_PK.device)
    a, b = (w_QK, x_PK) if tile.swapped else (x_PK, w_QK)
    a_desc, a_turned = _descriptor(a, tile.m, tile.k)
    b_desc, b_turned = _descriptor(b, tile.n, tile.k)
    split = 2 if tile.m * tile.n * out_GPQ.element_size() > _STORED_AT_ONCE else 1
    block = (tile.n, tile.m) if tile.swapped else (tile.m, tile.n // split)

    def out_desc(rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor(out_GPQ, [groups, P, Q], [P * Q, Q, 1], [1, rows, columns])

    staged = (tile.m * (tile.n // split) + tile.m * tile.extra) * out_GPQ.element_size()
    stage = (tile.m + tile.n + tile.extra) * tile.k * 2
    tiles = triton.cdiv(a.shape[0], tile.m) * triton.cdiv(b.shape[0], tile.n + tile.extra) * groups
    _descriptor_kernel[(min(tiles, PROGRAMS),)](
        a_desc,
        b_desc,
        _descriptor(b, tile.extra, tile.k)[0] if tile.extra else None,
        out_desc(*block),
        out_desc(*((tile.extra, tile.m) if tile.swapped else (tile.m, tile.extra))) if tile.extra else None,
        bias_Q,
        a.shape[0],
        b.shape[0],
        K // chunks,
        groups,
        COUNT=count,
        A_TURNED=a_turned,
        B_TURNED=b_turned,
        SWAPPED=tile.swapped,
        SPLIT=split,
        BLOCK_P=tile.m,
        BLOCK_Q=tile.n,
        EXTRA_Q=tile.extra,
        BLOCK_K=tile.k,
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=min(tile.stages, (_SHARED_BYTES - staged) // stage),
        enable_fp_fusion=True,  # a float32 dot is a chain of fused multiply-adds
    )
    return out_GPQ


def _by_pointer(
    x_PK: torch.Tensor, w_QK: torch.Tensor, bias_Q: torch.Tensor | None, *, chunks: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Every chunk's sum [chunks, P, Q]: in `out_dtype` if there is one chunk, else in float32."""
    P, Q, K = x_PK.shape[0], *w_QK.shape
    out_CPQ = torch.empty((chunks, P, Q), dtype=storage(out_dtype) if chunks == 1 else torch.float32, device=x_PK.device)
    tile = INTERPRETER if INTERPRETED.value else pointer_tile(P, x_PK.element_size())
    a, b, width = widen(x_PK), widen(w_QK), K // chunks
    _pointer_kernel[(triton.cdiv(P, tile.m) * triton.cdiv(Q, tile.n), chunks)](
        a,
        b,
        None if bias_Q is None else widen(bias_Q),
        out_CPQ,
        P,
        Q,
        *a.stride(),
        *b.stride(),
        WIDTH=width,
        BLOCK_P=tile.m,
        BLOCK_Q=tile.n,
        BLOCK_K=min(tile.k, max(16, triton.next_power_of_2(width))),
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out_CPQ


def _join(parts_CPQ: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    out_PQ = torch.empty(parts_CPQ.shape[1:], dtype=storage(out_dtype), device=parts_CPQ.device)
    grid = (triton.cdiv(out_PQ.numel(), _JOIN_BLOCK),)
    _join_kernel[grid](parts_CPQ, out_PQ, out_PQ.numel(), CHUNKS=len(parts_CPQ), BLOCK=_JOIN_BLOCK, enable_fp_fusion=False)
    return out_PQ


@triton.jit
def _tile_origin(tile, P, Q, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile; GROUP row tiles are walked before the next column tile."""
    tiles_p = tl.cdiv(P, BLOCK_P)
    tiles_q = tl.cdiv(Q, BLOCK_Q)
    first = tile // (GROUP * tiles_q) * GROUP
    rows = tl.minimum(tiles_p - first, GROUP)
    return (first + tile % (GROUP * tiles_q) % rows) * BLOCK_P, tile % (GROUP * tiles_q) // rows * BLOCK_Q


@triton.jit(do_not_specialize=("P", "Q", "width", "groups"))
def _descriptor_kernel(
    a_desc,
    b_desc,
    extra_desc,
    out_desc,
    out_extra_desc,
    bias_ptr,
    P,
    Q,
    width,
    groups,
    COUNT: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    SWAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    EXTRA_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Order: each of COUNT chunks from zero over its columns, ascending; the pairwise tree over them; then the bias; one rounding."""
    tl.static_assert(EXTRA_Q == 0 or COUNT == 1)
    tiles = tl.cdiv(P, BLOCK_P) * tl.cdiv(Q, BLOCK_Q + EXTRA_Q)
    steps = tl.cdiv(width, BLOCK_K)
    for program in tl.range(tl.program_id(0), tiles * groups, tl.num_programs(0)):
        group = program // tiles
        p, q = _tile_origin(program % tiles, P, Q, BLOCK_P, BLOCK_Q + EXTRA_Q, GROUP)
        extra_q = q + BLOCK_Q
        if SWAPPED:  # few rows are Q: the last block overlaps the one before, for a load that reaches beyond the edge is slow
            q = tl.maximum(tl.minimum(q, Q - BLOCK_Q), 0)
            extra_q = tl.maximum(tl.minimum(extra_q, Q - EXTRA_Q), 0)
        acc = tl.zeros((BLOCK_P, BLOCK_Q), dtype=tl.float32)
        one, two, four = acc, acc, acc  # sums of one, two and four chunks that wait for their right neighbour
        if COUNT > 1:  # one loop over all chunks keeps the loads going
            for step in range(COUNT * steps):
                k = group * COUNT * width + step * BLOCK_K
                acc = tl.dot(_block(a_desc, p, k, A_TURNED), _block(b_desc, q, k, B_TURNED).T, acc)
                if step % steps == steps - 1:
                    acc, one, two, four = _chunk_done(step // steps, acc, one, two, four, COUNT)
                    if step != COUNT * steps - 1:
                        acc = tl.zeros((BLOCK_P, BLOCK_Q), dtype=tl.float32)
        elif EXTRA_Q:
            extra = tl.zeros((BLOCK_P, EXTRA_Q), dtype=tl.float32)
            for step in range(steps):
                k = group * width + step * BLOCK_K
                a = _block(a_desc, p, k, A_TURNED)
                acc = tl.dot(a, _block(b_desc, q, k, B_TURNED).T, acc)
                extra = tl.dot(a, _block(extra_desc, extra_q, k, B_TURNED).T, extra)
            _finish(out_extra_desc, extra, bias_ptr, group, p, extra_q, P, Q, SWAPPED, 1, BLOCK_P, EXTRA_Q)
        else:
            for step in range(steps):
                k = group * width + step * BLOCK_K
                acc = tl.dot(_block(a_desc, p, k, A_TURNED), _block(b_desc, q, k, B_TURNED).T, acc)
        _finish(out_desc, acc, bias_ptr, group, p, q, P, Q, SWAPPED, SPLIT, BLOCK_P, BLOCK_Q)


@triton.jit
def _block(desc, row, k, TURNED: tl.constexpr):
    """Rows from `row` on, columns of K from `k` on; zeros beyond the operand's edge."""
    return desc.load([k, row]).T if TURNED else desc.load([row, k])


@triton.jit
def _chunk_done(chunk, acc, one, two, four, COUNT: tl.constexpr):
    """A binary counter: chunk 2i + 1 joins chunk 2i, a pair joins the pair before it, four join four. What waits is returned with it."""
    if chunk % 2 == 1:
        acc = one + acc
    else:
        one = acc
    if COUNT >= 4:
        if chunk % 4 == 3:
            acc = two + acc
        elif chunk % 4 == 1:
            two = acc
    if COUNT >= 8:
        if chunk % 8 == 7:
            acc = four + acc
        elif chunk % 8 == 3:
            four = acc
    return acc, one, two, four


@triton.jit
def _finish(
    out_desc, acc, bias_ptr, group, p, q, P, Q, SWAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr
):
    if bias_ptr is not None:
        if SWAPPED:
            rows = p + tl.arange(0, BLOCK_P)
            acc += tl.load(bias_ptr + rows, mask=rows < P, other=0.0).to(tl.float32)[:, None]
        else:
            columns = q + tl.arange(0, BLOCK_Q)
            acc += tl.load(bias_ptr + columns, mask=columns < Q, other=0.0).to(tl.float32)[None, :]
    if SWAPPED:
        out_desc.store([group, q, p], acc.to(out_desc.dtype).T.reshape((1, BLOCK_Q, BLOCK_P)))
    elif SPLIT == 2:
        left, right = acc.reshape((BLOCK_P, 2, BLOCK_Q // 2)).permute((0, 2, 1)).split()
        out_desc.store([group, p, q], left.to(out_desc.dtype).reshape((1, BLOCK_P, BLOCK_Q // 2)))
        out_desc.store([group, p, q + BLOCK_Q // 2], right.to(out_desc.dtype).reshape((1, BLOCK_P, BLOCK_Q // 2)))
    else:
        out_desc.store([group, p, q], acc.to(out_desc.dtype).reshape((1, BLOCK_P, BLOCK_Q)))


@triton.jit(do_not_specialize=("P", "Q"))
def _pointer_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    P,
    Q,
    stride_ap,
    stride_ak,
    stride_bq,
    stride_bk,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Order: from zero over the WIDTH columns of one chunk, ascending; then the bias; one rounding. Programs (tile, chunk)."""
    first_p, first_q = _tile_origin(tl.program_id(0), P, Q, BLOCK_P, BLOCK_Q, GROUP)
    chunk = tl.program_id(1)
    p = first_p + tl.arange(0, BLOCK_P)
    q = first_q + tl.arange(0, BLOCK_Q)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge repeat the last one and are never stored, which spares the loads a mask.
    a_ptrs = a_ptr + tl.minimum(p, P - 1).to(tl.int64)[:, None] * stride_ap + (chunk * WIDTH + k).to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + tl.minimum(q, Q - 1).to(tl.int64)[None, :] * stride_bq + (chunk * WIDTH + k).to(tl.int64)[:, None] * stride_bk
    acc = tl.zeros((BLOCK_P, BLOCK_Q), dtype=tl.float32)
    for done in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k < WIDTH - done)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(k < WIDTH - done)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + q, mask=q < Q, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (chunk.to(tl.int64) * P + p)[:, None] * Q + q[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(p < P)[:, None] & (q < Q)[None, :])


@triton.jit
def _join_kernel(part_ptr, out_ptr, count, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Order: the pairwise tree over chunks, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) for eight of them; one rounding."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _subtree(part_ptr + i, i < count, tl.cast(count, tl.int64), CHUNKS)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < count)


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
