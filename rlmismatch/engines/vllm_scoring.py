"""Log-probs of given token ids out of a live vLLM engine, in the three forms a rollout engine computes them; and sampling.

prefill: the whole sequence in one step, its prompt log-probs. chunked: the same in steps of a few tokens. decode: the prompt in one
step, then one token a step, the given ids put in place of the sampled ones. Prefill and chunked run one sequence at a time, as the
trainer does; decode runs all of them together, as `generate` did when it recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlmismatch.errors import EngineError, UsageError
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.tokens import Prompt, Sequence
from rlmismatch.transforms import Chain

RolloutPath = Literal["prefill", "chunked", "decode"]
# Key in a request's extra arguments that carries the ids to force.
_FORCED = "rlmismatch_forced_ids"


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores and samples on `llm`, a vllm.LLM with the V1 runner whose scheduler and runner live in this process."""

    llm: Any
    runner: Any
    chunk_size: int

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def score(self, path: RolloutPath, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        """Sequence id -> float64 [len(response_ids)], nats, of the response ids given prompt and earlier response ids.

        The prefix cache is emptied before and after. Raises EngineError if the engine scored other ids than those given, read a
        cached token, or did not schedule steps of the form the path stands for.
        """
        self.reset_cache()
        try:
            scores = self._decode(sequences) if path == "decode" else {s.id: self._prefill(s, path) for s in sequences}
        except BaseException:
            self._abort_all()
            raise
        self.reset_cache()
        return scores

    def sample(self, prompts: Seq[Prompt], *, max_new_tokens: int, chain: Chain, seed: int, stop_at_eos: bool) -> tuple[Sequence, ...]:
        """One response a prompt, all prompts together. The engine's log-probs while decoding are kept as recorded log-probs."""
        params = [
            self._params(
                temperature=chain.value("temperature"),
                top_p=chain.value("top_p"),
                top_k=int(chain.value("top_k")) or -1,
                min_p=chain.value("min_p"),
                max_tokens=max_new_tokens,
                logprobs=0,
                ignore_eos=not stop_at_eos,
                skip_reading_prefix_cache=True,
                # Equal prompts are to give different responses.
                seed=seed + i,
            )
            for i in range(len(prompts))
        ]
        self.reset_cache()
        outputs = self._generate([p.token_ids for p in prompts], params)
        self.reset_cache()
        sequences = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = tuple(output.outputs[0].token_ids)
            recorded = _sampled_logprobs(output, ids, prompt.id)
            sequences.append(
                Sequence(id=prompt.id, prompt_ids=prompt.token_ids, response_ids=ids, recorded_logprobs=tuple(recorded), text=prompt.text)
            )
        return tuple(sequences)

    def reset_cache(self) -> None:
        """Forget every cached block. Keys and values of another arm's arithmetic must not be read."""
        if not self.llm.reset_prefix_cache():
            raise EngineError("prefix-cache-not-reset", "vLLM refused to reset its prefix cache: a request still runs", where="rollout")

    def _abort_all(self) -> None:
        """Drop the requests that an error left in the engine."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _prefill(self, sequence: Sequence, path: RolloutPath) -> torch.Tensor:
        ids, start = sequence.token_ids, len(sequence.prompt_ids)
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        with self._steps_of(self.chunk_size if path == "chunked" else None) as steps:
            (output,) = self._generate([ids], [params])
        expected = -(-len(ids) // self.chunk_size) if path == "chunked" else 1
        if len(steps) != expected or sum(steps) != len(ids):
            raise EngineError(
                "rollout-steps-differ",
                f"{path} of {sequence.id!r} ({len(ids)} tokens) took steps of {steps}, expected {expected}",
                where="rollout",
            )
        entries = output.prompt_logprobs
        if entries is None or len(entries) != len(ids):
            raise EngineError("rollout-logprobs-missing", f"vLLM returned no prompt log-probs for {sequence.id!r}", where="rollout")
        missing = next((i for i in range(start, len(ids)) if ids[i] not in entries[i]), None)
        if missing is not None:
            raise EngineError("rollout-ids-differ", f"position {missing} of {sequence.id!r} was scored for another id", where="rollout")
        return torch.tensor([entries[i][ids[i]].logprob for i in range(start, len(ids))], dtype=torch.float64)

    def _decode(self, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        scored = [s for s in sequences if s.response_ids]
        params = [
            self._params(
                temperature=0.0,
                max_tokens=len(s.response_ids),
                logprobs=0,
                ignore_eos=True,
                skip_reading_prefix_cache=True,
                extra_args={_FORCED: list(s.response_ids)},
            )
            for s in scored
        ]
        with installed([Patch(target=self.runner.sampler, name="sample", make=self._forced, pins=(), label="forced sample")]):
            outputs = self._generate([s.prompt_ids for s in scored], params)
        out = {s.id: torch.empty(0, dtype=torch.float64) for s in sequences}
        for s, output in zip(scored, outputs, strict=True):
            out[s.id] = torch.tensor(_sampled_logprobs(output, s.response_ids, s.id), dtype=torch.float64)
        return out

    def _forced(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's own sampling, with the ids of the request put in place of what it chose; log-probs are read afterwards."""
        runner = self.runner

        def sample(*args: Any, **kwargs: Any) -> Any:
            sampled, processed = native(*args, **kwargs)
            ids = sampled.tolist()
            for row, request_id in enumerate(runner.input_batch.req_ids[: len(ids)]):
                request = runner.requests[request_id]
                forced, step = request.sampling_params.extra_args[_FORCED], len(request.output_token_ids)
                # A prompt still being prefilled in chunks samples too, and the engine discards that token.
                ids[row] = forced[step]
            sampled.copy_(torch.tensor(ids, dtype=sampled.dtype))
            return sampled, processed

        return sample

    @contextlib.contextmanager
    def _steps_of(self, limit: int | None) -> Iterator[list[int]]:
        """Yields the token counts of the steps that the scheduler really makes, at most `limit` tokens each."""
        scheduler, steps = self.scheduler, list[int]()

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def schedule(*args: Any, **kwargs: Any) -> Any:
                out = native(*args, **kwargs)
                if out.total_num_scheduled_tokens:
                    steps.append(out.total_num_scheduled_tokens)
                return out

            return schedule

        before = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = limit or before
        try:
            with installed([Patch(target=scheduler, name="schedule", make=make, pins=(), label="schedule")]):
                yield steps
        finally:
            scheduler.max_num_scheduled_tokens = before

    def _params(self, **options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(detokenize=False, **{"top_p": 1.0, "top_k": -1, **options})

    def _generate(self, prompts: Seq[Seq[int]], params: list[Any]) -> list[Any]:
        from vllm import TokensPrompt

        if not prompts:
            return []
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            if list(output.prompt_token_ids) != list(prompt):
                raise EngineError("rollout-ids-differ", "vLLM changed the prompt's token ids", where="rollout")
            if output.num_cached_tokens:
                raise EngineError(
                    "rollout-cache-hit", f"vLLM read {output.num_cached_tokens} tokens from its prefix cache", where="rollout"
                )
        return list(outputs)


def tokenised(prompts: Seq[Prompt], tokenizer: Any | None) -> tuple[Prompt, ...]:
    """The prompts with token ids: text goes through `tokenizer` once, with the special tokens it adds by default."""
    out = []
    for prompt in prompts:
        if prompt.token_ids:
            out.append(prompt)
            continue
        if tokenizer is None:
            raise UsageError(
                "prompt-needs-tokenizer",
                f"prompt {prompt.id!r} is text, and the checkpoint holds no tokenizer",
                hint="give token_ids in the prompts file",
            )
        ids = tuple(tokenizer(prompt.text).input_ids)
        if not ids:
            raise UsageError("prompt-empty", f"prompt {prompt.id!r} has no token after tokenisation")
        out.append(Prompt(id=prompt.id, token_ids=ids, text=prompt.text))
    return tuple(out)


def _sampled_logprobs(output: Any, ids: Seq[int], sequence: str) -> list[float]:
    """The log-prob of every generated id, in nats. Raises EngineError unless `ids` are what was generated."""
    completion = output.outputs[0]
    if tuple(completion.token_ids) != tuple(ids):
        raise EngineError("rollout-ids-differ", f"vLLM decoded other ids than those of {sequence!r}", where="rollout")
    if completion.logprobs is None or len(completion.logprobs) != len(ids):
        raise EngineError("rollout-logprobs-missing", f"vLLM returned no log-probs for {sequence!r}", where="rollout")
    return [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
