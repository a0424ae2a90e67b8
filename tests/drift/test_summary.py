"""Each metric against its formula, written here once more in plain float64 Python."""

import math

import numpy as np
import pytest
import torch

from rlmismatch.drift import Drift, Invalid, against_oracle, align, summarise, ulp_distance
from rlmismatch.tokens import Sequence


def aligned_of(rows, *, prompt=2, base=-2.0):
    """Sequences s0, s1.. whose deltas are `rows`; b is `base` everywhere unless it is a list of rows."""
    sequences = [Sequence(id=f"s{i}", prompt_ids=(1,) * prompt, response_ids=tuple(range(50, 50 + len(row)))) for i, row in enumerate(rows)]
    bases = base if isinstance(base, list) else [[base] * len(row) for row in rows]
    b = {s.id: torch.tensor(x, dtype=torch.float64) for s, x in zip(sequences, bases, strict=True)}
    a = {s.id: b[s.id] + torch.tensor(row, dtype=torch.float64) for s, row in zip(sequences, rows, strict=True)}
    return align(a, b, sequences)


def test_metrics_are_their_formulas():
    deltas = [0.5, -0.25, 0.0, 0.125]
    drift = summarise(aligned_of([deltas[:3], deltas[3:]]))
    n = len(deltas)
    assert (drift.tokens, drift.sequences, drift.bit_equal) == (4, 2, 1)
    assert drift.bit_equal_share == 0.25
    assert drift.signed_mean == sum(deltas) / n
    assert drift.mean_abs == sum(map(abs, deltas)) / n
    assert drift.p50 == pytest.approx(0.1875, abs=1e-15)
    assert drift.max == 0.5
    assert drift.token_mult_prob_error == pytest.approx(sum(math.exp(abs(d)) for d in deltas) / n, rel=1e-15)
    assert drift.k1 == -sum(deltas) / n
    assert drift.k2 == sum(d * d for d in deltas) / 2 / n
    assert drift.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in deltas) / n, rel=1e-14)
    assert drift.clip_share == 0.5
    weights = [math.exp(d) for d in deltas]
    assert drift.ess == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / n, rel=1e-14)
    assert drift.tis_mean_weight == sum(weights) / n


def test_importance_weights_are_truncated_at_two():
    drift = summarise(aligned_of([[math.log(3), math.log(1.5)]]))
    assert drift.tis_mean_weight == pytest.approx((2 + 1.5) / 2, rel=1e-15)


def test_kl_direction_is_the_rollout_from_the_trainer():
    """With tokens drawn from b, k1 and k3 estimate KL(b || a), which is known for two coins."""
    p, q = 0.6, 0.5  # b draws heads with p, a gives q
    heads = 6000
    rows = [[math.log(q / p)] * heads + [math.log((1 - q) / (1 - p))] * (10000 - heads)]
    drift = summarise(aligned_of(rows), bootstrap=0)
    truth = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert drift.k1 == pytest.approx(truth, rel=1e-12)
    assert drift.k3 == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("delta", [1e-9, -1e-9, 1e-4, -9.99e-4, 1.001e-3, -0.7])
def test_k3_keeps_its_digits_where_the_plain_formula_loses_them(delta):
    from decimal import Decimal, getcontext

    getcontext().prec = 50
    drift = summarise(aligned_of([[delta]], base=0.0), bootstrap=0)
    exact = float(Decimal(delta).exp() - 1 - Decimal(delta))
    assert drift.k3 == pytest.approx(exact, rel=1e-12)


def test_bit_equal_scores_have_zero_drift_and_no_worst_token():
    drift = summarise(aligned_of([[0.0] * 5, [0.0] * 3]))
    assert (drift.mean_abs, drift.max, drift.k3, drift.token_mult_prob_error, drift.ess) == (0.0, 0.0, 0.0, 1.0, 1.0)
    assert drift.bit_equal == 8
    assert drift.unequal == 0
    assert drift.worst == ()
    assert drift.valid


def test_a_huge_delta_overflows_to_infinity_not_to_a_pass():
    for delta in (-800.0, 800.0):
        drift = summarise(aligned_of([[delta, 0.0]]), bootstrap=0)
        assert drift.token_mult_prob_error == math.inf
        assert drift.ess == pytest.approx(0.5)


def test_worst_tokens_name_prompt_position_token_and_context():
    drift = summarise(aligned_of([[0.1, -0.9, 0.0], [0.3]]))
    assert [(t.sequence, t.position, t.token, round(t.delta, 3)) for t in drift.worst] == [
        ("s0", 1, 51, -0.9),
        ("s1", 0, 50, 0.3),
        ("s0", 0, 50, 0.1),
    ]
    assert drift.worst[0].context_ids == (1, 1, 50)
    assert drift.worst[0].context_length == 3
    assert drift.decoded(lambda ids: "/".join(map(str, ids))).worst[0].context_text == "1/1/50"


def test_ulp_distance_counts_representable_float32_numbers():
    one = np.float32(-1.0)
    b_N = np.asarray(
        [one, np.nextafter(one, np.float32(0)), np.nextafter(np.nextafter(one, np.float32(-2)), np.float32(-2)), 1e-45, 0.0],
        dtype=np.float64,
    )
    a_N = np.asarray([-1.0, -1.0, -1.0, -1e-45, -0.0], dtype=np.float64)
    assert ulp_distance(a_N, b_N).tolist() == [0, 1, 2, 2, 0]


