"""Gluon kernels of `gemm` for sm_90 in half precision: one sum over K, and a row-parallel sum of 2, 4 or 8 chunks.

One warp loads, one or two warp groups of 64 rows each multiply. The loads run ahead through the ends of chunks and of tiles, and
a chunk's products begin before the chunk before it is joined. The bits are those of `_descriptor_kernel`.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlmismatch.kernels.common.triton_gluon import barrier, load_tile, store_tile
from rlmismatch.kernels.gemm.tiles import GROUP, PROGRAMS, Ring

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _origin(tile, tiles_p, tiles_q, GROUP: gl.constexpr):
    """Row tile and column tile; GROUP row tiles are walked before the next column tile."""
    first = tile // (GROUP * tiles_q) * GROUP
    rows = gl.minimum(tiles_p - first, GROUP)
    return first + tile % (GROUP * tiles_q) % rows, tile % (GROUP * tiles_q) // rows


@gluon.jit
def _first_row(block, P):
    """Of 64 rows. The last block ends with the last row and may share some with the block before: both write the same bits there, where
    loads that reach beyond the edge were up to 1.7 times as slow.
    """
    return gl.minimum(block * 64, P - 64)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Of every slot of the ring: that it is full, and that all groups have emptied it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    return full, empty


@gluon.jit
def _produce(
    a_desc, b_desc, extra_desc, a_smem, b_smem, extra_smem, full, empty, tiles_p, tiles_q, steps, P,
    GROUPS: gl.constexpr, BLOCK_Q: gl.constexpr, EXTRA_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    B_TURNED: gl.constexpr,
):  # fmt: skip
    """Blocks of both operands into shared memory, as their slots become free."""
    extra_bytes: gl.constexpr = extra_desc.block_type.nbytes if EXTRA_Q else 0
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles_p * tiles_q, gl.num_programs(0)):
        p, q = _origin(tile, tiles_p, tiles_q, GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), GROUPS * a_desc.block_type.nbytes + b_desc.block_type.nbytes + extra_bytes)
            k = step * BLOCK_K
            for half in gl.static_range(GROUPS):
                row = _first_row(p * GROUPS + half, P)
                load_tile(a_desc, [row, k], full.index(slot), a_smem.index(slot * GROUPS + half))
            column = q * (BLOCK_Q + EXTRA_Q)
            load_tile(b_desc, [k, column] if B_TURNED else [column, k], full.index(slot), b_smem.index(slot))
            if EXTRA_Q:
                column += BLOCK_Q
                load_tile(extra_desc, [k, column] if B_TURNED else [column, k], full.index(slot), extra_smem.index(slot))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _products(
    a_smem, b_smem, full, slot, phase, acc, use_acc: gl.constexpr,
    HALF: gl.constexpr, GROUPS: gl.constexpr, B_TURNED: gl.constexpr,
):  # fmt: skip
    """One step's products, on their way."""
    mbarrier.wait(full.index(slot), phase)
    a = a_smem.index(slot * GROUPS + HALF)
    b = b_smem.index(slot)
    return warpgroup_mma(a, b if B_TURNED else b.permute((1, 0)), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _added(left, right):
    """left + right, here and now: moved behind the next chunk's products, where it is used, the addition would keep both operands alive."""
    total = left + right
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _consume(
    out_desc, a_smem, b_smem, kept_smem, full, empty, tiles_p, tiles_q, steps, P,
    HALF: gl.constexpr, GROUPS: gl.constexpr, COUNT: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    B_TURNED: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile: one warp group. A sum waits in `one` or `two` for its right neighbour, the sum of four in shared memory."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16])
    kept = kept_smem.index(HALF)
    if _RENAMED:
        staged = kept.reinterpret(out_desc.dtype, [64, BLOCK_Q], out_desc.layout)
    else:
        staged = kept._reinterpret(out_desc.dtype, [64, BLOCK_Q], out_desc.layout)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_p * tiles_q, gl.num_programs(0)):
        zeros = gl.zeros([64, BLOCK_Q], gl.float32, mma)
        one, two, after = zeros, zeros, zeros
        for chunk in gl.static_range(COUNT):
            if chunk % 4 == 0:
                later = _products(a_smem, b_smem, full, slot, phase, zeros, False, HALF, GROUPS, B_TURNED)
                acc = warpgroup_mma_wait(1, deps=[later])
                before = slot  # never the same value as `slot` where a loop begins: Triton 3.6 would take it for one that does not change
                slot, phase = _next(slot, phase, STAGES)
            for _step in range(1, steps):
                later = _products(a_smem, b_smem, full, slot, phase, acc, True, HALF, GROUPS, B_TURNED)
                acc = warpgroup_mma_wait(1, deps=[later])
                barrier()
                mbarrier.arrive(empty.index(before), count=1)
                before = slot
                slot, phase = _next(slot, phase, STAGES)
            last = before
            # The next chunk is under way before this one is joined, but where four sums wait at once: registers hold three.
            if chunk % 4 != 3 and chunk != COUNT - 1:
                later = _products(a_smem, b_smem, full, slot, phase, zeros, False, HALF, GROUPS, B_TURNED)
                acc, after = warpgroup_mma_wait(1, deps=[acc, later])
                before = slot
                slot, phase = _next(slot, phase, STAGES)
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(last), count=1)
            if chunk % 2 == 1:
                acc = _added(one, acc)
            if chunk % 4 == 3:
                acc = _added(two, acc)
            if chunk == 7:
                acc = kept.load(mma) + acc
            if chunk != COUNT - 1:
                if chunk % 2 == 0:
                    one = acc
                elif chunk % 4 == 1:
                    two = acc
                else:
                    tma.store_wait(0)  # of the tile before, which went out from the same place
                    barrier()
                    kept.store(acc)
                if chunk % 4 != 3:
                    acc = after
        tma.store_wait(0)
        barrier()
        staged.store(acc.to(out_desc.dtype))
        fence_async_shared()
        barrier()
        p, q = _origin(tile, tiles_p, tiles_q, GROUP)
        store_tile(out_desc, [_first_row(p * GROUPS + HALF, P), q * BLOCK_Q], staged)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("P", "Q", "steps"))
