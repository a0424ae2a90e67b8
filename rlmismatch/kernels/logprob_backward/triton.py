"""Triton kernels of `logprob_backward`: the gradient of the logits, tiles of the entropy, and their fold."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, exp, exp_below, log, storage, widen
from rlmismatch.kernels.logprob.partials import WIDTH, tile_count

# Rows and columns (gradient), rows and tiles (entropy tiles), rows (fold) of one program. Constants: see the kernels.
_GRAD_ROWS, _GRAD_COLUMNS, _GRAD_STEPS = (16, 4096, 1) if INTERPRETED.value else (1, 2048, 8)
_TILE_ROWS, _TILES = (16, 32) if INTERPRETED.value else (1, 32)
_FOLD_ROWS = 16 if INTERPRETED.value else 1
_FOLD_LANES = 1024


def dlogits(
    logits_TV: torch.Tensor,
    local_T: torch.Tensor,
    grad_T: torch.Tensor,
    max_T: torch.Tensor,
    logsum_T: torch.Tensor,
    *,
    columns: int,
    temperature: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """[T, V] in `out_dtype`, rounded once; 0 in columns from `columns` on."""
    rows, width = logits_TV.shape
    grad_TV = torch.empty((rows, width), dtype=storage(out_dtype), device=logits_TV.device)
    if grad_TV.numel():
        logits = widen(logits_TV)
        grid = (triton.cdiv(rows, _GRAD_ROWS), triton.cdiv(width, _GRAD_COLUMNS * _GRAD_STEPS))
        _dlogits_kernel[grid](
            logits,
            local_T,
            grad_T,
            max_T,
            logsum_T,
            grad_TV,
            rows,
            width,
            columns,
            *logits.stride(),
            temperature,
            SCALED=temperature != 1.0,
            BLOCK_T=_GRAD_ROWS,
            BLOCK_V=_GRAD_COLUMNS,
            STEPS=_GRAD_STEPS,
            enable_fp_fusion=False,
        )
    return grad_TV.to(out_dtype)


def entropy_tiles(logits_TV: torch.Tensor, *, columns: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(max, sum of e, sum of (x - max) * e) of every tile of the first `columns` columns: float32 [T, J] each."""
    rows, count = logits_TV.shape[0], tile_count(columns)
    max_TJ, sumexp_TJ, weighted_TJ = (torch.empty((rows, count), dtype=torch.float32, device=logits_TV.device) for _ in range(3))
    if max_TJ.numel():
        logits = widen(logits_TV)
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(count, _TILES))
        _entropy_tiles_kernel[grid](
            logits,
            max_TJ,
            sumexp_TJ,
            weighted_TJ,
            rows,
            count,
            columns,
            *logits.stride(),
            temperature,
            SCALED=temperature != 1.0,
            WIDTH=WIDTH,
            BLOCK_T=_TILE_ROWS,
            BLOCK_J=_TILES,
            enable_fp_fusion=False,
        )
    return max_TJ, sumexp_TJ, weighted_TJ


def fold_entropy(max_TJ: torch.Tensor, sumexp_TJ: torch.Tensor, weighted_TJ: torch.Tensor) -> torch.Tensor:
    """float32 [T] from all tiles in global order."""
    rows, count = max_TJ.shape
    out_T = torch.empty(rows, dtype=torch.float32, device=max_TJ.device)
    if rows:
        _fold_entropy_kernel[(triton.cdiv(rows, _FOLD_ROWS),)](
            max_TJ.contiguous(),
            sumexp_TJ.contiguous(),
            weighted_TJ.contiguous(),
            out_T,
            rows,
            COUNT=count,
            LANES=min(_FOLD_LANES, triton.next_power_of_2(count)),
            BLOCK_T=_FOLD_ROWS,
            enable_fp_fusion=False,
        )
    return out_T


