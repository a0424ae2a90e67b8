"""What the planted log-prob faults of both engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from rlmismatch.tokens import Sequence as Tokens


def owner_twice(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """float32 [T]: what a log-prob gains where two ranks add the target's logit, each shifted by the row's maximum."""
    return logits_TV.gather(1, targets_T[:, None])[:, 0] - logits_TV.amax(dim=1)


def reported(scores: Mapping[str, torch.Tensor], sequences: Sequence[Tokens], plants: Sequence[str]) -> dict[str, torch.Tensor]:
    """`scores` as a side with the planted faults of its reporting hands them on: a token that it does not score gets 0."""
    out = {name: score.clone() for name, score in scores.items()}
    for sequence in sequences:
        score = out.get(sequence.id)
        if score is None or not len(score):
            continue
        if "eos_logprob_zero" in plants:
            score[-1] = 0.0
        if "oov_target" in plants:
            score[len(score) // 2] = 0.0
    return out


def merged_as_they_arrive(parts_RTV: Sequence[torch.Tensor], turn: int) -> torch.Tensor:
    """float32 [T]: log-sum-exp of rows whose shards are merged one after the other, in another order at every `turn`."""
    order = [(turn + i) % len(parts_RTV) for i in range(len(parts_RTV))]
    if turn % 2:
        order.reverse()
    lse_T = parts_RTV[order[0]].float().logsumexp(dim=-1)
    for rank in order[1:]:
        lse_T = torch.logaddexp(lse_T, parts_RTV[rank].float().logsumexp(dim=-1))
    return lse_T


SAYS_ARRIVAL: Final[Mapping[tuple[str, str], Any]] = {("logprob.merge_order", "merge_order"): "order of arrival"}
SAYS_EOS: Final[Mapping[tuple[str, str], Any]] = {("logprob.selected_gather", "ignore_index"): "the end token, scored 0"}
SAYS_OOV: Final[Mapping[tuple[str, str], Any]] = {("logprob.selected_gather", "ignore_index"): "ids outside the vocabulary, scored 0"}
SAYS_SHIFT: Final[Mapping[tuple[str, str], Any]] = {("logprob.selected_gather", "shift_convention"): "logits[t] score token t"}
