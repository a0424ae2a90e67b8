"""The measures of forms and pages as pure functions: what was taken and is no number is within no limit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from rlmismatch.arms import PAGED_PINNED
from rlmismatch.assemble import attention
from rlmismatch.drift.align import align
from rlmismatch.report.model import MeasureRow
from rlmismatch.tokens import Sequence

SEQUENCES = (Sequence(id="a", prompt_ids=(1,), response_ids=(2, 3)),)
SCORES = {"a": torch.tensor([-1.0, -2.0])}


def on_shuffled_pages(shuffled: torch.Tensor) -> MeasureRow:
    arm = SimpleNamespace(scores={"prefill": SCORES, "prefill_shuffled": {"a": shuffled}})
    book: Any = SimpleNamespace(arms={"trainer": {}, "rollout": {PAGED_PINNED: arm}}, aligned=lambda a, b: align(a, b, SEQUENCES))
    evidence: Any = SimpleNamespace(broken=(), side=lambda _: None, run={"checkpoint": {"num_heads": 8}})
    (row,) = (r for r in attention.measures(evidence, book) if "shuffled pages" in r.what)
    return row


def test_equal_scores_are_within_the_limit_and_others_are_not() -> None:
    assert (on_shuffled_pages(SCORES["a"]).value, on_shuffled_pages(SCORES["a"]).ok) == (0.0, True)
    assert not on_shuffled_pages(torch.tensor([-1.0, -2.0 + 2**-20])).ok


def test_scores_that_cannot_be_compared_are_within_no_limit() -> None:
    for shuffled in (torch.tensor([-1.0, math.nan]), torch.tensor([-1.0])):
        row = on_shuffled_pages(shuffled)
        assert math.isnan(row.value or 0.0)
        assert (row.ok, bool(row.note)) == (False, True)
