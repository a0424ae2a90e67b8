"""Triton kernels of `logprob`: tiles of the vocabulary, their fold, and the subtraction.

The fold of a row's tiles is one order, in two places: `_fold_kernel` reads the tiles of all ranks, `_rows_kernel` folds each as it comes
from the logits, which spares their way through memory. A GPU test shows that no bit depends on which of the two ran.
"""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, exp_below, log, widen
from rlmismatch.kernels.logprob.partials import WIDTH, tile_count

# Rows and tiles (tiles kernel), rows (fold), rows and columns (subtraction) of one program. Constants: see the kernels.
_TILE_ROWS, _TILES, _TILE_WARPS = (16, 32, 4) if INTERPRETED.value else (1, 32, 1)
_FOLD_ROWS = 16 if INTERPRETED.value else 1
_LANES = 64
_OUT_ROWS, _OUT_COLUMNS, _OUT_STEPS = (16, 4096, 1) if INTERPRETED.value else (1, 2048, 8)
_FILLED = 264  # rows from which one program a row fills an H200; below, a row is spread over many


def rows(logits_TV: torch.Tensor, targets_T: torch.Tensor, *, columns: int, temperature: float) -> torch.Tensor:
    """Log-prob of the target among the first `columns` columns, float32 [T]; NaN for one outside them."""
    logits = widen(logits_TV)
    count = logits.shape[0]
    logp_T = torch.empty(count, dtype=torch.float32, device=logits.device)
    if count < _FILLED or INTERPRETED.value:
        max_T, logsum_T = normaliser(*tiles(logits_TV, columns=columns, temperature=temperature))
        if count:
            _pick_kernel[(triton.cdiv(count, 128),)](
                logits,
                targets_T,
                max_T,
                logsum_T,
                logp_T,
                count,
                columns,
                *logits.stride(),
                temperature,
                SCALED=temperature != 1.0,
                BLOCK_T=128,
                enable_fp_fusion=False,
            )
        return logp_T
    fused_rows(logits, targets_T, logp_T, columns=columns, temperature=temperature)
    return logp_T


def fused_rows(
    logits: torch.Tensor,
    targets_T: torch.Tensor,
    logp_T: torch.Tensor,
    *,
    columns: int,
    temperature: float,
) -> None:
    """`rows` in one launch, into `logp_T`."""
    _rows_kernel[(logits.shape[0],)](
        logits,
        targets_T,
        logp_T,
        columns,
        *logits.stride(),
        temperature,
        SCALED=temperature != 1.0,
        DENSE=logits.stride(1) == 1,
        WIDTH=WIDTH,
        LANES=_LANES,
        num_warps=8,
        enable_fp_fusion=False,
    )


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
            num_warps=_TILE_WARPS,
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
        _fold_kernel[(triton.cdiv(rows, _FOLD_ROWS),)](
            max_TJ.contiguous(),
            sumexp_TJ.contiguous(),
            max_T,
            logsum_T,
            rows,
            COUNT=count,
            LANES=_LANES,
            BLOCK_T=_FOLD_ROWS,
            enable_fp_fusion=False,
        )
    return max_T, logsum_T


def selected(target_T: torch.Tensor, max_T: torch.Tensor, logsum_T: torch.Tensor) -> torch.Tensor:
    """float32 [T]; two IEEE subtractions, the very ones of the kernels below."""
    return (target_T - max_T) - logsum_T


