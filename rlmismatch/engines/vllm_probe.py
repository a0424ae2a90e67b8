"""The rollout's part of the log-prob probe: scored rows out of a live prefill, and the engine's own head on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from rlmismatch.engines import logprob_probe
from rlmismatch.engines.logprob_probe import MAX_ROWS, ProbeSite
from rlmismatch.kernels import logprob
from rlmismatch.pins import logprob_ways
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.logprob_ways import Reduce, Way
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.pins.vllm_logprob import FIXED_MERGE
from rlmismatch.tokens import Sequence


@dataclasses.dataclass
class HeadRows:
    """Hidden rows and logits of every call of the head: of one prefill the sampled row first, then the prompt's rows."""

    hidden: list[torch.Tensor] = dataclasses.field(default_factory=list)
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watching_head(live: LiveModel) -> Iterator[HeadRows]:
    """Keeps what the head reads and what it writes over all ranks, before any cap or scale, while the context is open."""
    rows = HeadRows()

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def get_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = native(hidden_states, *args, **kwargs)
            rows.hidden.append(hidden_states.clone())
            rows.logits.append(logits.clone())
            return logits

        return get_logits

    with installed([Patch(target=live.model.logits_processor, name="_get_logits", make=make, pins=(), label="probe")]):
        yield rows


def probe(
    live: LiveModel, seen: HeadRows, scores: Mapping[str, torch.Tensor], sequences: Seq[Sequence], impl: logprob.Impl
) -> dict[str, torch.Tensor]:
    """The tensors of `logprob_probe` for the first MAX_ROWS scored tokens of `sequences`. Collective."""
    hidden, logits, targets = [], [], []
    for sequence, (hidden_TH, logits_TV) in zip(sequences, prompt_rows(seen, sequences), strict=True):
        scored = slice(len(sequence.prompt_ids) - 1, None)
        hidden.append(hidden_TH[scored])
        logits.append(logits_TV[scored])
        targets += list(sequence.response_ids)
    head = live.model.lm_head
    targets_N = torch.tensor(targets, device=live.inv_freq.device)[:MAX_ROWS]
    site = ProbeSite(
        hidden_NH=torch.cat(hidden)[:MAX_ROWS],
        logits_NV=torch.cat(logits)[:MAX_ROWS],
        targets_N=targets_N,
        recorded_N=torch.cat([scores[s.id] for s in sequences])[:MAX_ROWS],
        weight_VH=torch.cat(live.tp.gathered(live.weight(head)))[: live.vocab_size],
        vocab_size=live.vocab_size,
        chain=live.chain,
        head=lambda x_MH, dtype: _head(live, x_MH, dtype),
        joined=lambda x_NV, t_N, reduce: _joined(live, x_NV, t_N, reduce, impl),
    )
    return logprob_probe.tensors(site)


def prompt_rows(seen: HeadRows, sequences: Seq[Sequence]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden rows [T - 1, H] and logits [T - 1, V] of every token but the last, sequence by sequence, each prefilled alone.

    Raises RuntimeError if the head was called otherwise than `HeadRows` says.
    """
    calls = list(zip(seen.hidden, seen.logits, strict=True))
    # Told apart by their place, not by their rows: of a sequence of two tokens either call has one row.
    expected = [rows for s in sequences for rows in (1, len(s.token_ids) - 1) if rows]
    saw = [len(hidden) for hidden, _ in calls]
    if saw != expected:
        raise RuntimeError(f"the head saw calls of {saw} rows, not {expected}: of each prefill the sampled row, then the prompt's rows")
    left = iter(calls)
    out = []
    for sequence in sequences:
        hidden_1H, logits_1V = next(left)
        out.append(next(left) if len(sequence.token_ids) > 1 else (hidden_1H[:0], logits_1V[:0]))
    return out


def _head(live: LiveModel, x_MH: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Logits [M, V] of all ranks by the engine's own head; None for a dtype that this version's head cannot have."""
    processor = live.model.logits_processor
    if dtype is not None and dtype != x_MH.dtype and not hasattr(processor, "head_dtype"):
        return None
    before = getattr(processor, "head_dtype", None)
    if dtype is not None and before is not None:
        processor.head_dtype = dtype
    try:
        with torch.inference_mode():
            logits: torch.Tensor = processor._get_logits(x_MH, live.model.lm_head, None)
    finally:
        if before is not None:
            processor.head_dtype = before
    return logits.clone()


def _joined(live: LiveModel, logits_NV: torch.Tensor, targets_N: torch.Tensor, reduce: Reduce, impl: logprob.Impl) -> torch.Tensor:
    way = FIXED_MERGE if reduce == FIXED_MERGE.reduce else Way(reduce=reduce, gather="local_gather")
    width = live.head_shard_width
    start = live.tp.rank * width
    prepared_NV = live.chain.apply(logits_NV.float())
    if way == FIXED_MERGE:
        return logprob.selected(prepared_NV, targets_N, vocab_size=live.vocab_size, impl=impl)
    own_NV = prepared_NV[:, start : min(start + width, live.vocab_size)]
    return logprob_ways.selected(own_NV, targets_N, start=start, way=way, tp=live.tp)
