"""`align` pairs tokens, and every breach is a reason that leaves nothing to compute with."""

import math
import time

import numpy as np
import pytest
import torch

from rlmismatch.drift import align, summarise
from rlmismatch.tokens import Sequence

SEQUENCES = (
    Sequence(id="p", prompt_ids=(5, 6, 7), response_ids=(10, 11)),
    Sequence(id="q", prompt_ids=(8,), response_ids=(20, 21, 22)),
)
A = {"p": torch.tensor([-1.0, -2.0], dtype=torch.float64), "q": torch.tensor([-3.0, -4.0, -5.0], dtype=torch.float64)}
B = {"p": torch.tensor([-1.5, -2.0], dtype=torch.float64), "q": torch.tensor([-3.0, -4.25, -5.0], dtype=torch.float64)}


def test_tokens_line_up_in_sequence_then_position_order():
    aligned = align(A, B, SEQUENCES)
    assert aligned.invalid == ()
    assert aligned.a_N.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert aligned.delta_N.tolist() == [0.5, 0.0, 0.0, 0.25, 0.0]
    assert aligned.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert aligned.position_N.tolist() == [0, 1, 0, 1, 2]
    assert aligned.context_N.tolist() == [3, 4, 1, 2, 3]
    assert aligned.token_N.tolist() == [10, 11, 20, 21, 22]


def test_float32_scores_keep_their_exact_value():
    a = {"p": np.asarray([-0.1, -0.2], dtype=np.float32), "q": np.asarray([-1, -1, -1], dtype=np.float32)}
    assert align(a, a, SEQUENCES).a_N[0] == np.float64(np.float32(-0.1))


@pytest.mark.parametrize(
    ("kind", "words", "a", "b"),
    [
        ("id_mismatch", "'q' is not scored by a", {"p": A["p"]}, B),
        ("id_mismatch", "'q' is not scored by b", A, {"p": B["p"]}),
        ("id_mismatch", "'r' is not a sequence of this run but is scored by b", A, {**B, "r": B["p"]}),
        ("shape_mismatch", "a has shape [1] for sequence 'p', expected [2]", {**A, "p": A["p"][:1]}, B),
        ("shape_mismatch", "b has shape [1, 2] for sequence 'p', expected [2]", A, {**B, "p": B["p"][None]}),
        (
            "not_finite",
            "b has 1 of 3 log-probs not finite in sequence 'q', first nan at position 1",
            A,
            {**B, "q": torch.tensor([-3, math.nan, -5])},
        ),
        (
            "not_finite",
            "a has 2 of 3 log-probs not finite in sequence 'q', first -inf at position 0",
            {**A, "q": torch.tensor([-math.inf, -1, math.inf])},
            B,
        ),
    ],
)
def test_a_breach_is_a_reason_and_leaves_no_token(kind, words, a, b):
    aligned = align(a, b, SEQUENCES)
    assert [reason.kind for reason in aligned.invalid] == [kind]
    assert words in aligned.invalid[0].text
    assert aligned.tokens == 0
    drift = summarise(aligned)
    assert not drift.valid
    assert drift.mean_abs is None
    assert drift.token_mult_prob_error is None


def test_reasons_use_the_names_they_are_given():
    aligned = align({"p": A["p"]}, B, SEQUENCES, names=("trainer", "prefill"))
    assert aligned.invalid[0].text == "sequence 'q' is not scored by trainer"


def test_every_breach_is_reported_not_the_first():
    aligned = align({"p": A["p"][:1]}, {**B, "q": torch.full((3,), math.nan)}, SEQUENCES)
    assert [reason.kind for reason in aligned.invalid] == ["id_mismatch", "shape_mismatch"]
    aligned = align({**A, "p": A["p"][:1]}, {**B, "q": torch.full((3,), math.nan)}, SEQUENCES)
    assert {(reason.kind, reason.sequence) for reason in aligned.invalid} == {("shape_mismatch", "p"), ("not_finite", "q")}


@pytest.mark.parametrize("sequences", [(), (Sequence(id="p", prompt_ids=(1,), response_ids=()),)])
def test_zero_active_tokens_is_no_pass(sequences):
    scores = {s.id: torch.empty(0, dtype=torch.float64) for s in sequences}
    drift = summarise(align(scores, scores, sequences))
    assert "no_active_tokens" in [reason.kind for reason in drift.invalid]
    assert not drift.valid


def test_one_sequence_without_a_token_is_not_skipped():
    sequences = (*SEQUENCES, Sequence(id="empty", prompt_ids=(1,), response_ids=()))
    extra = {"empty": torch.empty(0, dtype=torch.float64)}
    aligned = align({**A, **extra}, {**B, **extra}, sequences)
    assert [(reason.kind, reason.sequence) for reason in aligned.invalid][:1] == [("no_active_tokens", "empty")]


def test_a_doubled_sequence_id_is_refused():
    aligned = align(A, B, (*SEQUENCES, SEQUENCES[0]))
    assert "stands twice" in aligned.invalid[0].text


def test_many_sequences_are_searched_for_a_doubled_id_once_each():
    many = tuple(Sequence(id=str(i), prompt_ids=(5,), response_ids=(10,)) for i in range(20_000))
    scores = dict.fromkeys((s.id for s in many), np.asarray([-1.0]))
    started = time.process_time()
    assert align(scores, scores, many).tokens == len(many)
    assert time.process_time() - started < 5  # half a minute, when each id was counted in the list of all
