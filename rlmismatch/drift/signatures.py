"""Signatures of known faults in the numbers. A hint points at an axis and decides nothing; plain bf16 noise gives none."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from rlmismatch.drift.align import AlignedScores, FloatN
from rlmismatch.drift.model import Hint, HintName
from rlmismatch.drift.summary import OUTLIER_MIN_SEQUENCES, bit_equal

MIN_TOKENS: Final = 16  # fewer tokens show no pattern
LOG_K: Final = (2, 3, 4, 8)
LOG_K_SPREAD: Final = 0.05  # nats; log 3 and log 4 are 0.29 apart, bf16 drift has a spread of about 0.02
ONE_SIGN_SHARE: Final = 0.995  # of the tokens that differ
BIAS_SHARE: Final = 0.3  # |mean| over mean abs
BIAS_Z: Final = 5.0  # standard errors
TARGET_RANK_CORRELATION: Final = 0.5
SHIFT_GAIN: Final = 0.5  # the shifted match must halve the mean abs
ABOVE_ZERO: Final = 1e-6  # nats; a float32 log-softmax can round a certain token to just above 0
ZERO_AGAINST: Final = 1e-3  # nats; both engines round a certain token to 0, one alone does not
ZERO_BEFORE_CHANCE: Final = 1e-6
ZERO_BEFORE_FLOOR: Final = 0.05  # share of equal tokens assumed at least, so that one or two equal tokens prove nothing


def signatures(aligned: AlignedScores, *, tp: int = 1) -> tuple[Hint, ...]:
    """Hints in order of how much they explain; empty for an invalid or a bit-equal comparison and for fewer than 16 tokens.

    tp: the larger TP size of the two sides; an offset of log TP means that every rank's sum was counted.
    """
    if aligned.tokens < MIN_TOKENS:
        return ()
    log_k = _constant_offset_log_k(aligned, tp)
    # An offset of log k is one-signed and independent of the target too: the more exact words stand alone.
    bias = log_k or _non_positive_offset(aligned) or _one_signed_bias(aligned)
    found = (_shifted_by_one(aligned), bias, _above_zero(aligned), _exactly_zero(aligned), _zero_before_position(aligned))
    return tuple(h for h in found if h is not None)


def _constant_offset_log_k(aligned: AlignedScores, tp: int) -> Hint | None:
    middle = float(np.median(aligned.delta_N))
    spread = 1.4826 * float(np.median(np.abs(aligned.delta_N - middle)))
    k = next((k for k in LOG_K if abs(abs(middle) - math.log(k)) <= LOG_K_SPREAD), None)
    if k is None or spread > LOG_K_SPREAD:
        return None
    why = f"each of the {k} ranks counted the whole sum" if k == tp else "a sum was counted that many times"
    return Hint(
        name="constant_offset_log_k",
        says=f"the {_lower_side(middle)}'s log-probs are lower by log {k} = {math.log(k):.4f} nats on every token: {why}",
        axis="logprob.reduce",
        numbers={"k": float(k), "median_nats": middle, "spread_nats": spread},
    )


def _non_positive_offset(aligned: AlignedScores) -> Hint | None:
    """All deltas of one sign whatever the target: one denominator holds more than the other (padded vocabulary rows)."""
    d_N = aligned.delta_N[aligned.delta_N != 0]
    if d_N.size < max(MIN_TOKENS, aligned.tokens // 2):
        return None
    negative = float((d_N < 0).mean())
    one_sign, correlation = max(negative, 1 - negative), _rank_correlation(aligned.delta_N, aligned.b_N)
    if one_sign < ONE_SIGN_SHARE or abs(correlation) > TARGET_RANK_CORRELATION:
        return None
    mean = float(aligned.delta_N.mean())
    return Hint(
        name="non_positive_offset",
        says=f"the {_lower_side(mean)}'s log-probs are never the higher ones, whatever the token: its denominator counts more, "
        "as padded vocabulary rows would make it",
        axis="logprob.vocab_padding",
        numbers={"signed_mean_nats": mean, "one_sign_share": one_sign, "rank_correlation_with_logprob": correlation},
    )


def _one_signed_bias(aligned: AlignedScores) -> Hint | None:
    d_N = aligned.delta_N
    mean, mean_abs, error = float(d_N.mean()), float(np.abs(d_N).mean()), _standard_error(aligned)
    if mean_abs == 0.0 or abs(mean) < BIAS_SHARE * mean_abs or abs(mean) < BIAS_Z * error:
        return None
    z = abs(mean) / error if error else math.inf
    # A temperature moves likely and unlikely tokens apart; a larger denominator moves all alike.
    correlation = _rank_correlation(d_N, aligned.b_N)
    return Hint(
        name="one_signed_bias",
        says=f"the {_lower_side(mean)}'s log-probs are lower on average by {abs(mean):.3g} nats, {z:.0f} standard errors: "
        "a bias, which rounding does not give",
        axis="logprob.transform_chain" if abs(correlation) > TARGET_RANK_CORRELATION else "logprob.vocab_padding",
        numbers={"signed_mean_nats": mean, "mean_abs_nats": mean_abs, "standard_errors": z, "rank_correlation_with_logprob": correlation},
    )


def _shifted_by_one(aligned: AlignedScores) -> Hint | None:
    here = float(np.abs(aligned.delta_N).mean())
    for shift in (-1, 1):
        there = _mean_abs_at(aligned, shift)
        if there is not None and there < SHIFT_GAIN * here:
            where = "later" if shift > 0 else "earlier"
            return Hint(
                name="shifted_by_one",
                says=f"the trainer matches the rollout's log-probs best one token {where}: "
                f"mean abs {there:.3g} nats there, {here:.3g} nats in place",
                axis="logprob.selected_gather",
                numbers={"shift": float(shift), "mean_abs_shifted_nats": there, "mean_abs_in_place_nats": here},
            )
    return None


def _mean_abs_at(aligned: AlignedScores, shift: int) -> float | None:
    """Mean |a[i] - b[i + shift]| within sequences, nats; None for too few pairs."""
    same_N = aligned.sequence_N[:-1] == aligned.sequence_N[1:]
    left, right = (aligned.a_N, aligned.b_N) if shift > 0 else (aligned.b_N, aligned.a_N)
    pairs = np.abs(left[:-1] - right[1:])[same_N]
    return float(pairs.mean()) if pairs.size >= MIN_TOKENS else None


def _above_zero(aligned: AlignedScores) -> Hint | None:
    counts = {"trainer": int((aligned.a_N > ABOVE_ZERO).sum()), "rollout": int((aligned.b_N > ABOVE_ZERO).sum())}
    return _counted("logprob_above_zero", counts, "are above 0, which no log-prob is")


def _exactly_zero(aligned: AlignedScores) -> Hint | None:
    a_N, b_N = aligned.a_N, aligned.b_N
    zero_a, zero_b = (a_N == 0) & (b_N < -ZERO_AGAINST), (b_N == 0) & (a_N < -ZERO_AGAINST)
    counts = {"trainer": int(zero_a.sum()), "rollout": int(zero_b.sum())}
    return _counted(
        "logprob_zero", counts, "are exactly 0 where the other side's are not: a target outside the vocabulary, or a masked token"
    )


def _counted(name: HintName, counts: dict[str, int], says: str) -> Hint | None:
    if not any(counts.values()):
        return None
    who = " and ".join(f"{n} log-probs of the {side}" for side, n in counts.items() if n)
    numbers = {f"{side}_tokens": float(n) for side, n in counts.items()}
    return Hint(name=name, says=f"{who} {says}", axis="logprob.selected_gather", numbers=numbers)


def _zero_before_position(aligned: AlignedScores) -> Hint | None:
    """Bit-equal up to some context length and mostly unequal from there on: a window, a block or a chunk ends there."""
    equal_N = bit_equal(aligned).astype(bool)
    if equal_N.all():
        return None
    start = int(aligned.context_N[~equal_N].min())
    after_N = aligned.context_N >= start
    before, equal_after = int((~after_N).sum()), float(equal_N[after_N].mean())
    # How likely `before` equal tokens in a row are by chance, given how often tokens are equal later on.
    chance = max(equal_after, ZERO_BEFORE_FLOOR) ** before
    if after_N.sum() < MIN_TOKENS or equal_after > 0.5 or chance > ZERO_BEFORE_CHANCE:
        return None
    return Hint(
        name="zero_before_position",
        says=f"all {before} tokens with fewer than {start} tokens before them agree bit for bit, of the later ones {equal_after:.0%}: "
        "a sliding window, a block or a chunk ends there",
        axis="attention.provenance",
        numbers={"position": float(start), "equal_before": float(before), "equal_share_after": equal_after},
    )


def _lower_side(delta: float) -> str:
    return "trainer" if delta < 0 else "rollout"


def _standard_error(aligned: AlignedScores) -> float:
    """Of the mean delta, nats: over tokens or, where larger, over 5 sequences or more (tokens of one are not independent)."""
    d_N = aligned.delta_N
    by_token = float(d_N.std(ddof=1)) / math.sqrt(d_N.size)
    size = len(aligned.sequences)
    if size < OUTLIER_MIN_SEQUENCES:
        return by_token
    residual_S = np.bincount(aligned.sequence_N, d_N - d_N.mean(), size)
    by_sequence = math.sqrt(float((residual_S**2).sum()) * size / (size - 1)) / d_N.size
    return max(by_token, by_sequence)


def _rank_correlation(x_N: FloatN, y_N: FloatN) -> float:
    """Correlation of the ranks, equal values sharing one; 0 where x or y is constant."""
    ranks = [np.unique(v, return_inverse=True)[1].astype(np.float64) for v in (x_N, y_N)]
    if any(r.std() == 0 for r in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
