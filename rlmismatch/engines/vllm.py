"""The rollout: a real vLLM engine, one rank of it in this process, as `Engine` (protocol.py).

vLLM's external launcher runs the whole engine (scheduler, runner, model) in the caller's process on every rank, so the live
objects can be read and hooked. Works with the CPU build 0.32 and with 0.24 on CUDA; what differs between them is said where it does.
One class, for its state is one live engine's, and so 400 lines; what it reads, probes and plants stands in the vllm_* files beside it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, get_args

import torch

from rlmismatch.checkpoint import Checkpoint
from rlmismatch.contract import Reading
from rlmismatch.engines import (
    attention_forced,
    attention_forms,
    attention_knobs,
    attention_sinks,
    gemm_flags,
    gemm_flips,
    gemm_knobs,
    logprob_knobs,
    vllm_attention_capture,
    vllm_attention_trial,
    vllm_compile,
    vllm_forced,
    vllm_gemm_probe,
    vllm_kernel_calls,
    vllm_knobs,
    vllm_memory,
    vllm_paged,
    vllm_plants,
    vllm_plants_attention,
    vllm_probe,
    vllm_provenance,
    vllm_readings,
    vllm_readings_attention,
    vllm_shared_memory,
    vllm_sums,
    vllm_transforms,
    vllm_weights,
)
from rlmismatch.engines.gemm_probe import Seen
from rlmismatch.engines.protocol import NOT_PACKED, Arm, ArmResult, SideConfig
from rlmismatch.engines.vllm_attention_trial import AttentionTrial
from rlmismatch.engines.vllm_collectives import CollectiveLog
from rlmismatch.engines.vllm_paged import CacheTrial
from rlmismatch.engines.vllm_scoring import RolloutPath, Scorer, tokenised
from rlmismatch.engines.vllm_site import Site
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.hooks import OpSwitch, Recorder, hook_probe, installed
from rlmismatch.pins.spec import PINS
from rlmismatch.pins.vllm import VllmPins
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.tokens import Prompt, Sequence

_PAGE_MULTIPLE = {"cpu": 32, "cuda": 16}  # what CPU_ATTN and FLASH_ATTN take


class VllmEngine:
    """One rank of a vLLM engine. Construct, `load`, then any of the rest; `Engine` says what each returns."""

    def __init__(self, config: SideConfig, *, rank: int, local_rank: int) -> None:
        self.config = config
        self._rank = rank
        self._local_rank = local_rank
        self._stack = contextlib.ExitStack()

    def load(self) -> None:
        config = self.config
        if config.cp > 1:
            raise UsageError("context-parallel-not-built", "the rollout side runs without context parallelism", where="rollout")
        if not config.temperature > 0:
            raise UsageError("temperature-not-positive", f"temperature is {config.temperature}", where="rollout")
        multiple = _PAGE_MULTIPLE[config.device]
        if config.block_size % multiple:
            raise UsageError(
                "block-size-unsupported",
                f"vLLM's attention on {config.device} keeps pages of a multiple of {multiple} tokens, not of {config.block_size}",
                where="rollout",
                hint=f"--block-size {max(multiple, config.block_size // multiple * multiple)}",
            )
        self._checkpoint = Checkpoint.open(config.ckpt)
        model = self._checkpoint.config
        model.check_fits(config.tp, side="rollout")
        attention_knobs.check(config, model.sliding_window)
        self._plants = vllm_plants.chosen(config, model)
        self._set_environment()
        # Ranks that do not share a name have no shared memory in common: vLLM then sums by gloo.
        apart = gemm_knobs.all_reduce_backend(config) == "gloo" and config.device == "cpu"
        with vllm_shared_memory.of_this_run(f"-{self._rank}" if apart else ""):
            self._llm = self._start()
        self._worker = self._llm.llm_engine.model_executor.driver_worker.worker
        runner = self._worker.model_runner
        group = self._tp_group()
        self._live = LiveModel(
            model=runner.model,
            sampler=runner.sampler,
            tp=TpGroup(group=group.device_group, size=group.world_size, rank=group.rank_in_group),
            all_reduce=_all_reduce,
            eps=model.rms_eps,
            inv_freq=model.rope.inv_freq(model.head_dim).to(runner.device),
            num_kv_heads=model.num_kv_heads,
            vocab_size=model.vocab_size,
            chain=logprob_knobs.chain_of(config),
            window=model.sliding_window,
            sink=attention_sinks.asked(config),
        )
        backend = self._live.layers[0].self_attn.attn.attn_backend
        if not backend.supports_head_size(model.head_dim):  # the CPU's says so in the middle of the first step only
            raise EnvironmentUnfitError(
                "attention-head-dim-unsupported",
                f"vLLM's {backend.get_name()} has no kernel for heads of {model.head_dim}",
                where="rollout",
                hint=f"it has {', '.join(map(str, backend.get_supported_head_sizes()))}",
            )
        impls = [layer.self_attn.attn.impl for layer in self._live.layers]
        attention_sinks.into_rollout(impls, attention_sinks.given(config), dtype=runner.dtype, device=runner.device)
        self._host_group = group.cpu_group if group.world_size > 1 else None
        self._scorer = Scorer(
            llm=self._llm,
            runner=runner,
            chunk_size=config.chunk_size,
            block_size=int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
            older_weights=(functools.partial(vllm_plants_attention.older_weights, self._live) if "stale_kv" in self._plants else None),
        )
        self._stack.enter_context(vllm_transforms.in_force(self._live, config))
        self._stack.enter_context(gemm_flags.in_force(config))
        self._collectives = CollectiveLog(group.device_communicator)
        # What replaces the engine's sum goes in first, then what counts, so that a replacement is counted too.
        sums = vllm_sums.replacements(config, self._live.tp, group.device_communicator, self._collectives)
        for patches in (sums, self._collectives.patches(runner)):
            self._stack.enter_context(installed(patches))
        splits = config.knobs.get("attention.split_kv_policy", "auto")
        if config.device == "cuda" and splits != "auto":
            self._stack.enter_context(installed(vllm_kernel_calls.fixed_splits(self._live, int(splits))))
        for plant in self._plants.values():
            self._stack.enter_context(installed(plant.apply(self._live, config)))

    def readings(self) -> Mapping[str, Mapping[str, Reading]]:
        readings = vllm_readings.readings(self._site())
        vllm_plants.overridden(readings, self._plants)
        return readings

    def weight_digests(self) -> Mapping[str, str]:
        return vllm_weights.digests(self._live, self._checkpoint.config)

    def provenance(self) -> Mapping[str, Any]:
        return vllm_provenance.provenance(self._site())

    def generate(self, prompts: Seq[Prompt], *, max_new_tokens: int, seed: int) -> tuple[Sequence, ...]:
        tokenizer = self._llm.get_tokenizer() if self._checkpoint.has_tokenizer else None
        return self._scorer.sample(
            tokenised(prompts, tokenizer),
            max_new_tokens=max_new_tokens,
            chain=logprob_knobs.planted_chain(self._live.chain, self.config.plants),
            seed=seed,
            stop_at_eos=tokenizer is not None,
        )

    def run(self, arm: Arm, sequences: Seq[Sequence]) -> ArmResult:
        started = time.perf_counter()
        self._check(arm, sequences)
        if arm.probe == "grads":
            raise UsageError("probe-unknown", "the rollout has no backward", where=f"arm {arm.id}")
        boundary = arm.probe == "boundary"
        recorder = Recorder()
        switch = OpSwitch(active=arm.pins, probe=hook_probe(arm.probe), recorder=recorder)
        knobs = vllm_knobs.resolve(self.config, arm.settings, self._live, self._attention_knobs())
        pins = VllmPins(self._live, impl=self.config.impl, switch=switch, way=knobs.way, policy=attention_knobs.resolve(self.config).policy)
        result = ArmResult(arm=arm)
        began = (Counter(self._collectives.calls), Counter(self._collectives.steps))
        calls = vllm_compile.PathCalls(switch.calls)
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if arm.probe in ("logits", "attention"):
            watch = (vllm_probe.watching_head if arm.probe == "logits" else vllm_attention_capture.watching)(self._live)
        products = vllm_gemm_probe.watching(self._live) if arm.probe == "gemm" else contextlib.nullcontext()
        other = attention_forced.asked(arm)
        forced = vllm_forced.in_force(self._live, self._worker.model_runner, other) if other else contextlib.nullcontext()
        with installed(pins.patches()) as counter, watch as seen, products as operands, forced as attended:
            for path in ("prefill",) if boundary else arm.paths:
                refused = self._scorer.why_not_packed(sequences) if path == "prefill_packed" else ""
                if refused:  # each sequence alone would be compared with itself
                    result.notes.append(f"{NOT_PACKED}{refused}")
                    continue
                with calls.of(path):
                    result.scores[path] = self._scorer.score(path, sequences[:1] if boundary else sequences)  # type: ignore[arg-type]
            stepped: dict[str, torch.Tensor] = {}
            if operands is not None:
                operands.enough = True
                stepped = vllm_gemm_probe.steps(sequences, scorer=self._scorer, log=self._collectives, began=began)
        # The attention knobs again: some can be read back from the scored steps only.
        outcomes = knobs.outcomes | self._gemm_outcomes(self._collectives.all_reduces(began[0])) | self._attention_knobs()
        result.knobs = gemm_knobs.under_pin(logprob_knobs.under_pin(outcomes, arm.pins), arm.pins)
        if other and attended is not None:
            result.knobs[attention_forced.SETTING] = attention_forced.came_of(other, attended)
        result.calls = {pin: calls.total(pin) for pin in sorted(arm.pins)}
        result.local = recorder.local_errors(self._host_group) if arm.probe == "local" else []
        result.boundaries = pins.boundaries(self._host_group) if boundary else {}
        if arm.probe == "attention":
            result.boundaries, notes = vllm_attention_capture.probe(self._live, self.config, seen)
            result.notes += notes
        if arm.probe == "logits":
            result.boundaries = vllm_probe.probe(self._live, seen, result.scores["prefill"], sequences, self.config.impl)
        if operands is not None:
            result.boundaries = stepped | self._gemm_replay(operands, sequences)
            result.notes += gemm_flips.notes(self.config)
        silent = counter.silent()
        if silent:
            result.notes.append(f"{len(silent)} hooks never ran: {', '.join(silent[:5])}")
        result.seconds = time.perf_counter() - started
        return result

    def close(self) -> None:
        self._stack.close()
        self._llm.llm_engine.engine_core.shutdown()

    def _gemm_replay(self, operands: Seen, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        return vllm_gemm_probe.replay(
            self._live,
            operands,
            sequences,
            log=self._collectives,
            communicator=self._tp_group().device_communicator,
            impl=self.config.impl,
            interpreted=self.config.device == "cpu" and self.config.impl == "triton",
        )

    def _gemm_outcomes(self, ran: Mapping[str, Mapping[str, int]]) -> dict[str, logprob_knobs.Outcome]:
        """What became of the GEMM family's knobs. ran: the all-reduces of the arm, backend -> payload -> calls."""
        config, tp = self.config, self._live.tp.size
        cpu = "" if config.device == "cuda" else "vLLM's CPU build has no batch-invariant kernels; the promise is tested all the same"
        known = (
            gemm_knobs.flag_outcomes(config)
            | gemm_knobs.mode_outcome(config, "batch_invariant", live=gemm_knobs.vllm_batch_invariant(), refused=cpu)
            | gemm_knobs.sum_outcome(config, tp=tp)
            | gemm_knobs.backend_outcome(config, ran, tp=tp, idle=self._collectives.why_idle(gemm_knobs.all_reduce_backend(config)))
        )
        return known | gemm_knobs.not_for(config, known, "rollout")

    def _check(self, arm: Arm, sequences: Seq[Sequence]) -> None:
        model = self._checkpoint.config
        every = frozenset(PINS) - (frozenset() if model.qk_norm else {"qk_norm"})
        if arm.pins - frozenset(PINS):
            raise UsageError("pin-unknown", f"unknown pins {sorted(arm.pins - frozenset(PINS))}", hint=f"known: {', '.join(PINS)}")
        if set(arm.paths) - set(get_args(RolloutPath)):
            raise UsageError("path-unknown", f"the rollout scores by {', '.join(get_args(RolloutPath))}, not by {sorted(arm.paths)}")
        if arm.probe == "boundary" and not arm.pins >= every:
            raise UsageError("boundary-probe-needs-every-pin", f"pins missing: {sorted(every - arm.pins)}", where=f"arm {arm.id}")
        for sequence in sequences:
            if len(sequence.token_ids) > self._max_length:
                raise UsageError(
                    "sequence-too-long",
                    f"sequence {sequence.id!r} has {len(sequence.token_ids)} tokens, the model takes {self._max_length}",
                )
            bad = [t for t in sequence.token_ids if not 0 <= t < model.vocab_size]
            if bad:
                raise UsageError(
                    "token-outside-vocabulary",
                    f"sequence {sequence.id!r} holds token id {bad[0]}, the vocabulary has {model.vocab_size}",
                )

    @property
    def _max_length(self) -> int:
        return min(self.config.max_model_len, self._checkpoint.config.max_positions)

    def _set_environment(self) -> None:
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK=str(self._local_rank),
            WORLD_SIZE=str(self.config.world_size),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, where its objects can be reached
            VLLM_USE_V2_MODEL_RUNNER="0",
            VLLM_USE_FLASHINFER_SAMPLER="0",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # for the one token beyond a full sequence, see _start
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if self.config.device == "cpu" and self.config.knobs.get("attention.split_kv_policy") in ("auto", "1"):
            os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0" if self.config.knobs["attention.split_kv_policy"] == "1" else "1"
        if self.config.device == "cpu" and vllm_compile.mode_of(self.config) == "eager":
            # Nothing of an eager model is compiled, but vLLM compiles the rank counter behind its log-probs: up to 20 s, once.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    def _start(self) -> Any:
        from vllm import LLM

        gc.freeze()  # vLLM collects garbage again and again while it starts: not among its own modules
        config, length = self.config, self._max_length
        options = cuda_options(config) if config.device == "cuda" else {}
        if config.knobs.get("attention.prefix_cache") is not None:
            options["enable_prefix_caching"] = config.knobs["attention.prefix_cache"] == "on"
        if "backend_fell_back" in self._plants:
            options["attention_config"] = {"backend": "FLASH_ATTN"}
        return LLM(
            model=config.ckpt,
            skip_tokenizer_init=not self._checkpoint.has_tokenizer,
            tensor_parallel_size=config.tp,
            distributed_executor_backend="external_launcher",
            dtype=config.dtype,
            seed=config.seed,
            # A prefill is scored by its prompt log-probs, and vLLM always samples one token more.
            max_model_len=length + 1,
            max_num_batched_tokens=max(length + 1, 2048),
            max_num_seqs=vllm_memory.MAX_SEQUENCES,
            kv_cache_memory_bytes=vllm_memory.kv_cache_bytes(
                config, self._checkpoint.config, weights=self._checkpoint.num_bytes, length=length + 1, local_rank=self._local_rank
            ),
            block_size=config.block_size,
            **vllm_compile.start_options(config),
            async_scheduling=False,
            logprobs_mode="raw_logprobs",
            load_format="safetensors",
            generation_config="vllm",
            disable_log_stats=True,
            **options,
        )

    def _tp_group(self) -> Any:
        from vllm.distributed import get_tp_group

        return get_tp_group()

    def _site(self) -> Site:
        return Site(
            scheduler=self._scorer.scheduler,
            worker=self._worker,
            live=self._live,
            config=self.config,
            model=self._checkpoint.config,
            tp=self._tp_group(),
            collectives=self._collectives,
            plants={name: plant.what for name, plant in self._plants.items()},
            trial=self._trial,
            cache=self._cache_trial,
        )

    def _attention_knobs(self) -> dict[str, dict[str, Any]]:
        """What became of the attention family's knobs, as far as the engine has shown yet."""
        if not any(knob.startswith(attention_forms.PREFIX) for knob in self.config.knobs):
            return {}
        return attention_forms.rollout_outcomes(
            self.config,
            caching=bool(self._scorer.scheduler.kv_cache_manager.enable_caching),
            kv_splits=self._trial.kv_splits,
            cached=self._scorer.cached,
        )

    @functools.cached_property
    def _cache_trial(self) -> CacheTrial:
        """What the live KV cache was found to hold, once a load. Collective."""
        caching = bool(self._scorer.scheduler.kv_cache_manager.enable_caching)
        with self._uncaptured():
            return vllm_paged.ask(self._live, self._scorer, longest=self._max_length, caching=caching)

    @functools.cached_property
    def _trial(self) -> AttentionTrial:
        """What the live attention was found to do, once a load: plants are in by then. Collective."""
        with self._uncaptured():
            return vllm_attention_trial.ask(
                self._live,
                self._scorer,
                self._checkpoint,
                window=max(vllm_readings_attention.window(layer.self_attn.attn.impl.sliding_window) for layer in self._live.layers),
                longest=self._max_length,
                scale=self._checkpoint.config.head_dim**-0.5,
            )

    def _uncaptured(self) -> contextlib.AbstractContextManager[None]:
        return vllm_compile.uncaptured(self._live.model.model, self._worker.model_runner)


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    from vllm.distributed import tensor_model_parallel_all_reduce

    out: torch.Tensor = tensor_model_parallel_all_reduce(x)
    return out


def cuda_options(config: SideConfig) -> dict[str, Any]:
    """What `LLM` is given on a GPU alone."""
    options: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_fraction,
        # FlashAttention has no float32. Both keep their pages as the pin reads them.
        "attention_config": {"backend": "TRITON_ATTN" if config.dtype == "float32" else "FLASH_ATTN"},
    }
    backend = gemm_knobs.all_reduce_backend(config)
    if config.ranks_per_gpu > 1:
        options["disable_custom_all_reduce"] = True  # it would ask for a peer that is not there
    elif backend in gemm_knobs.CUDA_BACKENDS:
        options["disable_custom_all_reduce"] = backend != "custom"
    return options
