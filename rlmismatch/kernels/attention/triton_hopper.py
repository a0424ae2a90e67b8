"""Gluon kernel of `attention` for sm_90: dense K and V, head dim 128, half precision. The bits are those of `_attention_kernel`."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlmismatch.kernels.attention import triton_fold
from rlmismatch.kernels.attention.order import LOG2_E, SPLIT, Scores, kv_tile
from rlmismatch.kernels.common.triton_gluon import barrier, load_tile

# What Gluon calls must be Gluon's own; the source is the same.
_step = gluon.jit(triton_fold.step.fn)
_row_sum = gluon.jit(triton_fold.row_sum.fn)
_finish = gluon.jit(triton_fold.finish.fn)
_join = gluon.jit(triton_fold.join.fn)

_ROWS = 128  # of a program: heads of a group times tokens
_STAGES = 2  # tiles of K and of V in shared memory


@gluon.jit
def _geometry(segment_ptr, window, BLOCK_ROWS: gl.constexpr, WINDOWED: gl.constexpr):
    """(first row, rows, first position, kv row, start, end, kv end) of a program's query block; a negative position says there is none."""
    segment_ptr += gl.program_id(2) * 6
    all_rows = gl.load(segment_ptr + 1)
    blocks = (all_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    done = (blocks - 1 - gl.program_id(0)) * BLOCK_ROWS
    first_position = gl.load(segment_ptr + 2) + done
    rows = gl.minimum(all_rows - done, BLOCK_ROWS)
    start = gl.load(segment_ptr + 4)
    if WINDOWED:
        start = gl.maximum(start, first_position - window + 1)
    kv_end = gl.load(segment_ptr + 5)
    end = gl.minimum(kv_end, first_position + rows)
    return gl.load(segment_ptr) + done, rows, first_position, gl.load(segment_ptr + 3), start, end, kv_end


@gluon.jit
def _produce(
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, row, column, tiles,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of K and V into shared memory, as their buffers become free."""
    for j in range(tiles):
        slot = j % STAGES
        phase = (j // STAGES) & 1
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        load_tile(k_desc, [row + j * TILE, column], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), k_desc.block_type.nbytes)
        load_tile(v_desc, [row + j * TILE, column], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def _masked(
    score, tile, first_position, position, window, TILE: gl.constexpr, WINDOWED: gl.constexpr, LAST: gl.constexpr, layout: gl.constexpr
):
    """Scores of keys that a row does not see are -inf; a tile that every row sees whole passes untouched."""
    partly = tile * TILE + TILE - 1 > first_position
    if WINDOWED:
        partly = partly | (tile * TILE <= first_position + LAST - window)
    if partly:
        n = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        seen = n[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (n[None, :] > position[:, None] - window)
        score = gl.where(seen, score, -float("inf"))
    return score


@gluon.jit
def _consume(
    half, q_ptr, out_ptr, lse_ptr, sink_ptr, q_smem, k_smem, v_smem, parked, k_full, k_empty, v_full, v_empty,
    first_row, rows, first_position, kv_row, first_tile, tiles, kv_end, kv_head, tokens, stride_qt, stride_qh, to_log2, window,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """64 rows of the query block: one warp group."""
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    # A tile row is one head of one token.
    m_q = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    d_q = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    q_at = (first_row + m_q // GROUP).to(gl.int64) * stride_qt + (kv_head * GROUP + m_q % GROUP).to(gl.int64) * stride_qh
    q = gl.load(q_ptr + q_at[:, None] + d_q[None, :], mask=((m_q // GROUP < rows) & (m_q < 128 // GROUP * GROUP))[:, None], other=0.0)
    q_half = q_smem.index(half)
    q_half.store(q)
    whole_at = parked.index(half)
    whole_at.store(gl.zeros([64, HEAD_DIM], gl.float32, mma))
    fence_async_shared()
    barrier()

    m = half * 64 + gl.arange(0, 64, by_row)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (query < rows) & (m < 128 // GROUP * GROUP)
    position = first_position + query
    whole_lse = gl.full([64], -float("inf"), gl.float32, by_row)
    if SINKS:
        whole_lse = gl.load(sink_ptr + head, mask=live, other=-float("inf")).to(gl.float32)
    origin = gl.full([64], -float("inf"), gl.float32, by_row)
    total = gl.zeros([64], gl.float32, by_row)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, mma)
    nothing = gl.zeros([64, TILE], gl.float32, mma)

    mbarrier.wait(k_full.index(0), 0)
    score = warpgroup_mma(q_half, k_smem.index(0).permute((1, 0)), nothing, use_acc=False)
    barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    score = _masked(score, first_tile, first_position, position, window, TILE, WINDOWED, 128 // GROUP - 1, mma)
    weight, decay, origin = _step(score, origin, to_log2)
    total = gl.convert_layout(_row_sum(weight), by_row)
    w = gl.convert_layout(weight.to(dtype), weights)
    for j in range(1, tiles):
        slot = j % STAGES
        before = (j - 1) % STAGES
        mbarrier.wait(k_full.index(slot), (j // STAGES) & 1)
        score_later = warpgroup_mma(q_half, k_smem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
        acc_later = warpgroup_mma(w, v_smem.index(before), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score_later])
        barrier()
        mbarrier.arrive(k_empty.index(slot), count=1)
        tile = first_tile + j
        ends = tile % (SPLIT // TILE) == 0  # the tile before was its split's last
        old_origin = origin
        old_total = total
        origin = gl.where(ends, -float("inf"), origin)
        total = gl.where(ends, 0.0, total)
        score = _masked(score, tile, first_position, position, window, TILE, WINDOWED, 128 // GROUP - 1, mma)
        weight, decay, origin = _step(score, origin, to_log2)
        total = gl.fma(total, decay, gl.convert_layout(_row_sum(weight), by_row))
        w_next = weight.to(dtype)
        # Complete long since. But a loop must stand here, or ptxas moves the wait for acc in front of the softmax, which is to hide it.
        mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[acc_later])
        barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        if ends:
            part, part_lse = _finish(acc, old_origin, old_total)
            whole, whole_lse = _join(whole_at.load(mma), whole_lse, part, part_lse)
            whole_at.store(whole)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, mma)
        acc = acc * decay[:, None]
        w = gl.convert_layout(w_next, weights)

    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    # Rows behind the sequence's end are another's, and may hold NaN.
    if ((first_tile + tiles) * TILE > kv_end) & (kv_row + kv_end < tokens):
        n_v = (first_tile + tiles - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, wide))
        v = v_smem.index(last).load(wide)
        v_smem.index(last).store(gl.where((n_v < kv_end)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        barrier()
    acc = warpgroup_mma(w, v_smem.index(last), acc)
    part, part_lse = _finish(acc, origin, total)
    whole, whole_lse = _join(whole_at.load(mma), whole_lse, part, part_lse)
    row = (first_row + query).to(gl.int64)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, mma))
    gl.store(out_ptr + ((row * HEADS + head) * HEAD_DIM)[:, None] + d[None, :], whole.to(dtype), mask=live[:, None])
    gl.store(lse_ptr + head * tokens + row, whole_lse, mask=live)


@gluon.jit(do_not_specialize=("tokens", "window"))
def _attention_hopper_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, segment_ptr, tokens, stride_qt, stride_qh, head_columns, to_log2, window,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Order: that of `_attention_kernel`. Two warp groups of 64 rows each and one that loads; programs (query block, KV head, segment)."""
    first_row, rows, first_position, kv_row, start, end, kv_end = _geometry(segment_ptr, window, 128 // GROUP, WINDOWED)
    if rows > 0 and first_position >= 0:
        dtype: gl.constexpr = k_desc.dtype
        kv_head = gl.program_id(1)
        first_tile = start // TILE
        tiles = (end + TILE - 1) // TILE - first_tile
        q_smem = gl.allocate_shared_memory(
            dtype, [2, 64, HEAD_DIM], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        )
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], k_desc.layout)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], v_desc.layout)
        parked = gl.allocate_shared_memory(gl.float32, [2, 64, HEAD_DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=2)
        fence_async_shared()
        row = kv_row + first_tile * TILE
        gl.warp_specialize([
            (_consume, (0, q_ptr, out_ptr, lse_ptr, sink_ptr, q_smem, k_smem, v_smem, parked, k_full, k_empty, v_full, v_empty,
            first_row, rows, first_position, kv_row, first_tile, tiles, kv_end, kv_head, tokens, stride_qt, stride_qh, to_log2,
            window,
            HEADS, GROUP, HEAD_DIM, TILE, SPLIT, STAGES, WINDOWED, SINKS)),
            (_consume, (1, q_ptr, out_ptr, lse_ptr, sink_ptr, q_smem, k_smem, v_smem, parked, k_full, k_empty, v_full, v_empty,
            first_row, rows, first_position, kv_row, first_tile, tiles, kv_end, kv_head, tokens, stride_qt, stride_qh, to_log2,
            window,
            HEADS, GROUP, HEAD_DIM, TILE, SPLIT, STAGES, WINDOWED, SINKS)),
            (_produce, (k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, row, kv_head * head_columns, tiles,
                        TILE, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip


def fits(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scores: Scores) -> bool:
    """Whether the kernel can load these operands: half precision, head dim 128, rows of heads that a tensor descriptor describes."""
    if q_THD.element_size() != 2 or q_THD.shape[-1] != 128 or q_THD.shape[-2] // k_THD.shape[-2] > _ROWS:
        return False
    if scores.soft_cap is not None or not q_THD.numel() or k_THD.stride(1) != v_THD.stride(1):
        return False
    return q_THD.stride(2) == 1 and all(
        x.stride(2) == 1 and x.stride(1) % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (k_THD, v_THD)
    )


def dense(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    segments_S6: torch.Tensor,
    longest: int,
    scores: Scores,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in q's dtype, lse float32 [Hq, T]). Every row must see a key, and every key stand in front of its rows' end."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_THD.shape[1]
    group = heads // kv_heads
    tile = kv_tile(head_dim, q_THD.dtype)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=q_THD.device)
    _attention_hopper_kernel[(triton.cdiv(longest, _ROWS // group), kv_heads, len(segments_S6))](
        q_THD,
        _descriptor(k_THD, tile),
        _descriptor(v_THD, tile),
        out_THD,
        lse_HT,
        lse_HT if sinks_H is None else sinks_H,
        segments_S6,
        tokens,
        q_THD.stride(0),
        q_THD.stride(1),
        k_THD.stride(1),
        scores.scale * LOG2_E,
        scores.window or 0,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        TILE=tile,
        SPLIT=SPLIT,
        STAGES=_STAGES,
        WINDOWED=scores.window is not None,
        SINKS=sinks_H is not None,
        num_warps=4,
        maxnreg=168,  # of twelve warps; the two groups that compute take 240 each from the one that loads
        enable_fp_fusion=False,
    )
    return out_THD, lse_HT


def _descriptor(x_THD: torch.Tensor, tile: int) -> TensorDescriptor:
    """Tiles of one head: `tile` tokens by head dim, at (token, head * stride)."""
    tokens, heads, head_dim = x_THD.shape
    columns = (heads - 1) * x_THD.stride(1) + head_dim
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x_THD, [tokens, columns], [x_THD.stride(0), 1], [tile, head_dim], layout)
