"""Gluon kernel of `attention_backward` for sm_90: head dim 128, half precision. The bits are those of `_dkdv_kernel` and `_dq_kernel`.

Those compute scores and dout v^T twice, seven products in all; this one computes them once, five products, and hands the parts of dq from
program to program. That they are added in one order is not left to chance: each waits for its turn.
"""

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlmismatch.kernels.attention.order import LOG2_E, Scores
from rlmismatch.kernels.common.triton_gluon import barrier, load_tile, store_tile

_GROUP = 4  # query heads of a KV head
_ROWS = 64  # of a query tile: heads of a group times tokens
_KEYS = 128  # of a program
_STAGES = 2  # query tiles in shared memory


@builtin
def _add_tile(tensor_desc, coord, src, _semantic=None):  # type: ignore[no-untyped-def]
    """Adds a tile of shared memory to global memory: every element once. Triton 3.6 has the operation, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _await(turn_ptr, done):
    """Until `done` adders have come and gone."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred early;
        again:
        ld.acquire.gpu.global.b32 $0, [$1];
        setp.lt.s32 early, $0, $2;
        @early bra again;
        }
        """,
        "=&r,l,r",
        [turn_ptr, done],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _pass_on(turn_ptr, done):
    """What this warp has added or stored is in memory; whoever awaits `done` may go on. `tma.store_wait` waits for less: for the reads."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [turn_ptr, done],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, dout_smem, lse_smem, delta_smem,
    kv_full, q_full, dout_full, empty, key_row, k_column, v_column, sequence_start, kv_head, first_row, last_tile, steps,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """K and V once, then the query tiles as their buffers become free. One warp."""
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_tile(k_desc, [key_row, k_column], kv_full, k_smem)
    load_tile(v_desc, [key_row, v_column], kv_full, v_smem)
    for step in range(steps):
        slot = step % STAGES
        tile = last_tile - step
        token = sequence_start + tile * TOKENS
        row = first_row + tile * TOKENS * GROUP
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        load_tile(q_desc, [token, kv_head * GROUP, 0], q_full.index(slot), q_smem.index(slot))
        load_tile(lse_desc, [row], q_full.index(slot), lse_smem.index(slot))
        mbarrier.expect(dout_full.index(slot), dout_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        load_tile(dout_desc, [token, kv_head * GROUP, 0], dout_full.index(slot), dout_smem.index(slot))
        load_tile(delta_desc, [row], dout_full.index(slot), delta_smem.index(slot))


@gluon.jit
def _add(
    sum_desc, turn_ptr, part_smem, part_full, part_empty, first_slot, key_tile, length, last_tile, steps, window,
    KV_HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """The parts of dq, each when its turn has come: after all lower key tiles that its query tile sees. One warp."""
    for step in range(steps):
        tile = last_tile - step
        first_adder = 0
        if WINDOWED:
            first_adder = gl.maximum(tile * TOKENS - window + 1, 0) // KEYS
        last_adder = (gl.minimum((tile + 1) * TOKENS, length) - 1) // KEYS
        slot = first_slot + tile * KV_HEADS
        mbarrier.wait(part_full, step & 1)
        if key_tile > first_adder:
            _await(turn_ptr + slot, key_tile - first_adder)
            _add_tile(sum_desc, [slot * ROWS, 0], part_smem)
        else:
            store_tile(sum_desc, [slot * ROWS, 0], part_smem)
        tma.store_wait(0)
        mbarrier.arrive(part_empty, count=1)
        if key_tile < last_adder:
            _pass_on(turn_ptr + slot, key_tile - first_adder + 1)


@gluon.jit
def _zero_behind(smem, rows, layout: gl.constexpr):
    """Rows from `rows` on are another sequence's, and may hold NaN."""
    r = gl.arange(0, smem.shape[0], gl.SliceLayout(1, layout))
    x = smem.load(layout)
    smem.store(gl.where((r < rows)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _compute(
    dk_ptr, dv_ptr, q_smem, k_smem, v_smem, dout_smem, lse_smem, delta_smem, dscore_smem, part_smem,
    kv_full, q_full, dout_full, empty, part_full, part_empty,
    sequence_start, length, tokens, kv_head, first_key, last_tile, steps, to_log2, scale, window,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """A key tile against one query tile after the other: two warp groups, of 64 keys each, and for dq of 64 columns each."""
    TOKENS: gl.constexpr = ROWS // GROUP
    dtype: gl.constexpr = k_smem.dtype
    by_key: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, ROWS, 16])
    by_query: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, HEAD_DIM // 2, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(0, by_key)
    m = gl.arange(0, ROWS, of_row)
    n = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, by_key))
    dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, sums)
    dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, sums)
    no_score = gl.zeros([KEYS, ROWS], gl.float32, by_key)
    no_part = gl.zeros([ROWS, HEAD_DIM], gl.float32, by_query)

    mbarrier.wait(kv_full, 0)
    if (first_key + KEYS > length) & (sequence_start + length < tokens):
        _zero_behind(k_smem, length - first_key, wide)
        _zero_behind(v_smem, length - first_key, wide)
        fence_async_shared()
        barrier()
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(dout_full.index(0), 0)
    if ((last_tile + 1) * TOKENS > length) & (sequence_start + length < tokens):
        _zero_behind(q_smem.index(0).reshape([ROWS, HEAD_DIM]), (length - last_tile * TOKENS) * GROUP, wide)
        _zero_behind(dout_smem.index(0).reshape([ROWS, HEAD_DIM]), (length - last_tile * TOKENS) * GROUP, wide)
        fence_async_shared()
        barrier()
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        tile = last_tile - step
        q = q_smem.index(slot).reshape([ROWS, HEAD_DIM])
        dout = dout_smem.index(slot).reshape([ROWS, HEAD_DIM])
        mbarrier.wait(q_full.index(slot), phase)
        mbarrier.wait(dout_full.index(slot), phase)
        score_later = warpgroup_mma(k_smem, q.permute((1, 0)), no_score, use_acc=False, is_async=True)
        dweight_later = warpgroup_mma(v_smem, dout.permute((1, 0)), no_score, use_acc=False, is_async=True)
        lse = lse_smem.index(slot).load(of_row)
        score = warpgroup_mma_wait(1, deps=[score_later])
        position = tile * TOKENS + m // GROUP
        # Only a tile at an edge has keys or rows to hide; elsewhere the mask would change nothing.
        edge = (tile * TOKENS < first_key + KEYS) | ((tile + 1) * TOKENS > length)
        if edge:
            lse = gl.where(position < length, lse, 0.0)
        weight = gl.exp2(gl.fma(score, to_log2, -lse[None, :]))
        if WINDOWED:
            seen = (position < length)[None, :] & (n[:, None] <= position[None, :]) & (n[:, None] > position[None, :] - window)
            weight = gl.where(seen, weight, 0.0)
        else:
            if edge:
                weight = gl.where((position < length)[None, :] & (n[:, None] <= position[None, :]), weight, 0.0)
        dv_later = warpgroup_mma(gl.convert_layout(weight.to(dtype), operand), dout, dv, is_async=True)
        # Read only now: two rows of numbers more would not fit into the registers.
        delta = gl.where(position < length, delta_smem.index(slot).load(of_row), 0.0)
        dweight = warpgroup_mma_wait(1, deps=[dweight_later])
        dscore = (weight * (dweight - delta[None, :])).to(dtype)
        dscore_smem.store(dscore)
        fence_async_shared()
        barrier()
        part_later = warpgroup_mma(dscore_smem.permute((1, 0)), k_smem, no_part, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(gl.convert_layout(dscore, operand), q, dk, is_async=True)
        part, dv = warpgroup_mma_wait(1, deps=[part_later, dv_later])
        mbarrier.wait(part_empty, (step & 1) ^ 1)
        part_smem.store(part)
        fence_async_shared()
        dk = warpgroup_mma_wait(0, deps=[dk_later])
        barrier()
        mbarrier.arrive(part_full, count=1)
        mbarrier.arrive(empty.index(slot), count=1)

    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, sums))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, sums))
    at = ((sequence_start + key).to(gl.int64) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    gl.store(dk_ptr + at, (dk * scale).to(dtype), mask=(key < length)[:, None])
    gl.store(dv_ptr + at, dv.to(dtype), mask=(key < length)[:, None])


@gluon.jit(do_not_specialize=("tokens", "key_tiles", "window"))
def _gradients_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, sum_desc, dk_ptr, dv_ptr, start_ptr, turn_ptr, tokens, key_tiles,
    k_columns, v_columns, to_log2, scale, window,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Order: that of `_dkdv_kernel` and `_dq_kernel`. Two warp groups that compute, one warp that adds dq and one that loads.

    A program is one key tile of one KV head of one sequence, and visits the query tiles that see it, the last first: all programs of a
    head begin with the one tile that all of them see, line up there, and from then on follow each other a step apart. A ticket, not the
    GPU, says which program is which, so whoever is waited for has started before and waits in its turn for earlier ones only: there is
    no deadlock, however many programs run at once.
    """
    TOKENS: gl.constexpr = ROWS // GROUP
    dtype: gl.constexpr = k_desc.dtype
    ticket = gl.atomic_add(turn_ptr, 1, sem="relaxed")
    kv_head = ticket % KV_HEADS
    key_tile = ticket // KV_HEADS % key_tiles
    sequence = ticket // KV_HEADS // key_tiles
    sequence_start = gl.load(start_ptr + sequence)
    length = gl.load(start_ptr + sequence + 1) - sequence_start
    first_key = key_tile * KEYS
    if first_key < length:
        end_token = length
        if WINDOWED:
            end_token = gl.minimum(length, first_key + KEYS - 1 + window)
        last_tile = (end_token + TOKENS - 1) // TOKENS - 1
        steps = last_tile - first_key // TOKENS + 1
        q_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, GROUP, HEAD_DIM], q_desc.layout)
        dout_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, GROUP, HEAD_DIM], dout_desc.layout)
        k_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], k_desc.layout)
        v_smem = gl.allocate_shared_memory(dtype, [KEYS, HEAD_DIM], v_desc.layout)
        dscore_smem = gl.allocate_shared_memory(
            dtype, [KEYS, ROWS], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        )
        part_smem = gl.allocate_shared_memory(gl.float32, [ROWS, HEAD_DIM], sum_desc.layout)
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
        delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        part_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        part_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(dout_full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        mbarrier.init(part_full, count=1)
        mbarrier.init(part_empty, count=1)
        fence_async_shared()
        first_slot = (sequence_start // TOKENS + sequence) * KV_HEADS + kv_head
        first_row = (kv_head * tokens + sequence_start) * GROUP
        gl.warp_specialize([
            (_compute, (dk_ptr, dv_ptr, q_smem, k_smem, v_smem, dout_smem, lse_smem, delta_smem, dscore_smem, part_smem,
                        kv_full, q_full, dout_full, empty, part_full, part_empty,
                        sequence_start, length, tokens, kv_head, first_key, last_tile, steps, to_log2, scale, window,
                        GROUP, KV_HEADS, HEAD_DIM, ROWS, KEYS, STAGES, WINDOWED)),
            (_add, (sum_desc, turn_ptr + 1, part_smem, part_full, part_empty, first_slot, key_tile, length, last_tile, steps, window,
                    KV_HEADS, ROWS, TOKENS, KEYS, WINDOWED)),
            (_load, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, dout_smem, lse_smem, delta_smem,
                     kv_full, q_full, dout_full, empty, sequence_start + first_key, kv_head * k_columns, kv_head * v_columns,
                     sequence_start, kv_head, first_row, last_tile, steps, GROUP, TOKENS, STAGES)),
        ], [1, 1], [24, 24])  # fmt: skip


@triton.jit
def _round_dq_kernel(
    sum_ptr, dq_ptr, start_ptr, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """dq = sum * scale, rounded. Programs (query tile, KV head, sequence)."""
    TOKENS: tl.constexpr = ROWS // GROUP
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence_start = tl.load(start_ptr + sequence)
    length = tl.load(start_ptr + sequence + 1) - sequence_start
    if tile * TOKENS >= length:
        return
    slot = ((sequence_start // TOKENS + sequence + tile) * KV_HEADS + kv_head).to(tl.int64)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    total = tl.load(sum_ptr + (slot * ROWS + m)[:, None] * HEAD_DIM + d[None, :])
    position = tile * TOKENS + m // GROUP
    at = ((sequence_start + position).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + d[None, :]
    tl.store(dq_ptr + at, (total * scale).to(dq_ptr.dtype.element_ty), mask=(position < length)[:, None])


def fits(q_THD: torch.Tensor, k_THD: torch.Tensor, scores: Scores) -> bool:
    """Whether the kernel is to compute this: what it has been held against other kernels for on a Hopper GPU, bit for bit, and no more.

    It compiles for float16 and for every group that divides 64 too, but has not run for them.
    """
    tokens, heads, head_dim = q_THD.shape
    return (
        q_THD.dtype == torch.bfloat16
        and head_dim == 128
        and heads == _GROUP * k_THD.shape[1]
        and tokens >= _ROWS
        and scores.soft_cap is None
    )


def gradients(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    dout_THD: torch.Tensor,
    lse_KTG: torch.Tensor,
    delta_KTG: torch.Tensor,
    starts_S: torch.Tensor,
    longest: int,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv in q's dtype) of what `fits`; lse_KTG to the base 2. The sums of dq take float32 memory of q's shape meanwhile."""
    q_THD, k_THD, v_THD, dout_THD = (_aligned(x) for x in (q_THD, k_THD, v_THD, dout_THD))
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_THD.shape[1]
    group = heads // kv_heads
    sequences = len(starts_S) - 1
    slots = (tokens // (_ROWS // group) + sequences) * kv_heads  # a sequence's last query tile need not be full
    sums = torch.empty((slots * _ROWS, head_dim), dtype=torch.float32, device=q_THD.device)
    turns = torch.zeros(1 + slots, dtype=torch.int32, device=q_THD.device)  # the ticket, then how many have added to a query tile
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_THD, v_THD))
    query_tile = [_ROWS // group, group, head_dim]
    key_tiles = triton.cdiv(longest, _KEYS)
    _gradients_hopper_kernel[(sequences * key_tiles * kv_heads,)](
        _descriptor(q_THD, query_tile),
        _descriptor(k_THD.flatten(1), [_KEYS, head_dim]),
        _descriptor(v_THD.flatten(1), [_KEYS, head_dim]),
        _descriptor(dout_THD, query_tile),
        _descriptor(lse_KTG.view(-1), [_ROWS], swizzle=0),
        _descriptor(delta_KTG.view(-1), [_ROWS], swizzle=0),
        _descriptor(sums, [_ROWS, head_dim]),
        dk,
        dv,
        starts_S,
        turns,
        tokens,
        key_tiles,
        k_THD.stride(1),
        v_THD.stride(1),
        scores.scale * LOG2_E,
        scores.scale,
        scores.window or 0,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROWS=_ROWS,
        KEYS=_KEYS,
        STAGES=_STAGES,
        WINDOWED=scores.window is not None,
        num_warps=8,
        maxnreg=168,  # of twelve warps; the eight that compute take 240 each from those that do not
        enable_fp_fusion=False,
    )
    _round_dq_kernel[(triton.cdiv(longest, _ROWS // group), kv_heads, sequences)](
        sums, dq, starts_S, scores.scale, HEADS=heads, GROUP=group, HEAD_DIM=head_dim, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False
    )
    return dq, dk, dv


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous and at an address from which a tensor descriptor can load; a copy where it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _descriptor(x: torch.Tensor, tile: list[int], *, swizzle: int = 128) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=len(tile))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout)
