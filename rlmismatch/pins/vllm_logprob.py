"""The log-softmax and its gather inside vLLM: the pin `logprob`, and the ways of the knob `logprob.reduce`.

vLLM gathers the logits of all TP ranks and runs one log-softmax over the real vocabulary on every rank. The two other ways stand
on this rank's own shard of those logits, at the engine's live shard bounds: the gather copied them, so they are what the rank computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

from rlmismatch.kernels import logprob
from rlmismatch.kernels.logprob import WIDTH, VocabPartials
from rlmismatch.kernels.logprob import reference as logprob_fp64
from rlmismatch.pins import logprob_ways
from rlmismatch.pins.hooks import OpSwitch, Patch
from rlmismatch.pins.logprob_ways import Way, comparable
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.transforms import Chain

NATIVE_WAY: Final = Way(reduce="allgather_logits", gather="local_gather")
FIXED_MERGE: Final = Way(reduce="allgather_partials_fixed_merge", gather="local_gather")


def engine_steps(chain: Chain) -> tuple[Chain, Chain]:
    """(what the engine's logits processor can do of `chain`: a cap, then a scale; what is left to a hook behind it)."""
    count = 0
    for step in chain.steps:
        if step.name not in ("soft_cap", "logit_scale") or (step.name == "soft_cap" and count):
            break
        count += 1
    return Chain(steps=chain.steps[:count]), Chain(steps=chain.steps[count:])


class LogprobOp:
    """The log-softmax and its gather as one operation: a row's logits and a target id in, the target's log-prob out.

    The engine calls the two one after the other, for prompt and for sampled tokens alike. An arm's requests are greedy and without
    logits processors, so nothing writes into the logits between the two. `way`: how the shards are joined where the pin is off.

    The pin starts from logits before any cap or scale that the engine applies in its own dtype: those are kept as they leave the head.
    """

    def __init__(self, live: LiveModel, *, impl: logprob.Impl, switch: OpSwitch, way: Way) -> None:
        self.way = way
        self._live = live
        self._impl = impl
        self._switch = switch
        self._logits_TV: torch.Tensor | None = None
        self._raw_TV: torch.Tensor | None = None

    def patches(self) -> tuple[Patch, ...]:
        sampler, processor = self._live.sampler, self._live.model.logits_processor
        own = processor.soft_cap is not None or processor.scale != 1.0
        raw = Patch(target=processor, name="_get_logits", make=self._head, pins=("logprob",), label="raw logits")
        return (
            *([raw] if own else []),
            Patch(target=sampler, name="compute_logprobs", make=self._softmax, pins=("logprob",), label="log_softmax"),
            Patch(target=sampler, name="gather_logprobs", make=self._gather, pins=("logprob",), label="logprob"),
        )

    def _head(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def get_logits(*args: Any, **kwargs: Any) -> Any:
            logits = native(*args, **kwargs)
            self._raw_TV = logits.clone()  # the engine scales in place
            return logits

        return get_logits

    def _softmax(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def compute(logits: torch.Tensor) -> Any:
            self._logits_TV = logits
            return native(logits)

        return compute

    def _gather(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
            out = native(logprobs, num_logprobs, token_ids)
            logits_TV, self._logits_TV = self._logits_TV, None
            if logits_TV is None or logits_TV.shape[0] != token_ids.shape[0]:
                raise RuntimeError("the engine gathered log-probs of other logits than those it had just computed them from")
            selected_T = self._selected(out.logprobs[:, 0], logits_TV, token_ids)
            return out._replace(logprobs=torch.cat([selected_T[:, None], out.logprobs[:, 1:]], dim=1))

        return gather

    def _selected(self, native_T: torch.Tensor, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        live = self._live
        raw_TV = logits_TV if self._raw_TV is None or self._raw_TV.shape != logits_TV.shape else self._raw_TV

        def native() -> torch.Tensor:
            if self.way == NATIVE_WAY:
                return native_T
            return self._merged(raw_TV, targets_T) if self.way == FIXED_MERGE else self._joined(raw_TV, targets_T)

        def pinned() -> torch.Tensor:
            temperature = live.chain.only_temperature
            if temperature is not None:
                return logprob.selected(raw_TV, targets_T, vocab_size=live.vocab_size, impl=self._impl, temperature=temperature)
            prepared_TV = live.chain.apply(raw_TV.double()).float()
            return logprob.selected(prepared_TV, targets_T, vocab_size=live.vocab_size, impl=self._impl)

        def exact() -> torch.Tensor:
            # Of the logits as the engine hands them on: what it did to them before, in their own dtype, is not this operation's error.
            _, left = engine_steps(live.chain)
            logp_TV = logprob_fp64.log_softmax_fp64(left.apply(logits_TV.double()), vocab_size=live.vocab_size)
            return logp_TV.gather(1, targets_T[:, None])[:, 0]

        return self._switch.run(
            "logprob",
            native=native,
            pinned=pinned,
            exact=exact,
            parts=lambda logp_T: {"logprob": comparable(logp_T)},
            split="whole",
        )

    def _merged(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """The pin's arithmetic over ranks: every rank's tiles, gathered and folded in global order. float32 [T].

        A tile that a shard's bound cuts is computed by the rank that owns its first column: the gather gave every rank the rest of it.
        """
        live = self._live
        temperature = live.chain.only_temperature
        if temperature is None:
            logits_TV, temperature = live.chain.apply(logits_TV.double()).float(), 1.0
        bounds = [self._first_tile(rank) for rank in range(live.tp.size + 1)]
        first, last = bounds[live.tp.rank], bounds[live.tp.rank + 1]
        part = logprob.partials(
            logits_TV[:, first * WIDTH : last * WIDTH],
            targets_T,
            vocab_start=first * WIDTH,
            vocab_size=live.vocab_size,
            impl=self._impl,
            temperature=temperature,
        )
        counts = [after - before for before, after in itertools.pairwise(bounds)]
        missing = max(counts) - part.max_TJ.shape[1]  # a collective wants equal shapes
        max_RTJ, sumexp_RTJ = (
            live.tp.gathered(torch.nn.functional.pad(x_TJ, (0, missing), value=torch.nan)) for x_TJ in (part.max_TJ, part.sumexp_TJ)
        )
        target_RT, owns_RT = live.tp.gathered(part.target_T), live.tp.gathered(part.owns_T.to(torch.uint8))
        parts = [
            VocabPartials(
                max_TJ=max_RTJ[rank][:, :count],
                sumexp_TJ=sumexp_RTJ[rank][:, :count],
                target_T=target_RT[rank],
                owns_T=owns_RT[rank].bool(),
                first_tile=bounds[rank],
            )
            for rank, count in enumerate(counts)
        ]
        return logprob.merge(parts, vocab_size=live.vocab_size, impl=self._impl)

    def _first_tile(self, rank: int) -> int:
        """The first tile whose first column lies in `rank`'s shard or behind it."""
        column = min(rank * self._live.head_shard_width, self._live.vocab_size)
        return -(-column // WIDTH)

    def _joined(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """The shards joined by `way`, from this rank's own columns. float32 [T]."""
        live, width = self._live, self._live.head_shard_width
        start = live.tp.rank * width
        prepared_TV = live.chain.apply(logits_TV.float())
        own_TV = prepared_TV[:, start : min(start + width, live.vocab_size)]
        return logprob_ways.selected(own_TV, targets_T, start=start, way=self.way, tp=live.tp)