@triton.jit
def _dlogits_kernel(
    logits_ptr,
    local_ptr,
    grad_ptr,
    max_ptr,
    logsum_ptr,
    out_ptr,
    rows,
    width,
    columns,
    stride_t,
    stride_v,
    temperature,
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Order: g * ((onehot - exp((x - M) - L)) / temperature); every element on its own."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t < rows
    largest = tl.load(max_ptr + t, mask=row, other=0.0)[:, None]
    logsum = tl.load(logsum_ptr + t, mask=row, other=0.0)[:, None]
    grad = tl.load(grad_ptr + t, mask=row, other=0.0)[:, None]
    local = tl.load(local_ptr + t, mask=row, other=-1)[:, None]
    t64 = t.to(tl.int64)[:, None]
    for step in range(STEPS):
        v = ((tl.program_id(1) * STEPS + step) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
        real = row[:, None] & (v < columns)
        x = tl.load(logits_ptr + t64 * stride_t + v.to(tl.int64) * stride_v, mask=real, other=-float("inf")).to(tl.float32)
        if SCALED:  # a division by 1 costs more than all the rest, and changes nothing
            x = tl.div_rn(x, tl.zeros_like(x) + temperature)
        out = tl.where(v == local, 1.0, 0.0) - exp_below((x - largest) - logsum)
        if SCALED:
            out = tl.div_rn(out, tl.zeros_like(out) + temperature)
        tl.store(out_ptr + t64 * width + v, tl.where(real, grad * out, 0.0), mask=row[:, None] & (v < width))


@triton.jit
def _entropy_tiles_kernel(
    logits_ptr,
    max_ptr,
    sumexp_ptr,
    weighted_ptr,
    rows,
    count,
    columns,
    stride_t,
    stride_v,
    temperature,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Order: the WIDTH terms of one tile by tl.sum's tree, the same for every tile of every row and shard."""
    i = tl.arange(0, BLOCK_T * BLOCK_J)
    t = tl.program_id(0) * BLOCK_T + i // BLOCK_J
    j = tl.program_id(1) * BLOCK_J + i % BLOCK_J
    v = j[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (t < rows)[:, None] & (v < columns)
    t64 = t.to(tl.int64)
    x = tl.load(logits_ptr + t64[:, None] * stride_t + v.to(tl.int64) * stride_v, mask=mask, other=-float("inf")).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    largest = tl.max(x, axis=1)
    below = x - tl.where(largest == -float("inf"), 0.0, largest)[:, None]
    e = exp_below(below)
    # A column of probability 0 adds 0: -inf * 0 is not a number.
    weighted = tl.sum(tl.where(below == -float("inf"), 0.0, below) * e, axis=1)
    live = (t < rows) & (j < count)
    tl.store(max_ptr + t64 * count + j, largest, mask=live)
    tl.store(sumexp_ptr + t64 * count + j, tl.sum(e, axis=1), mask=live)
    tl.store(weighted_ptr + t64 * count + j, weighted, mask=live)


@triton.jit
def _fold_entropy_kernel(max_ptr, sumexp_ptr, weighted_ptr, out_ptr, rows, COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr):
    """Order: tile j goes to lane j % LANES, each lane ascending; then the lanes by tl.sum's tree: a function of COUNT alone."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, LANES)
    # Rows beyond the edge repeat the last one and are never stored.
    base = tl.minimum(t, rows - 1).to(tl.int64)[:, None] * COUNT
    lane_max = tl.full((BLOCK_T, LANES), -float("inf"), dtype=tl.float32)
    for first in range(0, COUNT, LANES):
        j = first + lane
        lane_max = tl.maximum(lane_max, tl.load(max_ptr + base + j[None, :], mask=(j < COUNT)[None, :], other=-float("inf")))
    largest = tl.max(lane_max, axis=1)
    total = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
    for first in range(0, COUNT, LANES):
        j = first + lane
        mask = (j < COUNT)[None, :]
        below = tl.load(max_ptr + base + j[None, :], mask=mask, other=-float("inf")) - largest[:, None]
        sumexp = tl.load(sumexp_ptr + base + j[None, :], mask=mask, other=0.0)
        inner = tl.load(weighted_ptr + base + j[None, :], mask=mask, other=0.0)
        scale = exp(below)
        total = tl.fma(sumexp, scale, total)
        weighted = tl.fma(tl.fma(tl.where(below == -float("inf"), 0.0, below), sumexp, inner), scale, weighted)
    s = tl.sum(total, axis=1)
    tl.store(out_ptr + t, log(s) - tl.div_rn(tl.sum(weighted, axis=1), s), mask=t < rows)