def log_softmax(logits_TV: torch.Tensor, max_T: torch.Tensor, logsum_T: torch.Tensor, *, columns: int, temperature: float) -> torch.Tensor:
    """float32 [T, columns]."""
    rows = logits_TV.shape[0]
    logp_TV = torch.empty((rows, columns), dtype=torch.float32, device=logits_TV.device)
    if rows:
        logits = widen(logits_TV)
        grid = (triton.cdiv(rows, _OUT_ROWS), triton.cdiv(columns, _OUT_COLUMNS * _OUT_STEPS))
        _log_softmax_kernel[grid](
            logits,
            max_T,
            logsum_T,
            logp_TV,
            rows,
            columns,
            *logits.stride(),
            temperature,
            SCALED=temperature != 1.0,
            BLOCK_T=_OUT_ROWS,
            BLOCK_V=_OUT_COLUMNS,
            STEPS=_OUT_STEPS,
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
    largest, sumexp = _tile(x, temperature, SCALED)
    live = (t < rows) & (j < count)
    tl.store(max_ptr + t64 * count + j, largest, mask=live)
    tl.store(sumexp_ptr + t64 * count + j, sumexp, mask=live)


@triton.jit
def _tile(x, temperature, SCALED: tl.constexpr):
    """(max, sum of exp(x - max)) of every row of logits."""
    if SCALED:  # a division by 1 costs more than all the rest, and changes nothing
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    largest = tl.max(x, axis=1)
    # A tile of -inf alone holds no probability: exp(-inf - 0), not exp(-inf + inf).
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, tl.sum(exp_below(x - shift[:, None]), axis=1)


@triton.jit
def _gather_kernel(logits_ptr, local_ptr, owns_ptr, target_ptr, rows, stride_t, stride_v, temperature, BLOCK_T: tl.constexpr):
    """Order: none, one copy and one division a row."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    owns = tl.load(owns_ptr + t, mask=t < rows, other=0).to(tl.int1)
    local = tl.load(local_ptr + t, mask=t < rows, other=0)
    x = tl.load(logits_ptr + t.to(tl.int64) * stride_t + local * stride_v, mask=owns, other=float("nan")).to(tl.float32)
    tl.store(target_ptr + t, tl.div_rn(x, tl.zeros_like(x) + temperature), mask=t < rows)


@triton.jit
def _join(largest, total, tile_max, sumexp):
    """A lane's running (max, sum of exp(x - max)), and the next tile of it. -inf holds no probability: exp(-inf - 0)."""
    new = tl.maximum(largest, tile_max)
    shift = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.fma(sumexp, exp_below(tile_max - shift), total * exp_below(largest - shift))


@triton.jit
def _lanes_done(lane_max, lane_total, BLOCK_T: tl.constexpr, LANES: tl.constexpr):
    """(M, L) [BLOCK_T]."""
    largest = tl.max(lane_max, axis=1)
    total = _pairwise(lane_total * exp_below(lane_max - largest[:, None]), BLOCK_T, LANES)
    return largest, log(total.reshape((BLOCK_T,)))


@triton.jit
def _pairwise(x, BLOCK_T: tl.constexpr, LANES: tl.constexpr):
    """[BLOCK_T, 1]: neighbours are added, then pairs of pairs: a sum of two has no order that a layout could change."""
    return x if LANES == 1 else _pairwise(tl.sum(x.reshape((BLOCK_T, LANES // 2, 2)), axis=2), BLOCK_T, LANES // 2)


@triton.jit
def _fold_kernel(max_ptr, sumexp_ptr, out_max_ptr, logsum_ptr, rows, COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr):
    """Order: tile j goes to lane j % LANES, each lane ascending (`_join`); then the pairwise tree over the lanes."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows beyond the edge repeat the last one and are never stored.
    base = tl.minimum(t, rows - 1).to(tl.int64)[:, None] * COUNT
    largest = tl.full((BLOCK_T, LANES), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
    for first in range(0, COUNT, LANES):
        j = first + tl.arange(0, LANES)
        mask = (j < COUNT)[None, :]
        tile_max = tl.load(max_ptr + base + j[None, :], mask=mask, other=-float("inf"))
        sumexp = tl.load(sumexp_ptr + base + j[None, :], mask=mask, other=0.0)
        largest, total = _join(largest, total, tile_max, sumexp)
    row_max, logsum = _lanes_done(largest, total, BLOCK_T, LANES)
    tl.store(out_max_ptr + t, row_max, mask=t < rows)
    tl.store(logsum_ptr + t, logsum, mask=t < rows)


@triton.jit
def _rows_kernel(
    logits_ptr,
    target_ptr,
    logp_ptr,
    columns,
    stride_t,
    stride_v,
    temperature,
    SCALED: tl.constexpr,
    DENSE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Order: a tile as in `_tiles_kernel`, the tiles of a row as in `_fold_kernel`. One row a program."""
    t = tl.program_id(0).to(tl.int64)
    logits_ptr += t * stride_t
    v = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full((LANES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    whole = columns // (LANES * WIDTH) * (LANES * WIDTH)
    for first in range(0, whole, LANES * WIDTH):
        column = first + v if DENSE else (first + v).to(tl.int64) * stride_v
        x = tl.load(logits_ptr + column).to(tl.float32)
        tile_max, sumexp = _tile(x, temperature, SCALED)
        largest, total = _join(largest, total, tile_max, sumexp)
    if whole < columns:
        column = whole + v if DENSE else (whole + v).to(tl.int64) * stride_v
        x = tl.load(logits_ptr + column, mask=whole + v < columns, other=-float("inf")).to(tl.float32)
        tile_max, sumexp = _tile(x, temperature, SCALED)
        largest, total = _join(largest, total, tile_max, sumexp)
    row_max, logsum = _lanes_done(largest[None, :], total[None, :], 1, LANES)
    target = tl.load(target_ptr + t + tl.arange(0, 1)).to(tl.int64)
    inside = (target >= 0) & (target < columns)
    x = tl.load(logits_ptr + target * stride_v, mask=inside, other=float("nan")).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    tl.store(logp_ptr + t + tl.arange(0, 1), (x - row_max) - logsum)


@triton.jit
def _pick_kernel(
    logits_ptr,
    target_ptr,
    max_ptr,
    logsum_ptr,
    logp_ptr,
    rows,
    columns,
    stride_t,
    stride_v,
    temperature,
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Order: (x - M) - L at the target."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < rows
    target = tl.load(target_ptr + t, mask=live, other=-1).to(tl.int64)
    inside = (target >= 0) & (target < columns)
    x = tl.load(logits_ptr + t.to(tl.int64) * stride_t + target * stride_v, mask=inside, other=float("nan")).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    largest = tl.load(max_ptr + t, mask=live, other=0.0)
    logsum = tl.load(logsum_ptr + t, mask=live, other=0.0)
    tl.store(logp_ptr + t, (x - largest) - logsum, mask=live)


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
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Order: (x - M) - L."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    largest = tl.load(max_ptr + t, mask=t < rows, other=0.0)
    logsum = tl.load(logsum_ptr + t, mask=t < rows, other=0.0)
    t64 = t.to(tl.int64)[:, None]
    for step in range(STEPS):
        v = (tl.program_id(1) * STEPS + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = (t < rows)[:, None] & (v < columns)[None, :]
        x = tl.load(logits_ptr + t64 * stride_t + v.to(tl.int64)[None, :] * stride_v, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.zeros_like(x) + temperature)
        tl.store(logp_ptr + t64 * columns + v[None, :], (x - largest[:, None]) - logsum[:, None], mask=mask)
