"""Triton kernel that merges the partials of `attention`."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.attention.triton_fold import join
from rlmismatch.kernels.common.triton import INTERPRETED, storage, widen

_MERGE_ROWS = 64 if INTERPRETED.value else 4


def merge(
    out_JTHD: torch.Tensor, lse_JHT: torch.Tensor, sinks_H: torch.Tensor | None, *, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in `out_dtype`, lse float32 [Hq, T])."""
    splits, tokens, heads, head_dim = out_JTHD.shape
    out_JTHD, lse_JHT = out_JTHD.contiguous(), lse_JHT.contiguous()
    out_THD = torch.empty((tokens, heads, head_dim), dtype=storage(out_dtype), device=out_JTHD.device)
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=out_JTHD.device)
    if out_THD.numel():
        _attention_merge_kernel[(triton.cdiv(tokens * heads, _MERGE_ROWS),)](
            out_JTHD,
            lse_JHT,
            out_THD,
            lse_HT,
            None if sinks_H is None else widen(sinks_H),
            splits,
            tokens,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d(head_dim),
            BLOCK_R=_MERGE_ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_THD.to(out_dtype), lse_HT


def block_d(head_dim: int) -> int:
    """Columns of a tile that holds a head."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit(do_not_specialize=("splits", "tokens"))
def _attention_merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    splits,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Order: from (0, sink) or (0, -inf), the partials ascending."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = r % HEADS
    at_lse = head * tokens + r // HEADS
    live_R = r < tokens * HEADS
    column = tl.arange(0, BLOCK_D)
    at_out = r[:, None] * HEAD_DIM + column[None, :]
    mask = live_R[:, None] & (column < HEAD_DIM)[None, :]
    whole = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    whole_lse = tl.full((BLOCK_R,), -float("inf"), dtype=tl.float32)
    if sink_ptr is not None:
        whole_lse = tl.load(sink_ptr + head, mask=live_R, other=-float("inf")).to(tl.float32)
    # Eight partials are on their way at once: loading is all the time that a merge takes.
    for j in range(0, splits, 8):
        a, lse_a = _partial(part_ptr, part_lse_ptr, j, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        b, lse_b = _partial(part_ptr, part_lse_ptr, j + 1, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        c, lse_c = _partial(part_ptr, part_lse_ptr, j + 2, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        d, lse_d = _partial(part_ptr, part_lse_ptr, j + 3, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        e, lse_e = _partial(part_ptr, part_lse_ptr, j + 4, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        f, lse_f = _partial(part_ptr, part_lse_ptr, j + 5, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        g, lse_g = _partial(part_ptr, part_lse_ptr, j + 6, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        h, lse_h = _partial(part_ptr, part_lse_ptr, j + 7, splits, tokens * HEADS, HEAD_DIM, at_out, at_lse, mask, live_R)
        whole, whole_lse = join(whole, whole_lse, a, lse_a)
        whole, whole_lse = join(whole, whole_lse, b, lse_b)
        whole, whole_lse = join(whole, whole_lse, c, lse_c)
        whole, whole_lse = join(whole, whole_lse, d, lse_d)
        whole, whole_lse = join(whole, whole_lse, e, lse_e)
        whole, whole_lse = join(whole, whole_lse, f, lse_f)
        whole, whole_lse = join(whole, whole_lse, g, lse_g)
        whole, whole_lse = join(whole, whole_lse, h, lse_h)
    tl.store(out_ptr + at_out, whole.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + at_lse, whole_lse, mask=live_R)


@triton.jit
def _partial(part_ptr, part_lse_ptr, j, splits, rows, HEAD_DIM: tl.constexpr, at_out, at_lse, mask, live_R):
    """Partial j of the rows, (0, -inf) behind the last."""
    offset = tl.cast(j, tl.int64) * rows
    there_R = live_R & (tl.zeros_like(at_lse) + j < splits)
    part = tl.load(part_ptr + offset * HEAD_DIM + at_out, mask=mask & there_R[:, None], other=0.0)
    return part, tl.load(part_lse_ptr + offset + at_lse, mask=there_R, other=-float("inf"))
