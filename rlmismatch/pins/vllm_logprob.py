"""The log-softmax and its gather inside vLLM: the pin `logprob`, and the ways of the knob `logprob.reduce`.

vLLM gathers the logits of all TP ranks and runs one log-softmax over the real vocabulary on every rank. The two other ways stand
on this rank's own shard of those logits, at the engine's live shard bounds: the gather copied them, so they are what the rank computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch

from rlmismatch.kernels import logprob
from rlmismatch.kernels.logprob import WIDTH, VocabPartials
from rlmismatch.kernels.logprob import reference as logprob_fp64
from rlmismatch.pins.hooks import OpSwitch, Patch
from rlmismatch.pins.vllm_live import LiveModel

LogprobReduce = Literal["allgather_logits", "allgather_partials_fixed_merge", "allreduce_partials"]
NATIVE_REDUCE: Final[LogprobReduce] = "allgather_logits"
PINNED_REDUCE: Final[LogprobReduce] = "allgather_partials_fixed_merge"  # what the pin is, on one shard as on many


def unsupported_reduce(live: LiveModel, how: str) -> str | None:
    """Why this engine can not reduce the log-prob the way `how`, or None."""
    if how not in get_args(LogprobReduce):
        return f"unknown; one of: {', '.join(get_args(LogprobReduce))}"
    width = live.head_shard_width
    if how == "allgather_partials_fixed_merge" and live.size > 1 and width % WIDTH:
        return f"the engine's vocabulary shards of {width} columns cut tiles of {WIDTH}"
    return None


class LogprobOp:
    """The log-softmax and its gather as one operation: a row's logits and a target id in, the target's log-prob out.

    The engine calls the two one after the other, for prompt and for sampled tokens alike. An arm's requests are greedy and without
    logits processors, so nothing writes into the logits between the two. `how` None: as the pin says, or the engine's own.
    """

    def __init__(self, live: LiveModel, *, impl: logprob.Impl, switch: OpSwitch, how: LogprobReduce | None) -> None:
        self.how = how
        self._live = live
        self._impl = impl
        self._switch = switch
        self._logits_TV: torch.Tensor | None = None

    def patches(self) -> tuple[Patch, Patch]:
        sampler = self._live.sampler
        return (
            Patch(target=sampler, name="compute_logprobs", make=self._softmax, pins=("logprob",), label="log_softmax"),
            Patch(target=sampler, name="gather_logprobs", make=self._gather, pins=("logprob",), label="logprob"),
        )

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

        def native() -> torch.Tensor:
            return native_T

        def pinned() -> torch.Tensor:
            return logprob.selected(logits_TV, targets_T, vocab_size=live.vocab_size, impl=self._impl, temperature=live.temperature)

        def exact() -> torch.Tensor:
            logp_TV = logprob_fp64.log_softmax_fp64(logits_TV, vocab_size=live.vocab_size, temperature=live.temperature)
            return logp_TV.gather(1, targets_T[:, None])[:, 0]

        chosen: dict[LogprobReduce | None, Callable[[], torch.Tensor] | None] = {
            None: None,
            "allgather_logits": native,
            "allgather_partials_fixed_merge": lambda: self._merged(logits_TV, targets_T),
            "allreduce_partials": lambda: self._all_reduced(logits_TV, targets_T),
        }
        return self._switch.run(
            "logprob",
            native=native,
            pinned=pinned,
            exact=exact,
            parts=lambda logp_T: {"logprob": logp_T},
            split="whole",
            chosen=chosen[self.how],
        )

    def _merged(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """The pin's arithmetic over real shards: every rank's tiles, gathered and folded in global order. float32 [T]."""
        live, width = self._live, self._live.head_shard_width
        part = logprob.partials(
            logits_TV[:, live.rank * width : (live.rank + 1) * width],
            targets_T,
            vocab_start=live.rank * width,
            vocab_size=live.vocab_size,
            impl=self._impl,
            temperature=live.temperature,
        )
        tiles = -(-width // WIDTH)  # of a full shard; the last ranks may own fewer, and a collective wants equal shapes
        missing = tiles - part.max_TJ.shape[1]
        max_RTJ, sumexp_RTJ = (
            live.gather(torch.nn.functional.pad(x_TJ, (0, missing), value=torch.nan)) for x_TJ in (part.max_TJ, part.sumexp_TJ)
        )
        target_RT, owns_RT = live.gather(part.target_T), live.gather(part.owns_T.to(torch.uint8))
        parts = []
        for rank in range(live.size):
            own = max(0, min((rank + 1) * width, live.vocab_size) - rank * width)
            kept = -(-own // WIDTH)
            parts.append(
                VocabPartials(
                    max_TJ=max_RTJ[rank][:, :kept],
                    sumexp_TJ=sumexp_RTJ[rank][:, :kept],
                    target_T=target_RT[rank],
                    owns_T=owns_RT[rank].bool(),
                    first_tile=rank * tiles,
                )
            )
        return logprob.merge(parts, vocab_size=live.vocab_size, impl=self._impl)

    def _all_reduced(self, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """As Megatron's vocab-parallel cross entropy: maximum, target and sum of exponentials all-reduced in float32. [T]."""
        live, width = self._live, self._live.head_shard_width
        start = live.rank * width
        shard_TV = logits_TV[:, start : min(start + width, live.vocab_size)].float() / live.temperature
        # One column of -inf: a rank whose shard is padding alone has a maximum too.
        shard_TV = torch.nn.functional.pad(shard_TV, (0, 1), value=-torch.inf)
        max_T = self._summed(shard_TV.amax(dim=1), torch.distributed.ReduceOp.MAX)
        shifted_TV = shard_TV - max_T[:, None]
        local_T = targets_T - start
        owns_T = (local_T >= 0) & (local_T < shard_TV.shape[1] - 1)
        target_T = shifted_TV.gather(1, local_T.where(owns_T, 0)[:, None])[:, 0].where(owns_T, 0.0)
        target_T = self._summed(target_T, torch.distributed.ReduceOp.SUM)
        sumexp_T = self._summed(shifted_TV.exp().sum(dim=1), torch.distributed.ReduceOp.SUM)
        return target_T - sumexp_T.log()

    def _summed(self, x_T: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
        if self._live.size > 1:
            torch.distributed.all_reduce(x_T, op=op, group=self._live.group)
        return x_T