def _chunks_hopper_kernel(
    a_desc, b_desc, out_desc, P, Q, steps,
    GROUPS: gl.constexpr, COUNT: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    B_TURNED: gl.constexpr,
):  # fmt: skip
    """Order: each of COUNT chunks from zero over its columns, ascending; the pairwise tree over them; one rounding."""
    tiles_p = gl.cdiv(P, GROUPS * 64)
    tiles_q = gl.cdiv(Q, BLOCK_Q)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * GROUPS, 64, BLOCK_K], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, b_desc.block_type.shape[0], b_desc.block_type.shape[1]], b_desc.layout)
    kept_dtype: gl.constexpr = gl.float32 if COUNT == 8 else out_desc.dtype
    kept_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=kept_dtype.primitive_bitwidth, rank=2)
    kept_smem = gl.allocate_shared_memory(kept_dtype, [GROUPS, 64, BLOCK_Q], kept_layout)
    full, empty = _barriers(STAGES, GROUPS)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (out_desc, a_smem, b_smem, kept_smem, full, empty, tiles_p, tiles_q, steps, P,
                        0, GROUPS, COUNT, BLOCK_Q, STAGES, GROUP, B_TURNED)),
            (_consume, (out_desc, a_smem, b_smem, kept_smem, full, empty, tiles_p, tiles_q, steps, P,
                        1, GROUPS, COUNT, BLOCK_Q, STAGES, GROUP, B_TURNED)),
            (_produce, (a_desc, b_desc, b_desc, a_smem, b_smem, b_smem, full, empty, tiles_p, tiles_q, COUNT * steps, P,
                        GROUPS, BLOCK_Q, 0, BLOCK_K, STAGES, GROUP, B_TURNED)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out_desc, a_smem, b_smem, kept_smem, full, empty, tiles_p, tiles_q, steps, P,
                        0, GROUPS, COUNT, BLOCK_Q, STAGES, GROUP, B_TURNED)),
            (_produce, (a_desc, b_desc, b_desc, a_smem, b_smem, b_smem, full, empty, tiles_p, tiles_q, COUNT * steps, P,
                        GROUPS, BLOCK_Q, 0, BLOCK_K, STAGES, GROUP, B_TURNED)),
        ], [1], [24])  # fmt: skip


