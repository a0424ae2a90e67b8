"""The steps of the fold, for every Triton kernel that takes them: one online-softmax step, the end of a split, the merge of two partials.

Written with explicit fused multiply-adds and unfused products, so that no compiler chooses where one rounding replaces two.
"""

import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import exp, log

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def step(score, largest, to_log2):
    """(weights in float32, the state's decay, the new maximum) of one tile of scores [M, N]; 2^(score * to_log2) is e^(scaled score).

    A row that has seen nothing keeps the maximum -inf; its weights are 0 and its decay is 0.
    """
    new_largest = tl.maximum(largest, tl.max(score, axis=1))
    origin = tl.where(new_largest == -float("inf"), 0.0, new_largest) * to_log2
    weight = tl.exp2(tl.fma(score, to_log2 + tl.zeros_like(score), tl.zeros_like(score) - origin[:, None]))
    decay = tl.exp2(tl.fma(largest, to_log2 + tl.zeros_like(largest), -origin))
    return weight, decay, new_largest


@triton.jit
def finish(acc, largest, total, to_log2):
    """The partial (out, natural lse) of a state; (0, -inf) of a fresh one."""
    empty = total == 0.0
    out = acc * tl.div_rn(tl.zeros_like(total) + 1.0, tl.where(empty, 1.0, total))[:, None]
    origin = tl.where(empty, 0.0, largest) * to_log2
    lse = tl.fma(origin, tl.zeros_like(origin) + LN_2, log(tl.where(empty, 1.0, total)))
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
    out = tl.fma(out_b, tl.div_rn(share_b, safe)[:, None] + tl.zeros_like(out_b), out_a * tl.div_rn(share_a, safe)[:, None])
    return out, tl.where(total == 0.0, -float("inf"), origin + log(safe))
