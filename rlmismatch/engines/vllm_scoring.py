"""Log-probs of given token ids out of a live vLLM engine, in the forms a rollout engine computes them; and sampling.

prefill: the whole sequence in one step, its prompt log-probs. chunked: the same in steps of a few tokens. paged: the same behind a prefix
whose K and V are read from the prefix cache. decode: the prompt in one step, then one token a step, the given ids put in place of the
sampled ones. These run one sequence at a time, as the trainer does, but for decode, which runs all of them together, as `generate` did
when it recorded. Where pages lie and what a prefix hit saves is told by further paths: decode_hit is decode behind a prefix hit, and
prefill_shuffled and decode_shuffled hand pages out in another order. prefill_packed puts all sequences into one packed prefill.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from rlmismatch.errors import EngineError, UsageError
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.tokens import Prompt, Sequence
from rlmismatch.transforms import Chain

RolloutPath = Literal["prefill", "chunked", "paged", "decode", "decode_hit", "prefill_shuffled", "decode_shuffled", "prefill_packed"]
# Key in a request's extra arguments that carries the ids to force.
_FORCED = "rlmismatch_forced_ids"
_SHUFFLED_PAGES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores and samples on `llm`, a vllm.LLM with the V1 runner whose scheduler and runner live in this process."""

    llm: Any
    runner: Any
    chunk_size: int
    block_size: int
    # A fault put in on purpose: weights that are in force while it is open fill the prefix cache, which is not reset behind them.
    older_weights: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    # path -> sequence id -> tokens that the last request of that path read from the prefix cache
    cached: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def score(self, path: RolloutPath, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        """Sequence id -> float64 [len(response_ids)], nats, of the response ids given prompt and earlier response ids.

        The prefix cache is emptied before and after. Raises EngineError if the engine scored other ids than those given, read a
        cached token where the path has none, or did not schedule steps of the form the path stands for.
        """
        self.reset_cache()
        form, _, how = path.partition("_")
        try:
            with self.pages_shuffled() if how == "shuffled" else contextlib.nullcontext():
                if form == "decode":
                    scores = self._decode(sequences, path, hit=how == "hit")
                elif how == "packed":
                    scores = self._packed(sequences)
                elif form == "paged":
                    scores = {s.id: self._paged(s) for s in sequences}
                else:
                    scores = {s.id: self._prefill(s.token_ids, len(s.prompt_ids), s.id, form) for s in sequences}
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
        with self._as_sampled():
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

    def request(self, ids: Seq[int], *, new_tokens: int, forget: Literal["both", "before", "after"] = "both", hits: bool = False) -> int:
        """One request of the tokens `ids`, prefilled and continued by `new_tokens`, for what hooks can see of it.

        Returns how many tokens it read from the prefix cache; hits: whether it may. forget: when the cache is emptied.
        """
        if forget != "after":
            self.reset_cache()
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, skip_reading_prefix_cache=not hits)
        try:
            (output,) = self._generate([ids], [params], hits=hits)
        except BaseException:
            self._abort_all()
            raise
        if forget != "before":
            self.reset_cache()
        return int(output.num_cached_tokens or 0)

    def reset_cache(self) -> None:
        """Forget every cached block. Keys and values of another arm's arithmetic must not be read."""
        if not self.llm.reset_prefix_cache():
            raise EngineError("prefix-cache-not-reset", "vLLM refused to reset its prefix cache: a request still runs", where="rollout")

    def _abort_all(self) -> None:
        """Drop the requests that an error left in the engine."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _prefill(self, ids: Seq[int], start: int, name: str, path: str) -> torch.Tensor:
        """float64 [len(ids) - start]: the log-probs of ``ids[start:]``, nothing read from the prefix cache."""
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        with self._steps_of(self.chunk_size if path == "chunked" else None) as steps:
            (output,) = self._generate([ids], [params])
        expected = -(-len(ids) // self.chunk_size) if path == "chunked" else 1
        if len(steps) != expected or sum(steps) != len(ids):
            raise EngineError(
                "rollout-steps-differ",
                f"{path} of {name!r} ({len(ids)} tokens) took steps of {steps}, expected {expected}",
                where="rollout",
            )
        return _prompt_logprobs(output, ids, start, name)

    def why_not_packed(self, sequences: Seq[Sequence]) -> str:
        """Why no two of the sequences can share a prefill step; empty where some can."""
        budget = self.scheduler.max_num_scheduled_tokens
        lengths = [len(s.token_ids) for s in sequences]
        # Steps are filled in the order that is given: two share one wherever two neighbours fit.
        shortest = min((a + b for a, b in itertools.pairwise(lengths)), default=None)
        if shortest is None:
            return "one sequence has no other to share a step with"
        return "" if shortest <= budget else f"a step takes {budget} tokens, and no two sequences in a row have fewer than {shortest}"

    def _packed(self, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        """Every sequence's prefill, several whole ones in one step, as far as the engine's steps hold them."""
        refused = self.why_not_packed(sequences)
        if refused:
            raise EngineError("rollout-cannot-pack", refused, where="rollout")
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        with self._whole_prompts(), self._steps_of(None) as steps:
            outputs = self._generate([s.token_ids for s in sequences], [params] * len(sequences))
        total = sum(len(s.token_ids) for s in sequences)
        # None is cut, so fewer steps than sequences means that some shared one.
        if sum(steps) != total or len(steps) >= len(sequences):
            raise EngineError(
                "rollout-steps-differ",
                f"packed prefill of {len(sequences)} sequences ({total} tokens) took steps of {steps}",
                where="rollout",
            )
        return {s.id: _prompt_logprobs(o, s.token_ids, len(s.prompt_ids), s.id) for s, o in zip(sequences, outputs, strict=True)}

    def _paged(self, sequence: Sequence) -> torch.Tensor:
        """One prefill behind a cached prefix of whole pages: as much of the prompt as there is, or else the first page.

        The prefix itself, and the token that its last row predicts, are scored by the request that fills the cache; of cached rows the
        engine has no log-probs (it returns memory that nobody wrote).
        """
        ids, start = sequence.token_ids, len(sequence.prompt_ids)
        hit = max(self.block_size, (start - 1) // self.block_size * self.block_size)
        self.cached.setdefault("paged", {})[sequence.id] = 0
        if hit > len(ids) - 2:  # no row is left to read it
            return self._prefill(ids, start, sequence.id, "prefill")
        self.reset_cache()
        head = self._prefill(ids[: hit + 1], min(start, hit + 1), sequence.id, "prefill")
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, skip_reading_prefix_cache=False)
        with self._steps_of(None) as steps:
            (output,) = self._generate([ids], [params], hits=True)
        if output.num_cached_tokens != hit or steps != [len(ids) - hit]:
            raise EngineError(
                "rollout-prefix-not-cached",
                f"paged prefill of {sequence.id!r} read {output.num_cached_tokens} cached tokens, expected {hit}, in steps of {steps}",
                where="rollout",
            )
        self.cached["paged"][sequence.id] = hit
        return torch.cat([head, _prompt_logprobs(output, ids, max(start, hit + 1), sequence.id)])

    def _decode(self, sequences: Seq[Sequence], path: RolloutPath, *, hit: bool) -> dict[str, torch.Tensor]:
        scored = [s for s in sequences if s.response_ids]
        prompts = [s.prompt_ids for s in scored]
        if hit or self.older_weights is not None:
            with contextlib.nullcontext() if self.older_weights is None else self.older_weights():
                self._generate(prompts, [self._params(temperature=0.0, max_tokens=1, ignore_eos=True)] * len(prompts), hits=True)
            hit = True
        params = [
            self._params(
                temperature=0.0,
                max_tokens=len(s.response_ids),
                logprobs=0,
                ignore_eos=True,
                skip_reading_prefix_cache=not hit,
                extra_args={_FORCED: list(s.response_ids)},
            )
            for s in scored
        ]
        with self._as_sampled(), installed([Patch(target=self.runner.sampler, name="sample", make=self._forced, pins=(), label="forced")]):
            outputs = self._generate(prompts, params, hits=hit)
        out = {s.id: torch.empty(0, dtype=torch.float64) for s in sequences}
        for s, output in zip(scored, outputs, strict=True):
            out[s.id] = torch.tensor(_sampled_logprobs(output, s.response_ids, s.id), dtype=torch.float64)
        self.cached[path] = {s.id: int(o.num_cached_tokens or 0) for s, o in zip(scored, outputs, strict=True)}
        return out

    @contextlib.contextmanager
    def pages_shuffled(self) -> Iterator[None]:
        """Free pages are handed out in another order than ascending; afterwards in the order they were in."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        before = queue.get_all_free_blocks()
        # Pages are taken from the front: an odd stride through the first ones, so that neighbours in a sequence are none in memory.
        front = min(len(before), _SHUFFLED_PAGES)
        order = sorted(range(front), key=lambda i: (i * 7 % 16, -i))
        taken = queue.popleft_n(len(before))
        queue.append_n([taken[i] for i in (*order, *range(front, len(before)))])
        try:
            yield
        finally:
            if queue.num_free_blocks == len(before):  # after an error requests may still hold some, and the engine is given up
                queue.popleft_n(len(before))
                queue.append_n(before)

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

    def _as_sampled(self) -> contextlib.AbstractContextManager[None]:
        """How responses are sampled, and scored by decode, which is to have the same steps.

        Where a step cuts a prompt, vLLM samples behind the piece, discards the token and sets the request's generator back, which a CPU's
        cannot be.
        """
        return self._whole_prompts() if self.runner.device.type == "cpu" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _whole_prompts(self) -> Iterator[None]:
        """No step cuts a prompt: one that is longer than what a step has left waits for the next. Steps that cut none stay as they are."""
        config = self.scheduler.scheduler_config
        before = config.enable_chunked_prefill
        config.enable_chunked_prefill = False
        try:
            yield
        finally:
            config.enable_chunked_prefill = before

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

    def _generate(self, prompts: Seq[Seq[int]], params: list[Any], *, hits: bool = False) -> list[Any]:
        from vllm import TokensPrompt

        if not prompts:
            return []
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            if list(output.prompt_token_ids) != list(prompt):
                raise EngineError("rollout-ids-differ", "vLLM changed the prompt's token ids", where="rollout")
            if output.num_cached_tokens and not hits:
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