@gluon.jit
def _both(
    a_smem, b_smem, extra_smem, full, slot, phase, acc, extra, use_acc: gl.constexpr,
    HALF: gl.constexpr, GROUPS: gl.constexpr, EXTRA_Q: gl.constexpr, B_TURNED: gl.constexpr,
):  # fmt: skip
    """One step's products of the wide block and of the narrow one, on their way."""
    mbarrier.wait(full.index(slot), phase)
    a = a_smem.index(slot * GROUPS + HALF)
    b = b_smem.index(slot)
    acc = warpgroup_mma(a, b if B_TURNED else b.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    if EXTRA_Q:
        e = extra_smem.index(slot)
        extra = warpgroup_mma(a, e if B_TURNED else e.permute((1, 0)), extra, use_acc=use_acc, is_async=True)
    return acc, extra


@gluon.jit
def _waited(acc, extra, steps: gl.constexpr, EXTRA_Q: gl.constexpr):
    """Both sums, once no more than `steps` steps are on their way."""
    if EXTRA_Q:
        acc, extra = warpgroup_mma_wait(2 * steps, deps=[acc, extra])
    else:
        acc = warpgroup_mma_wait(steps, deps=[acc])
    return acc, extra


@gluon.jit
def _consume_one(
    out_desc, out_extra_desc, a_smem, b_smem, extra_smem, out_smem, out_extra_smem, full, empty, tiles_p, tiles_q, steps, P,
    HALF: gl.constexpr, GROUPS: gl.constexpr, BLOCK_Q: gl.constexpr, EXTRA_Q: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, B_TURNED: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile: one warp group."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA_Q or BLOCK_Q, 16])
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_p * tiles_q, gl.num_programs(0)):
        acc = gl.zeros([64, BLOCK_Q], gl.float32, mma)
        extra = gl.zeros([64, EXTRA_Q or BLOCK_Q], gl.float32, narrow)
        acc, extra = _both(a_smem, b_smem, extra_smem, full, slot, phase, acc, extra, False, HALF, GROUPS, EXTRA_Q, B_TURNED)
        acc, extra = _waited(acc, extra, 1, EXTRA_Q)
        before = slot
        slot, phase = _next(slot, phase, STAGES)
        for _step in range(1, steps):
            acc, extra = _both(a_smem, b_smem, extra_smem, full, slot, phase, acc, extra, True, HALF, GROUPS, EXTRA_Q, B_TURNED)
            acc, extra = _waited(acc, extra, 1, EXTRA_Q)
            barrier()
            mbarrier.arrive(empty.index(before), count=1)
            before = slot
            slot, phase = _next(slot, phase, STAGES)
        acc, extra = _waited(acc, extra, 0, EXTRA_Q)
        barrier()
        mbarrier.arrive(empty.index(before), count=1)
        p, q = _origin(tile, tiles_p, tiles_q, GROUP)
        row = _first_row(p * GROUPS + HALF, P)
        column = q * (BLOCK_Q + EXTRA_Q)
        tma.store_wait(0)  # of the tile before, which went out from the same place
        barrier()
        out_smem.index(HALF).store(acc.to(out_desc.dtype))
        if EXTRA_Q:
            out_extra_smem.index(HALF).store(extra.to(out_desc.dtype))
        fence_async_shared()
        barrier()
        store_tile(out_desc, [row, column], out_smem.index(HALF))
        if EXTRA_Q:
            store_tile(out_extra_desc, [row, column + BLOCK_Q], out_extra_smem.index(HALF))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("P", "Q", "steps"))
def _one_sum_hopper_kernel(
    a_desc, b_desc, extra_desc, out_desc, out_extra_desc, P, Q, steps,
    GROUPS: gl.constexpr, BLOCK_Q: gl.constexpr, EXTRA_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    B_TURNED: gl.constexpr,
):  # fmt: skip
    """Order: from zero over all of K, ascending; one rounding."""
    tiles_p = gl.cdiv(P, GROUPS * 64)
    tiles_q = gl.cdiv(Q, BLOCK_Q + EXTRA_Q)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * GROUPS, 64, BLOCK_K], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, b_desc.block_type.shape[0], b_desc.block_type.shape[1]], b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 64, BLOCK_Q], out_desc.layout)
    if EXTRA_Q:
        extra_smem = gl.allocate_shared_memory(
            b_desc.dtype, [STAGES, extra_desc.block_type.shape[0], extra_desc.block_type.shape[1]], extra_desc.layout
        )
        out_extra_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 64, EXTRA_Q], out_extra_desc.layout)
    else:
        extra_smem = b_smem
        out_extra_smem = out_smem
    full, empty = _barriers(STAGES, GROUPS)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume_one, (out_desc, out_extra_desc, a_smem, b_smem, extra_smem, out_smem, out_extra_smem, full, empty,
                            tiles_p, tiles_q, steps, P, 0, GROUPS, BLOCK_Q, EXTRA_Q, STAGES, GROUP, B_TURNED)),
            (_consume_one, (out_desc, out_extra_desc, a_smem, b_smem, extra_smem, out_smem, out_extra_smem, full, empty,
                            tiles_p, tiles_q, steps, P, 1, GROUPS, BLOCK_Q, EXTRA_Q, STAGES, GROUP, B_TURNED)),
            (_produce, (a_desc, b_desc, extra_desc, a_smem, b_smem, extra_smem, full, empty, tiles_p, tiles_q, steps, P,
                        GROUPS, BLOCK_Q, EXTRA_Q, BLOCK_K, STAGES, GROUP, B_TURNED)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume_one, (out_desc, out_extra_desc, a_smem, b_smem, extra_smem, out_smem, out_extra_smem, full, empty,
                            tiles_p, tiles_q, steps, P, 0, GROUPS, BLOCK_Q, EXTRA_Q, STAGES, GROUP, B_TURNED)),
            (_produce, (a_desc, b_desc, extra_desc, a_smem, b_smem, extra_smem, full, empty, tiles_p, tiles_q, steps, P,
                        GROUPS, BLOCK_Q, EXTRA_Q, BLOCK_K, STAGES, GROUP, B_TURNED)),
        ], [1], [24])  # fmt: skip


