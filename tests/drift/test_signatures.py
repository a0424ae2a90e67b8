"""Each signature is seen on its own fault, and plain rounding noise gives none."""

import math

import numpy as np
import pytest
import torch

from rlmismatch.drift import align, signatures
from rlmismatch.tokens import Sequence

SEQUENCES = tuple(Sequence(id=f"s{i}", prompt_ids=(1,) * 4, response_ids=tuple(range(40))) for i in range(6))
R = 40


def hints(a_SR, b_SR, *, tp=1):
    a, b = ({s.id: torch.from_numpy(np.ascontiguousarray(row)) for s, row in zip(SEQUENCES, x, strict=True)} for x in (a_SR, b_SR))
    return signatures(align(a, b, SEQUENCES), tp=tp)


def logprobs(seed, *, vocab=200, spread=3.0):
    """Selected log-probs of sampled tokens over random logits, the logits and the samples."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((len(SEQUENCES), R, vocab)) * spread
    gumbel = -np.log(-np.log(rng.random(logits.shape)))
    token = (logits + gumbel).argmax(-1)
    return selected(logits, token), logits, token


def selected(logits, token):
    return np.take_along_axis(logits, token[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))


def noise(seed, scale=0.02):
    return np.random.default_rng(1000 + seed).standard_normal((len(SEQUENCES), R)) * scale


@pytest.mark.parametrize("seed", range(40))
def test_bf16_noise_gives_no_hint(seed):
    b, logits, token = logprobs(seed)
    noisy = logits + np.random.default_rng(1000 + seed).standard_normal(logits.shape) * 0.005 * (1 + seed % 8)
    assert hints(selected(noisy, token), b) == ()


@pytest.mark.parametrize("seed", range(10))
def test_logits_rounded_to_bf16_give_no_hint(seed):
    b, logits, token = logprobs(seed)
    rounded = torch.from_numpy(logits).to(torch.bfloat16).double().numpy()
    assert hints(selected(rounded, token), b) == ()


def flat_hints(delta_N, *, length):
    """Hints of deltas over sequences of `length` tokens, with log-probs that have no pattern."""
    rows = np.asarray(delta_N, dtype=np.float64).reshape(-1, length)
    sequences = [Sequence(id=f"s{i}", prompt_ids=(1,), response_ids=tuple(range(length))) for i in range(len(rows))]
    b = {s.id: -1.0 - np.random.default_rng(i).random(length) for i, s in enumerate(sequences)}
    return signatures(align({s.id: b[s.id] + row for s, row in zip(sequences, rows, strict=True)}, b, sequences))


@pytest.mark.parametrize("seed", range(60))
def test_few_noisy_tokens_give_no_hint(seed):
    assert flat_hints(np.random.default_rng(seed).standard_normal(18) * 0.02, length=18) == ()


def test_a_sure_but_small_bias_beside_large_noise_gives_no_hint():
    delta_N = np.random.default_rng(0).standard_normal(20_000) * 0.02 + 0.002  # 14 standard errors, an eighth of mean |delta|
    assert flat_hints(delta_N, length=2000) == ()


def test_equal_scores_and_few_tokens_give_no_hint():
    b, _, _ = logprobs(0)
    assert hints(b, b) == ()
    few = (Sequence(id="s", prompt_ids=(1,), response_ids=(2, 3)),)
    scores = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    assert signatures(align({"s": scores - math.log(2)}, {"s": scores}, few), tp=2) == ()


@pytest.mark.parametrize("k", [2, 3, 4, 8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_constant_offset_log_k(k, sign):
    b, _, _ = logprobs(1)
    hint = hints(b + sign * math.log(k) + noise(1), b, tp=k)[0]
    assert (hint.name, hint.axis, hint.numbers["k"]) == ("constant_offset_log_k", "logprob.reduce", k)
    assert ("trainer" if sign < 0 else "rollout") in hint.says
    assert f"each of the {k} ranks" in hint.says


def test_padded_rows_are_a_non_positive_offset():
    b, logits, _ = logprobs(2, spread=1.0)
    lse = np.log(np.exp(logits).sum(-1))
    (hint,) = hints(b - np.log1p(28 * np.exp(-lse)), b)
    assert (hint.name, hint.axis) == ("non_positive_offset", "logprob.vocab_padding")
    assert "the trainer's" in hint.says


def test_padded_rows_under_noise_are_a_bias_that_points_at_padding():
    b, logits, _ = logprobs(3, spread=1.0)
    lse = np.log(np.exp(logits).sum(-1))
    (hint,) = hints(b - np.log1p(4 * np.exp(-lse)) + noise(3, 0.015), b)
    assert (hint.name, hint.axis) == ("one_signed_bias", "logprob.vocab_padding")


def test_a_temperature_on_one_side_is_a_bias_that_points_at_the_transform_chain():
    b, logits, token = logprobs(4, spread=3.0)
    (hint,) = hints(selected(logits / 2.0, token), b)
    assert (hint.name, hint.axis) == ("one_signed_bias", "logprob.transform_chain")


def test_a_one_signed_scaling_is_no_offset_but_a_transform():
    b, _, _ = logprobs(4)
    (hint,) = hints(b * 1.05, b)
    assert (hint.name, hint.axis) == ("one_signed_bias", "logprob.transform_chain")


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_by_one(shift):
    b, _, _ = logprobs(5)
    a = np.roll(b, -shift, axis=1) + noise(5)
    hint = hints(a, b)[0]
    assert (hint.name, hint.axis, hint.numbers["shift"]) == ("shifted_by_one", "logprob.selected_gather", shift)
    assert ("one token later" if shift > 0 else "one token earlier") in hint.says


def test_a_shift_is_looked_for_inside_sequences_only():
    sequences = [Sequence(id=f"s{i}", prompt_ids=(1,), response_ids=(2, 3)) for i in range(20)]
    a = {s.id: torch.tensor([-5.0, -9.0], dtype=torch.float64) for s in sequences}
    b = {s.id: torch.tensor([-1.0, -5.0], dtype=torch.float64) for s in sequences}
    hint = signatures(align(a, b, sequences))[0]
    assert (hint.name, hint.numbers["mean_abs_shifted_nats"]) == ("shifted_by_one", 0.0)


def test_logprob_zero_on_one_side_only():
    b, _, _ = logprobs(6)
    a = b + noise(6)
    a[:, -1] = 0.0
    (hint,) = (h for h in hints(a, b) if h.name == "logprob_zero")
    assert hint.numbers == {"trainer_tokens": 6.0, "rollout_tokens": 0.0}
    certain = b.copy()
    certain[:, 0] = 0.0
    assert hints(certain, certain + noise(6, 1e-7)) == ()


def test_logprob_above_zero():
    b, _, _ = logprobs(7)
    wrong = b + noise(7)
    wrong[0, 3] = 1e-3
    (hint,) = (h for h in hints(b, wrong) if h.name == "logprob_above_zero")
    assert hint.numbers["rollout_tokens"] == 1.0
    rounding = b + noise(7)
    rounding[0, 3] = 1e-7
    assert all(h.name != "logprob_above_zero" for h in hints(b, rounding))


def test_zero_before_a_position_then_not():
    b, _, _ = logprobs(8)
    a = b + noise(8) * (np.arange(R) >= 12)
    (hint,) = hints(a, b)
    assert (hint.name, hint.axis) == ("zero_before_position", "attention.provenance")
    assert hint.numbers["position"] == 16  # 12 in the response, after 4 prompt tokens
    assert hint.numbers["equal_before"] == 72


def test_mostly_equal_tokens_after_a_position_are_no_window():
    b, _, _ = logprobs(8)
    late = (np.arange(R) >= 12) & (np.random.default_rng(8).random(b.shape) < 0.35)
    assert hints(b + noise(8) * late, b) == ()


def test_sparse_drift_is_no_window():
    b, _, _ = logprobs(9)
    a = b + noise(9) * (np.random.default_rng(9).random(b.shape) < 0.1)
    assert hints(a, b) == ()
