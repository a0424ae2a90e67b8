"""The numbers of one drift: float64, nats, over all active tokens; intervals by a bootstrap over sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from rlmismatch.drift.align import AlignedScores, FloatN, IntN, Scores, align
from rlmismatch.drift.model import Drift, Growth, Interval, OracleError, PositionBucket, SequenceDrift, TokenDrift, UlpBin
from rlmismatch.tokens import Sequence

CLIP: Final = math.log(1.2)  # nats; PPO's usual clip range 1 +- 0.2, seen from its upper end
TIS_CAP: Final = 2.0  # truncation of importance weights
WORST_TOKENS: Final = 10
CONTEXT_TOKENS: Final = 8
POSITION_BUCKETS: Final = 8
OUTLIER_Z: Final = 3.5  # Iglewicz and Hoaglin's cut for robust z scores
OUTLIER_MIN_SEQUENCES: Final = 5  # a median absolute deviation of fewer says nothing


def summarise(aligned: AlignedScores, *, seed: int = 0, bootstrap: int = 200) -> Drift:
    """Every metric of the drift; a `Drift` without numbers when `aligned` is invalid.

    seed, bootstrap: the resamples of sequences for the 95 % intervals; no interval for one sequence or ``bootstrap=0``.
    k1, k2, k3 estimate KL(b || a) from tokens that b sampled, with log r = log p_a - log p_b = delta: k1 = -delta, k2 = delta^2 / 2,
    k3 = exp(delta) - 1 - delta (J. Schulman, "Approximating KL Divergence", 2020).
    """
    if aligned.invalid:
        return Drift(tokens=0, sequences=len(aligned.sequences), invalid=aligned.invalid)
    d_N, abs_N = aligned.delta_N, np.abs(aligned.delta_N)
    p50, p95, p99 = (float(q) for q in np.quantile(abs_N, (0.5, 0.95, 0.99)))
    resample = _Bootstrap(aligned, seed=seed, resamples=bootstrap)
    with np.errstate(over="ignore"):  # an infinite probability ratio is a true answer, and over every budget
        ratio_N, absolute_ratio_N = np.exp(d_N), np.exp(abs_N)
    return Drift(
        tokens=aligned.tokens,
        sequences=len(aligned.sequences),
        signed_mean=float(d_N.mean()),
        signed_mean_interval=resample.mean_interval(d_N),
        mean_abs=float(abs_N.mean()),
        mean_abs_interval=resample.mean_interval(abs_N),
        p50=p50,
        p95=p95,
        p99=p99,
        max=float(abs_N.max()),
        token_mult_prob_error=float(absolute_ratio_N.mean()),
        k1=float(-d_N.mean()),
        k2=float((d_N * d_N).mean() / 2),
        k3=float(_k3(d_N).mean()),
        bit_equal=int(bit_equal(aligned).sum()),
        clip_share=float((abs_N > CLIP).mean()),
        ess=_ess_share(d_N),
        tis_mean_weight=float(np.minimum(ratio_N, TIS_CAP).mean()),
        ulp_histogram=_ulp_histogram(aligned),
        growth=_growth(aligned, abs_N, resample),
        worst=_worst(aligned, abs_N),
        per_sequence=_per_sequence(aligned, abs_N),
    )


def against_oracle(
    scores: Scores, oracle: Scores, plain: Scores | None, sequences: Iterable[Sequence], *, seed: int = 0, bootstrap: int = 200
) -> OracleError:
    """The error of one side against the float64 oracle, and its ratio to the error of a plain forward in the model's dtype.

    plain: the scores of that forward; None leaves the ratio None with the reason. The ratio is of mean |delta|; a side that is off
    where the plain forward is exact has ratio inf.
    """
    seqs = tuple(sequences)
    error = summarise(align(scores, oracle, seqs), seed=seed, bootstrap=bootstrap)
    if plain is None:
        return OracleError(drift=error, why_no_ratio="no plain forward was run")
    own = summarise(align(plain, oracle, seqs), seed=seed, bootstrap=0)
    if error.mean_abs is None or own.mean_abs is None:
        reasons = error.invalid or own.invalid
        return OracleError(drift=error, plain_mean_abs=own.mean_abs, why_no_ratio=reasons[0].text)
    exact = 0.0 if error.mean_abs == 0.0 else math.inf
    ratio = error.mean_abs / own.mean_abs if own.mean_abs else exact
    return OracleError(drift=error, plain_mean_abs=own.mean_abs, ratio=ratio)


def bit_equal(aligned: AlignedScores) -> IntN:
    """1 where the float64 bits of a and b are the same, else 0; [N]. Minus zero is not zero here."""
    same_N: IntN = (aligned.a_N.view(np.int64) == aligned.b_N.view(np.int64)).astype(np.int64)
    return same_N


def ulp_distance(a_N: FloatN, b_N: FloatN) -> IntN:
    """How many float32 numbers lie between a and b, [N]; 0 is equal after rounding to float32."""
    distance_N: IntN = np.abs(_ordered(a_N) - _ordered(b_N))
    return distance_N


def _ordered(x_N: FloatN) -> IntN:
    # The bit patterns of floats of one sign are in order; mirroring the negative ones puts all of them in one order.
    bits_N = x_N.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits_N < 0, -(bits_N & 0x7FFFFFFF), bits_N)


def _k3(d_N: FloatN) -> FloatN:
    small_N = np.clip(d_N, -1e-3, 1e-3)
    series_N = small_N * small_N * (1 / 2 + small_N / 6 + small_N * small_N / 24 + small_N**3 / 120)
    with np.errstate(over="ignore"):
        return np.where(np.abs(d_N) < 1e-3, series_N, np.expm1(d_N) - d_N)


def _ess_share(d_N: FloatN) -> float:
    w_N = np.exp(d_N - d_N.max())  # the scale cancels, and without it a large delta overflows
    return float(w_N.sum() ** 2 / (w_N * w_N).sum() / w_N.size)


def _ulp_histogram(aligned: AlignedScores) -> tuple[UlpBin, ...]:
    distance_N = ulp_distance(aligned.a_N, aligned.b_N)
    # Bin 0 is zero; bin i >= 1 holds 2^(i-1) .. 2^i - 1.
    bin_N = np.where(distance_N == 0, 0, np.floor(np.log2(np.maximum(distance_N, 1))).astype(np.int64) + 1)
    counts = np.bincount(bin_N)
    return tuple(UlpBin(low=2 ** (i - 1) if i else 0, high=2**i - 1, tokens=int(n)) for i, n in enumerate(counts))


def _growth(aligned: AlignedScores, abs_N: FloatN, resample: _Bootstrap) -> Growth:
    length = int(aligned.position_N.max()) + 1
    edges = np.unique(np.linspace(0, length, min(POSITION_BUCKETS, length) + 1).round().astype(np.int64))
    buckets = []
    for start, stop in itertools.pairwise(edges):
        inside_N = (aligned.position_N >= start) & (aligned.position_N < stop)
        n = int(inside_N.sum())
        buckets.append(PositionBucket(start=int(start), stop=int(stop), tokens=n, mean_abs=float(abs_N[inside_N].mean()) if n else None))
    slope, interval = resample.slope(aligned.position_N.astype(np.float64) / 1000, abs_N)
    return Growth(buckets=tuple(buckets), slope=slope, slope_interval=interval)


def _worst(aligned: AlignedScores, abs_N: FloatN) -> tuple[TokenDrift, ...]:
    out = []
    for n in np.argsort(-abs_N, kind="stable")[:WORST_TOKENS]:
        if abs_N[n] == 0.0:
            break
        s = aligned.sequences[aligned.sequence_N[n]]
        context = int(aligned.context_N[n])
        out.append(
            TokenDrift(
                sequence=s.id,
                position=int(aligned.position_N[n]),
                context_length=context,
                token=int(aligned.token_N[n]),
                a=float(aligned.a_N[n]),
                b=float(aligned.b_N[n]),
                delta=float(aligned.delta_N[n]),
                context_ids=s.token_ids[max(0, context - CONTEXT_TOKENS) : context],
            )
        )
    return tuple(out)


def _per_sequence(aligned: AlignedScores, abs_N: FloatN) -> tuple[SequenceDrift, ...]:
    size = len(aligned.sequences)
    index_N = aligned.sequence_N
    n_S = np.bincount(index_N, minlength=size)
    mean_abs_S = np.bincount(index_N, abs_N, size) / n_S
    signed_S = np.bincount(index_N, aligned.delta_N, size) / n_S
    equal_S = np.bincount(index_N, bit_equal(aligned), size)
    max_S = np.zeros(size)
    np.maximum.at(max_S, index_N, abs_N)
    z_S = _robust_z(mean_abs_S) if size >= OUTLIER_MIN_SEQUENCES else None
    return tuple(
        SequenceDrift(
            sequence=s.id,
            tokens=int(n_S[i]),
            signed_mean=float(signed_S[i]),
            mean_abs=float(mean_abs_S[i]),
            max_abs=float(max_S[i]),
            bit_equal=int(equal_S[i]),
            robust_z=None if z_S is None else float(z_S[i]),
            outlier=z_S is not None and bool(z_S[i] > OUTLIER_Z),
        )
        for i, s in enumerate(aligned.sequences)
    )


def _robust_z(x_S: FloatN) -> FloatN:
    centred_S = x_S - np.median(x_S)
    scale = 1.4826 * float(np.median(np.abs(centred_S)))
    if scale == 0.0:  # more than half are equal: any other value is infinitely far out
        return np.where(centred_S == 0.0, 0.0, np.copysign(np.inf, centred_S))
    return centred_S / scale


class _Bootstrap:
    """Resamples whole sequences: tokens of one sequence share their drift, so tokens are no independent draws."""

    def __init__(self, aligned: AlignedScores, *, seed: int, resamples: int) -> None:
        size = len(aligned.sequences)
        self._index_N, self._size = aligned.sequence_N, size
        rng = np.random.default_rng(seed)
        # [B, S]: how often each sequence is drawn in each resample
        self._draws_BS = rng.multinomial(size, np.full(size, 1 / size), size=resamples) if size > 1 and resamples else None
        self._tokens_S = np.bincount(aligned.sequence_N, minlength=size).astype(np.float64)

    def _sums(self, x_N: FloatN) -> FloatN:
        return np.bincount(self._index_N, x_N, self._size).astype(np.float64)

    def mean_interval(self, x_N: FloatN) -> Interval | None:
        if self._draws_BS is None:
            return None
        return _interval((self._draws_BS @ self._sums(x_N)) / (self._draws_BS @ self._tokens_S))

    def slope(self, x_N: FloatN, y_N: FloatN) -> tuple[float | None, Interval | None]:
        """Least-squares slope of y on x, and its interval over the resamples that have one."""
        x_N = x_N - x_N.mean()  # the slope is the same, the sums of squares cancel less
        sums = np.stack([self._tokens_S, *(self._sums(v) for v in (x_N, y_N, x_N * x_N, x_N * y_N))])  # [5, S]
        slope = float(_slopes(sums.sum(axis=1)[:, None])[0])
        if not math.isfinite(slope):
            return None, None
        if self._draws_BS is None:
            return slope, None
        slopes_B = _slopes(sums @ self._draws_BS.T)
        return slope, _interval(slopes_B[np.isfinite(slopes_B)])


def _slopes(sums: FloatN) -> FloatN:
    n, x, y, xx, xy = sums
    spread = n * xx - x * x
    some = spread > 1e-9 * n * xx  # all positions equal leaves rounding noise here, and no slope
    return np.where(some, (n * xy - x * y) / np.where(some, spread, 1.0), np.nan)


def _interval(values_B: FloatN) -> Interval | None:
    if not values_B.size:
        return None
    low, high = np.quantile(values_B, (0.025, 0.975))
    return Interval(low=float(low), high=float(high))