def _descriptor(x_RK: torch.Tensor, rows: int, k: int, *, turned: bool) -> TensorDescriptor:
    """Blocks of `rows` by `k`, or `k` by `rows` where K is not the contiguous dim."""
    view, block = (x_RK.T, [k, rows]) if turned else (x_RK, [rows, k])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(view, list(view.shape), [view.stride(0), 1], block, layout)


def joined(x_PK: torch.Tensor, w_QK: torch.Tensor, *, ring: Ring, chunks: int, out_dtype: torch.dtype) -> torch.Tensor:
    """[P, Q]: `chunks` (2, 4 or 8) equal pieces of K, each summed ascending, joined by the pairwise tree, rounded once.

    64 rows or more, contiguous; w has either dim contiguous; every pitch is a multiple of 16 bytes, and a chunk one of `ring.k`.
    """
    P, Q, K = x_PK.shape[0], *w_QK.shape
    steps = K // chunks // ring.k
    turned = w_QK.stride(1) != 1
    out_PQ = torch.empty((P, Q), dtype=out_dtype, device=x_PK.device)
    out_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * out_dtype.itemsize, rank=2)
    tiles = triton.cdiv(P, 64 * ring.groups) * triton.cdiv(Q, ring.n)
    _chunks_hopper_kernel[(min(tiles, PROGRAMS),)](
        _descriptor(x_PK, 64, ring.k, turned=False),
        _descriptor(w_QK, ring.n, ring.k, turned=turned),
        TensorDescriptor(out_PQ, [P, Q], [Q, 1], [64, ring.n], out_layout),
        P,
        Q,
        steps,
        GROUPS=ring.groups,
        COUNT=chunks,
        BLOCK_Q=ring.n,
        BLOCK_K=ring.k,
        STAGES=ring.stages,
        GROUP=GROUP,
        B_TURNED=turned,
        num_warps=4,
        maxnreg=168 if ring.groups == 2 else 240,  # of twelve or eight warps; the groups that compute take from the one that loads
        enable_fp_fusion=True,
    )
    return out_PQ


def one_sum(x_PK: torch.Tensor, w_QK: torch.Tensor, *, ring: Ring) -> torch.Tensor:
    """[P, Q] in the operands' dtype: all of K summed ascending, rounded once.

    64 rows or more, contiguous; w has either dim contiguous; every pitch, that of the result too, is a multiple of 16 bytes.
    """
    P, Q, K = x_PK.shape[0], *w_QK.shape
    turned = w_QK.stride(1) != 1
    out_PQ = torch.empty((P, Q), dtype=x_PK.dtype, device=x_PK.device)

    def out_desc(columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return TensorDescriptor(out_PQ, [P, Q], [Q, 1], [64, columns], layout)

    wide, out_wide = _descriptor(w_QK, ring.n, ring.k, turned=turned), out_desc(ring.n)
    tiles = triton.cdiv(P, 64 * ring.groups) * triton.cdiv(Q, ring.n + ring.extra)
    _one_sum_hopper_kernel[(min(tiles, PROGRAMS),)](
        _descriptor(x_PK, 64, ring.k, turned=False),
        wide,
        _descriptor(w_QK, ring.extra, ring.k, turned=turned) if ring.extra else wide,
        out_wide,
        out_desc(ring.extra) if ring.extra else out_wide,
        P,
        Q,
        triton.cdiv(K, ring.k),
        GROUPS=ring.groups,
        BLOCK_Q=ring.n,
        EXTRA_Q=ring.extra,
        BLOCK_K=ring.k,
        STAGES=ring.stages,
        GROUP=GROUP,
        B_TURNED=turned,
        num_warps=4,
        maxnreg=168 if ring.groups == 2 else 240,
        enable_fp_fusion=True,
    )
    return out_PQ