def _prompt_logprobs(output: Any, ids: Seq[int], start: int, sequence: str) -> torch.Tensor:
    """float64 [len(ids) - start], nats, of ``ids[start:]``. Raises EngineError where the engine has none, or scored another id."""
    entries = output.prompt_logprobs
    if entries is None or len(entries) != len(ids):
        raise EngineError("rollout-logprobs-missing", f"vLLM returned no prompt log-probs for {sequence!r}", where="rollout")
    missing = next((i for i in range(start, len(ids)) if ids[i] not in entries[i]), None)
    if missing is not None:
        raise EngineError("rollout-ids-differ", f"position {missing} of {sequence!r} was scored for another id", where="rollout")
    return torch.tensor([entries[i][ids[i]].logprob for i in range(start, len(ids))], dtype=torch.float64)


def _sampled_logprobs(output: Any, ids: Seq[int], sequence: str) -> list[float]:
    """The log-prob of every generated id, in nats. Raises EngineError unless `ids` are what was generated."""
    completion = output.outputs[0]
    if tuple(completion.token_ids) != tuple(ids):
        raise EngineError("rollout-ids-differ", f"vLLM decoded other ids than those of {sequence!r}", where="rollout")
    if completion.logprobs is None or len(completion.logprobs) != len(ids):
        raise EngineError("rollout-logprobs-missing", f"vLLM returned no log-probs for {sequence!r}", where="rollout")
    return [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
