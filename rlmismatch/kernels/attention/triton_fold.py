"""The steps of the fold, for every Triton kernel that takes them: one online-softmax step, the end of a split, the merge of two partials.

Written with explicit fused multiply-adds and unfused products, so that no compiler chooses where one rounding replaces two.
"""

import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import exp, log

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def step(score, origin, to_log2):
    """(weights in float32, the state's decay, the new origin) of one tile of scores [M, N]; 2^(score * to_log2) is e^(scaled score).

    The origin is the largest score so far, times to_log2; -inf where a row has seen nothing, and then its weights and decay are 0. It is
    kept rounded: where a tile does not raise it, the decay is 2^0 = 1 exactly, and the tile may as well not have been visited.
    """
    new_origin = tl.maximum(origin, tl.max(score, axis=1) * to_log2)
    safe = tl.where(new_origin == -float("inf"), 0.0, new_origin)
    weight = tl.exp2(tl.fma(score, to_log2, -safe[:, None]))
    decay = tl.exp2(origin - safe)
    return weight, decay, new_origin


@triton.jit
def row_sum(weight):
    """Sum of [M, N] over N = 32, 64 or 128, in one order for every layout of a tensor core's result.

    Columns 32 apart first, pairwise, then the eight of a block (one quad of lanes, in every such layout), then the four blocks, pairwise.
    Where blocks lie in other warps, which is what layouts differ in, only the last step crosses them.
    """
    M: tl.constexpr = weight.shape[0]
    if weight.shape[1] == 128:
        low, high = weight.reshape((M, 2, 64)).permute((0, 2, 1)).split()
        weight = low + high
    if weight.shape[1] == 64:
        low, high = weight.reshape((M, 2, 32)).permute((0, 2, 1)).split()
        weight = low + high
    blocks = tl.sum(weight.reshape((M, 4, 8)), axis=2)
    even, odd = blocks.reshape((M, 2, 2)).split()
    low, high = (even + odd).split()
    return low + high


@triton.jit
def finish(acc, origin, total):
    """The partial (out, natural lse) of a state; (0, -inf) of a fresh one."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    out = acc * tl.div_rn(1.0, safe)[:, None]
    lse = tl.fma(tl.where(empty, 0.0, origin), LN_2, log(safe))
    return out, tl.where(empty, -float("inf"), lse)


@triton.jit
def join(out_a, lse_a, out_b, lse_b):
    """Two partials as one, a before b. (0, -inf) on either side leaves the other's bits."""
    largest = tl.maximum(lse_a, lse_b)
    origin = tl.where(largest == -float("inf"), 0.0, largest)
    share_a = exp(lse_a - origin)
    share_b = exp(lse_b - origin)
    total = share_a + share_b
    safe = tl.where(total == 0.0, 1.0, total)
    out = tl.fma(out_b, tl.div_rn(share_b, safe)[:, None], out_a * tl.div_rn(share_a, safe)[:, None])
    return out, tl.where(total == 0.0, -float("inf"), origin + log(safe))
