"""Triton kernels of `logprob`: tiles of the vocabulary, their fold, and the subtraction."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, exp, exp_below, log, widen
from rlmismatch.kernels.logprob.partials import WIDTH, tile_count

# Rows and tiles (tiles kernel), rows (fold), rows and columns (subtraction) of one program. Constants: see the kernels.
_TILE_ROWS, _TILES = (16, 32) if INTERPRETED.value else (1, 32)
_FOLD_ROWS = 16 if INTERPRETED.value else 1
_FOLD_LANES = 1024
_OUT_ROWS, _OUT_COLUMNS = (16, 4096) if INTERPRETED.value else (1, 2048)


def tiles(logits_TV: torch.Tensor, *, columns: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, sum of exp(x - max)) of every tile of the first `columns` columns: float32 [T, J] each."""
    rows, count = logits_TV.shape[0], tile_count(columns)
    max_TJ, sumexp_TJ = (torch.empty((rows, count), dtype=torch.float32, device=logits_TV.device) for _ in range(2))
    if max_TJ.numel():
        logits = widen(logits_TV)
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(count, _TILES))
        _tiles_kernel[grid](
            logits,
            max_TJ,
            sumexp_TJ,
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
    return max_TJ, sumexp_TJ


def gather(logits_TV: torch.Tensor, local_T: torch.Tensor, owns_T: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """The scaled logit at column `local_T` where owned, NaN elsewhere: float32 [T]."""
    target_T = torch.empty(owns_T.shape, dtype=torch.float32, device=logits_TV.device)
    rows = logits_TV.shape[0]
    if rows:
        logits = widen(logits_TV)
        _gather_kernel[(triton.cdiv(rows, 128),)](
            logits, local_T, owns_T, target_T, rows, *logits.stride(), temperature, BLOCK_T=128, enable_fp_fusion=False
        )
    return target_T


def normaliser(max_TJ: torch.Tensor, sumexp_TJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, L) of all tiles in global order, float32 [T] each."""
    rows, count = max_TJ.shape
    max_T, logsum_T = (torch.empty(rows, dtype=torch.float32, device=max_TJ.device) for _ in range(2))
    if rows:
        lanes = min(_FOLD_LANES, triton.next_power_of_2(count))
        _fold_kernel[(triton.cdiv(rows, _FOLD_ROWS),)](
            max_TJ.contiguous(),
            sumexp_TJ.contiguous(),
            max_T,
            logsum_T,
            rows,
            COUNT=count,
            LANES=lanes,
            BLOCK_T=_FOLD_ROWS,
            enable_fp_fusion=False,
        )
    return max_T, logsum_T


def selected(target_T: torch.Tensor, max_T: torch.Tensor, logsum_T: torch.Tensor) -> torch.Tensor:
    """float32 [T]; two IEEE subtractions, the very ones of `_log_softmax_kernel`."""
    return (target_T - max_T) - logsum_T


def log_softmax(logits_TV: torch.Tensor, max_T: torch.Tensor, logsum_T: torch.Tensor, *, columns: int, temperature: float) -> torch.Tensor:
    """float32 [T, columns]."""
    rows = logits_TV.shape[0]
    logp_TV = torch.empty((rows, columns), dtype=torch.float32, device=logits_TV.device)
    if rows:
        logits = widen(logits_TV)
        grid = (triton.cdiv(rows, _OUT_ROWS), triton.cdiv(columns, _OUT_COLUMNS))
        _log_softmax_kernel[grid](
            logits,
            max_T,
            logsum_T,
            logp_TV,
            rows,
            columns,
            *logits.stride(),
            temperature,
            BLOCK_T=_OUT_ROWS,
            BLOCK_V=_OUT_COLUMNS,
            enable_fp_fusion=False,
        )
    return logp_TV


@triton.jit
def _tiles_kernel(
    logits_ptr,
    max_ptr,
    sumexp_ptr,
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
    """Order: the WIDTH exponentials of one tile by tl.sum's tree, the same for every tile of every row and shard."""
    i = tl.arange(0, BLOCK_T * BLOCK_J)
    t = tl.program_id(0) * BLOCK_T + i // BLOCK_J
    j = tl.program_id(1) * BLOCK_J + i % BLOCK_J
    v = j[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = (t < rows)[:, None] & (v < columns)
    t64 = t.to(tl.int64)
    x = tl.load(logits_ptr + t64[:, None] * stride_t + v.to(tl.int64) * stride_v, mask=mask, other=-float("inf")).to(tl.float32)
    if SCALED:  # a division by 1 costs more than all the rest, and changes nothing
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    largest = tl.max(x, axis=1)
    # A tile of -inf alone holds no probability: exp(-inf - 0), not exp(-inf + inf).
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    sumexp = tl.sum(exp_below(x - shift[:, None]), axis=1)
    live = (t < rows) & (j < count)
    tl.store(max_ptr + t64 * count + j, largest, mask=live)
    tl.store(sumexp_ptr + t64 * count + j, sumexp, mask=live)


@triton.jit
def _gather_kernel(logits_ptr, local_ptr, owns_ptr, target_ptr, rows, stride_t, stride_v, temperature, BLOCK_T: tl.constexpr):
    """Order: none, one copy and one division a row."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    owns = tl.load(owns_ptr + t, mask=t < rows, other=0).to(tl.int1)
    local = tl.load(local_ptr + t, mask=t < rows, other=0)
    x = tl.load(logits_ptr + t.to(tl.int64) * stride_t + local * stride_v, mask=owns, other=float("nan")).to(tl.float32)
    tl.store(target_ptr + t, tl.div_rn(x, tl.zeros_like(x) + temperature), mask=t < rows)


@triton.jit
def _fold_kernel(max_ptr, sumexp_ptr, out_max_ptr, logsum_ptr, rows, COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr):
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
    for first in range(0, COUNT, LANES):
        j = first + lane
        mask = (j < COUNT)[None, :]
        tile_max = tl.load(max_ptr + base + j[None, :], mask=mask, other=-float("inf"))
        sumexp = tl.load(sumexp_ptr + base + j[None, :], mask=mask, other=0.0)
        total = tl.fma(sumexp, exp(tile_max - largest[:, None]), total)
    tl.store(out_max_ptr + t, largest, mask=t < rows)
    tl.store(logsum_ptr + t, log(tl.sum(total, axis=1)), mask=t < rows)


@triton.jit
def _log_softmax_kernel(
    logits_ptr,
    max_ptr,
    logsum_ptr,
    logp_ptr,
    rows,
    columns,
    stride_t,
    stride_v,
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Order: (x - M) - L."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (t < rows)[:, None] & (v < columns)[None, :]
    largest = tl.load(max_ptr + t, mask=t < rows, other=0.0)
    logsum = tl.load(logsum_ptr + t, mask=t < rows, other=0.0)
    t64 = t.to(tl.int64)[:, None]
    x = tl.load(logits_ptr + t64 * stride_t + v.to(tl.int64)[None, :] * stride_v, mask=mask, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    tl.store(logp_ptr + t64 * columns + v[None, :], (x - largest[:, None]) - logsum[:, None], mask=mask)
