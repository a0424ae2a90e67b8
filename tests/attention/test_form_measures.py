"""The measures of forms and pages as pure functions: what was taken and is no number is within no limit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from rlmismatch.arms import PAGED_PINNED
from rlmismatch.assemble import attention
from rlmismatch.drift.align import align
from rlmismatch.engines.protocol import NOT_PACKED
from rlmismatch.report.model import MeasureRow
from rlmismatch.tokens import Sequence

SEQUENCES = (Sequence(id="a", prompt_ids=(1,), response_ids=(2, 3)),)
SCORES = {"a": torch.tensor([-1.0, -2.0])}


def on_shuffled_pages(shuffled: torch.Tensor) -> MeasureRow:
    return row_of({"prefill": SCORES, "prefill_shuffled": {"a": shuffled}}, "shuffled pages")


def row_of(scores: dict[str, dict[str, torch.Tensor]], words: str, *notes: str) -> MeasureRow:
    arm = SimpleNamespace(scores=scores, notes=list(notes))
    book: Any = SimpleNamespace(arms={"trainer": {}, "rollout": {PAGED_PINNED: arm}}, aligned=lambda a, b: align(a, b, SEQUENCES))
    evidence: Any = SimpleNamespace(broken=(), side=lambda _: None, run={"checkpoint": {"num_heads": 8}})
    (row,) = (r for r in attention.measures(evidence, book) if words in r.what)
    return row


def test_equal_scores_are_within_the_limit_and_others_are_not() -> None:
    assert (on_shuffled_pages(SCORES["a"]).value, on_shuffled_pages(SCORES["a"]).ok) == (0.0, True)
    assert not on_shuffled_pages(torch.tensor([-1.0, -2.0 + 2**-20])).ok


def test_scores_that_cannot_be_compared_are_within_no_limit() -> None:
    for shuffled in (torch.tensor([-1.0, math.nan]), torch.tensor([-1.0])):
        row = on_shuffled_pages(shuffled)
        assert math.isnan(row.value or 0.0)
        assert (row.ok, bool(row.note)) == (False, True)


def test_a_packed_prefill_that_was_left_out_is_no_pass_and_says_why() -> None:
    row = row_of({"prefill": SCORES}, "packed into one prefill", NOT_PACKED + "no room")
    assert (row.value, row.limit, row.note) == (None, None, "no room")
    taken = row_of({"prefill": SCORES, "prefill_packed": SCORES}, "packed into one prefill", "another note")
    assert (taken.value, taken.limit) == (0.0, 0.0)