def test_ulp_histogram_bins_are_powers_of_two_and_count_every_token():
    ulp = 2.0**-23  # of float32 in [1, 2)
    histogram = summarise(aligned_of([[0.0, 0.0, ulp, 3 * ulp, 4 * ulp, 9 * ulp]], base=-1.5)).ulp_histogram
    assert [(b.low, b.high, b.tokens) for b in histogram] == [(0, 0, 2), (1, 1, 1), (2, 3, 1), (4, 7, 1), (8, 15, 1)]


def test_growth_finds_the_slope_and_flat_drift_has_none():
    growing = summarise(aligned_of([[1e-3 + 2e-5 * i for i in range(100)]] * 4)).growth
    assert growing.slope == pytest.approx(2e-2, rel=1e-9)  # nats per 1000 tokens
    assert growing.slope_interval.low <= growing.slope * (1 + 1e-9)
    assert [b.tokens for b in growing.buckets] == [4 * n for n in (12, 13, 13, 12, 12, 13, 13, 12)]
    assert growing.buckets[0].mean_abs < growing.buckets[-1].mean_abs
    assert sum(b.tokens for b in growing.buckets) == 400
    assert summarise(aligned_of([[0.5], [0.25]])).growth.slope is None


def test_an_outlier_sequence_is_named_by_robust_z():
    rng = np.random.default_rng(0)
    rows = [(0.01 * rng.standard_normal(50)).tolist() for _ in range(9)] + [(0.1 * rng.standard_normal(50)).tolist()]
    drift = summarise(aligned_of(rows))
    assert [s.sequence for s in drift.per_sequence if s.outlier] == ["s9"]
    assert drift.per_sequence[9].robust_z > 3.5
    assert all(s.robust_z is None for s in summarise(aligned_of(rows[:4])).per_sequence)


def test_robust_z_is_in_normal_standard_deviations():
    drift = summarise(aligned_of([[x] for x in (1.0, 2.0, 3.0, 4.0, 9.0)]))  # median 3, MAD 1
    assert [s.robust_z for s in drift.per_sequence] == pytest.approx([(x - 3) / 1.4826 for x in (1, 2, 3, 4, 9)])
    assert [s.outlier for s in drift.per_sequence] == [False] * 4 + [True]


def test_a_drift_with_a_reason_is_not_valid_whatever_else_it_holds():
    assert Drift(tokens=3, sequences=1, mean_abs=0.0).valid
    assert not Drift(tokens=3, sequences=1, mean_abs=0.0, invalid=(Invalid(kind="not_finite", text="NaN"),)).valid
    assert not Drift(tokens=0, sequences=1, mean_abs=0.0).valid


def test_one_drifting_sequence_among_equal_ones_is_an_outlier():
    drift = summarise(aligned_of([[0.0] * 4] * 7 + [[0.0, 0.0, 0.0, 0.1]]))
    assert [s.robust_z for s in drift.per_sequence] == [0.0] * 7 + [math.inf]
    assert drift.per_sequence[7].outlier


def test_bootstrap_interval_covers_resamples_whole_sequences_and_is_seeded():
    rng = np.random.default_rng(1)
    # Drift that is the same within a sequence and differs between them: tokens are far from independent.
    rows = [[abs(x)] * 64 for x in rng.standard_normal(30)]
    drift = summarise(aligned_of(rows), seed=3)
    width = drift.mean_abs_interval.high - drift.mean_abs_interval.low
    by_sequence = 2 * 1.96 * float(np.std([row[0] for row in rows])) / math.sqrt(30)
    assert 0.7 * by_sequence < width < 1.3 * by_sequence
    assert drift.mean_abs_interval.low < drift.mean_abs < drift.mean_abs_interval.high
    assert summarise(aligned_of(rows), seed=3) == drift
    assert summarise(aligned_of(rows), seed=4).mean_abs_interval != drift.mean_abs_interval


@pytest.mark.parametrize(("rows", "bootstrap"), [([[0.1, 0.2]], 200), ([[0.1], [0.2]], 0)])
def test_no_interval_where_none_can_be_had(rows, bootstrap):
    assert summarise(aligned_of(rows), bootstrap=bootstrap).mean_abs_interval is None


def oracle_case(error, plain):
    sequence = Sequence(id="s", prompt_ids=(1,), response_ids=(2, 3))
    truth = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    return against_oracle({"s": truth + error}, {"s": truth}, None if plain is None else {"s": truth + plain}, [sequence])


def test_oracle_error_is_in_units_of_the_plain_forward():
    assert oracle_case(0.5, 0.25).ratio == 2.0
    assert oracle_case(0.0, 0.0).ratio == 0.0
    assert oracle_case(0.5, 0.0).ratio == math.inf
    assert oracle_case(0.5, None).ratio is None
    assert oracle_case(math.nan, 0.25).ratio is None
    assert "not finite" in oracle_case(0.5, math.nan).why_no_ratio
