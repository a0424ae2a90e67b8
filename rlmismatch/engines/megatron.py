"""The trainer: real Megatron-core, teacher-forced, one sequence at a time, on one rank of a TP group.

Scores come from the model's own loss path. What an arm changes is hooked in for that arm and taken out again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from rlmismatch.checkpoint import Checkpoint, digest
from rlmismatch.contract import Reading
from rlmismatch.engines import (
    attention_forced,
    attention_knobs,
    attention_sinks,
    gemm_flags,
    gemm_flips,
    gemm_knobs,
    gradient_knobs,
    logprob_knobs,
    megatron_attention,
    megatron_attention_trial,
    megatron_cp,
    megatron_gemm_probe,
    megatron_gradients,
    megatron_knobs,
    megatron_model,
    megatron_plants,
    megatron_probe,
    megatron_provenance,
    megatron_readings,
    megatron_readings_attention,
    megatron_sums,
    megatron_weights,
    megatron_wgrad,
)
from rlmismatch.engines.megatron_attention_trial import AttentionTrial
from rlmismatch.engines.megatron_knobs import TrainerKnobs
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.errors import UsageError
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.context_parallel import ContextParallel
from rlmismatch.pins.hooks import OpSwitch, Patch, Recorder, hook_probe, installed
from rlmismatch.pins.megatron import TrainerOps
from rlmismatch.pins.megatron_logprob import HeadSettings, LossSettings, VocabShard
from rlmismatch.pins.megatron_shape import TrainerShape
from rlmismatch.pins.megatron_te import TransformerEngineOps
from rlmismatch.pins.spec import PINS, boundary_names
from rlmismatch.tokens import Prompt, Sequence


class MegatronEngine:
    """`Engine` over megatron-core. torch.distributed must be initialised with exactly tp * cp ranks before `load`."""

    def __init__(self, config: SideConfig, *, rank: int, local_rank: int) -> None:
        self.config = config
        self.device = torch.device("cuda", local_rank) if config.device == "cuda" else torch.device("cpu")
        # What stays in force as long as the model lives: shims of the environment, and plants.
        self._standing = contextlib.ExitStack()

    def load(self) -> None:
        """Build the model, load the checkpoint, put the plants in.

        Raises UsageError for what is not built or does not fit, EnvironmentUnfitError if the TE spec can not run here.
        """
        config = self.config
        self.checkpoint = checkpoint = Checkpoint.open(config.ckpt)
        self.model = checkpoint.config
        self.model.check_fits(config.tp, side="trainer", sp=config.sp)
        megatron_cp.check(config, self.model)
        attention_knobs.check(config, self.model.sliding_window)
        self.plants = megatron_plants.chosen(config, self.model)

        from megatron.core import parallel_state, tensor_parallel

        if config.device == "cpu":
            self._standing.enter_context(megatron_model.cpu_shims())
        self._standing.enter_context(megatron_model.model_parallel(tp=config.tp, cp=config.cp))
        if config.device == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
        torch.manual_seed(config.seed)
        self.tp = _ranks(parallel_state.get_tensor_model_parallel_group())
        # Which tokens this rank is handed, and which ones rotary embedding and attention take them for: one thing, but for a plant.
        declared = ContextParallel(ranks=_ranks(parallel_state.get_context_parallel_group()), partition=config.cp_partition)
        self.cp = megatron_plants.held_tokens(declared, self.plants)
        self._standing.enter_context(megatron_model.official_modes(config))
        self.gpt = megatron_model.build_model(config, self.model, declared)
        self._standing.enter_context(installed(megatron_cp.rope_patches(config, declared)))
        self._standing.callback(megatron_model.clear_rope_cache, self.gpt)
        megatron_weights.load(self.gpt, checkpoint, tp=self.tp, te=config.trainer_spec == "te", dtype=config.dtype)
        self.shard = VocabShard(tp=self.tp, vocab_size=self.model.vocab_size, padded_vocab_size=self.gpt.vocab_size)
        self._standing.enter_context(gemm_flags.in_force(config))
        self._standing.enter_context(installed(megatron_sums.replacements(config, self.tp)))
        cores = [layer.self_attention.core_attention for layer in self.gpt.decoder.layers]
        attention_sinks.into_trainer(cores, attention_sinks.given(config))
        site = megatron_plants.Site(gpt=self.gpt, config=config, model=self.model, shard=self.shard)
        for plant in self.plants.values():  # one by one: two faults may sit in one place
            self._standing.enter_context(installed(plant.apply(site)))
        self.ops = (TransformerEngineOps if config.trainer_spec == "te" else TrainerOps)(
            self.gpt,
            TrainerShape(
                impl=config.impl,
                sp=config.sp,
                num_heads=self.model.num_heads,
                num_kv_heads=self.model.num_kv_heads,
                head_dim=self.model.head_dim,
                eps=self.model.rms_eps,
                inv_freq=self.model.rope.inv_freq(self.model.head_dim).to(self.device),
                chain=logprob_knobs.chain_of(config),
                head=self._head_settings(),
                window=self.model.sliding_window,
                sink=attention_sinks.asked(config),
                cp=declared,
                attention=attention_knobs.resolve(config).policy,
            ),
            self.shard,
        )
        self._standing.enter_context(megatron_model.fused_loss(self.gpt.config, self.native_settings.fusion))
        if config.grads:
            self.gradient_buffers = megatron_gradients.Buffers(self)
            if self.gradient_buffers.fused:
                self._standing.enter_context(megatron_wgrad.fusion(self.gpt, self.device))

    def run(self, arm: Arm, sequences: Seq[Sequence]) -> ArmResult:
        """Score the sequences under one arm; the native state is back on return, also after an error.

        A boundary probe takes the first sequence only, and needs every pin that the model has an operation for.
        """
        started = time.perf_counter()
        self._check(arm, sequences)
        knobs = self._knobs(arm)
        settings = self._planted(knobs.loss)
        if arm.probe == "grads":
            return megatron_gradients.run(self, arm, sequences)
        switch = OpSwitch(active=arm.pins, probe=hook_probe(arm.probe), recorder=Recorder())
        outcomes = logprob_knobs.under_pin(knobs.outcomes | self._gemm_outcomes(knobs), arm.pins)
        result = ArmResult(arm=arm, knobs=gemm_knobs.under_pin(outcomes, arm.pins))
        scores: dict[str, torch.Tensor] = {}
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if arm.probe in ("logits", "attention"):
            watch = megatron_probe.watching_head(self) if arm.probe == "logits" else megatron_attention.watching(self)
        products = megatron_gemm_probe.watching(self) if arm.probe == "gemm" else contextlib.nullcontext()
        other, attended = attention_forced.asked(arm), attention_forced.Calls()
        forced = self._forced(other, attended) if other else []
        with installed(self.ops.patches(switch, settings)) as counter, installed(forced), watch as seen, products as operands:
            scores |= self.scores(sequences[:1] if arm.probe == "boundary" else sequences)
            alone: dict[str, torch.Tensor] = {}
            if operands is not None:
                operands.enough = True
                alone = megatron_gemm_probe.alone(self, sequences)
        result.scores = dict.fromkeys(arm.paths, scores)
        if other:
            result.knobs[attention_forced.SETTING] = attention_forced.came_of(other, attended)
        result.calls = {pin: switch.calls[pin] for pin in sorted(arm.pins)}
        if self.config.cp > 1 and self.config.trainer_spec == "local":
            result.notes.append(megatron_cp.PINNED_ONLY)
        result.notes += [f"hook {label} was installed and never called" for label in counter.silent()]
        if arm.probe == "local":
            result.local = switch.recorder.local_errors(self.tp.group)
        if arm.probe == "boundary":
            result.boundaries = self._boundaries(switch.recorder)
        if arm.probe == "logits":
            result.boundaries = megatron_probe.probe(self, seen, scores, sequences)
        if arm.probe == "attention":
            result.boundaries, notes = megatron_attention.probe(self, seen)
            result.notes += notes
        if operands is not None:
            interpreted = self.config.device == "cpu" and self.config.impl == "triton"
            result.boundaries = alone | megatron_gemm_probe.replay(self, operands, sequences, interpreted=interpreted)
            result.notes += gemm_flips.notes(self.config)
        result.seconds = time.perf_counter() - started
        return result

    def readings(self) -> Mapping[str, Mapping[str, Reading]]:
        """The contract, read back from the live model; collective. A plant shows where the live model shows it."""
        readings = megatron_readings.read_all(self)
        megatron_plants.overridden(readings, self.plants)
        return readings

    @functools.cached_property
    def attention_trial(self) -> AttentionTrial:
        """What the live attention was found to do, once a load: plants are in by then. Collective."""
        return megatron_attention_trial.ask(self, window=megatron_readings_attention.live_window(self))

    def weight_digests(self) -> Mapping[str, str]:
        """Logical name -> digest of the live tensor, un-sharded, un-fused, without padding; and ``tied``. Complete on rank 0.

        Where ranks hold copies of one tensor that are not equal, it is the digest of all copies: no checkpoint's.
        """
        out = {"tied": "true" if self.live_tied else "false"}
        live = dict(self.gpt.named_parameters())
        model = dataclasses.replace(self.model, tied=self.live_tied)
        for parameter in megatron_weights.parameters(model, te=self.config.trainer_spec == "te"):
            copies = self.cp.ranks.gathered(live[parameter.name].detach())
            one = torch.tensor(all(torch.equal(copies[0], other) for other in copies[1:]), device=self.device)
            parts = self.tp.gathered(copies[0])
            every_rank = bool(torch.stack(self.tp.gathered(one)).all())
            if self.tp.rank == 0:
                tensors = megatron_weights.unshard(parameter.kind, parts, model)
                if parameter.kind == "whole" and not all(torch.equal(parts[0], other) for other in parts[1:]):
                    tensors = (torch.stack(parts),)
                if not every_rank:
                    tensors = tuple(torch.stack([tensor, tensor]) for tensor in tensors)
                out |= {name: digest(tensor) for name, tensor in zip(parameter.sources, tensors, strict=True)}
        return out

    def provenance(self) -> Mapping[str, Any]:
        return megatron_provenance.provenance(self)

    def generate(self, prompts: Seq[Prompt], *, max_new_tokens: int, seed: int) -> tuple[Sequence, ...]:
        raise UsageError("trainer-does-not-generate", "the trainer scores given tokens; only the rollout generates", where="trainer")

    def close(self) -> None:
        self._standing.close()

    @property
    def live_tied(self) -> bool:
        """Whether the live head has no weight of its own."""
        return bool(self.gpt.share_embeddings_and_output_weights) and self.gpt.output_layer.weight is None

    @property
    def native_settings(self) -> LossSettings:
        """What this run asks of the native loss, before any arm. A plant may have a transform left out or moved."""
        return self._planted(self._knobs(Arm(id="native")).loss)

    @property
    def knob_outcomes(self) -> dict[str, dict[str, Any]]:
        """What became of each knob of this run, before any arm."""
        return self._knobs(Arm(id="native")).outcomes

    def _head_settings(self) -> HeadSettings:
        head = self._knobs(Arm(id="load")).head
        return dataclasses.replace(head, dtype=torch.float32) if "head_fp32_one_sided" in self.plants else head

    def _planted(self, loss: LossSettings) -> LossSettings:
        padding = "include" if "pad_rows_included" in self.plants else loss.padding
        return dataclasses.replace(loss, padding=padding, chain=logprob_knobs.planted_chain(loss.chain, self.plants))

    def forward(self, token_ids: Seq[int], labels: Seq[int] | None, *, grad: bool = False) -> torch.Tensor:
        """float32 [S] loss per position, or without labels logits [S, V / tp], of the whole sequence on every rank.

        S is padded on the right to a multiple of 2 CP under context parallelism, times TP under SP. Causal attention keeps the padding
        from reaching any real token. grad: the loss can be differentiated.
        """
        padding = -len(token_ids) % (self.cp.multiple * (self.tp.size if self.config.sp else 1))
        filling = [0] * padding

        def own(ids: Seq[int]) -> torch.Tensor:
            return self.cp.own(torch.tensor([[*ids, *filling]], device=self.device), dim=1)

        length = len(token_ids) + padding
        # Without a mask Megatron's own attention would build one on the GPU; Transformer Engine's, and ours, know the mask by themselves.
        mask = megatron_model.causal_mask(length, self.device) if self.config.trainer_spec == "local" and self.cp.size == 1 else None
        self.ops.begin(len(token_ids))
        with torch.set_grad_enabled(grad):
            out = self.gpt(
                own(token_ids),
                own(range(length - padding)),
                mask,
                labels=None if labels is None else own(labels),
            )
        return self.cp.whole(out[0])

    def scores(self, sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
        """Sequence id -> float64 [len(response_ids)] on the CPU, nats, one sequence after the other."""
        out: dict[str, torch.Tensor] = {}
        before: tuple[int, ...] = ()
        for sequence in sequences:
            out[sequence.id] = self._score(sequence, before)
            # A pack whose segment boundaries are lost is one long sequence.
            before = sequence.token_ids if "packed_without_segments" in self.plants else ()
        return out

    def _score(self, sequence: Sequence, before: tuple[int, ...]) -> torch.Tensor:
        """float64 [len(response_ids)], nats: position t's loss is of token t + 1. before: tokens in front of the sequence's own."""
        ids = (*before, *sequence.token_ids)
        logprob_S = -self.forward(ids, [*ids[1:], 0])
        return logprob_S[len(before) + len(sequence.prompt_ids) - 1 : len(ids) - 1].double().cpu()

    def _boundaries(self, recorder: Recorder) -> dict[str, torch.Tensor]:
        joined = recorder.boundaries(self.tp.group)
        heads = ("q_proj", "k_proj", "v_proj")
        return {
            name: joined[name].view(len(joined[name]), -1, self.model.head_dim) if name.endswith(heads) else joined[name]
            for name in boundary_names(self.model.num_layers)
            if name in joined
        }

    def _forced(self, name: str, calls: attention_forced.Calls) -> list[Patch]:
        """Every layer's core attention by another backend."""
        make = attention_forced.trainer_forward(attention_forced.find(name, self.device), calls)
        cores = [layer.self_attention.core_attention for layer in self.gpt.decoder.layers]
        return [Patch(target=core, name="forward", make=make, pins=(), label=f"forced {name}") for core in cores]

    def _knobs(self, arm: Arm) -> TrainerKnobs:
        """What `arm` asks of the native loss, and what became of each knob."""
        knobs = megatron_knobs.resolve(
            self.config,
            arm.settings,
            padded=self.shard.padded_vocab_size > self.shard.vocab_size,
            te_loss=megatron_model.has_te_loss(self.gpt),
        )
        backward = gradient_knobs.outcomes(self.config.knobs, tp=self.tp.size, fused=megatron_wgrad.available(self.device))
        return dataclasses.replace(knobs, outcomes=knobs.outcomes | backward)

    def _gemm_outcomes(self, knobs: TrainerKnobs) -> dict[str, logprob_knobs.Outcome]:
        """What became of the GEMM family's forward knobs. knobs: those that are resolved elsewhere."""
        config, live = self.config, self.gpt.config
        refused = megatron_model.no_batch_invariance(config) if gemm_flags.asked_flag(config, "batch_invariant") else ""
        known = (
            gemm_knobs.flag_outcomes(config)
            | gemm_knobs.mode_outcome(config, "deterministic_mode", live=bool(live.deterministic_mode))
            | gemm_knobs.mode_outcome(config, "batch_invariant", live=bool(live.batch_invariant_mode), refused=refused)
            | gemm_knobs.sum_outcome(config, tp=self.tp.size, refused=megatron_sums.refused(config))
        )
        return known | gemm_knobs.not_for(config, knobs.outcomes | known, "trainer")

    def _check(self, arm: Arm, sequences: Seq[Sequence]) -> None:
        if set(arm.paths) - {"forward"}:
            raise UsageError("path-unknown", f"the trainer scores by 'forward' only, not by {sorted(set(arm.paths) - {'forward'})}")
        every = frozenset(PINS) - (frozenset() if self.model.qk_norm else {"qk_norm"})
        if arm.pins - frozenset(PINS):
            raise UsageError("pin-unknown", f"unknown pins {sorted(arm.pins - frozenset(PINS))}", hint=f"known: {', '.join(PINS)}")
        if arm.probe == "boundary" and not arm.pins >= every:
            raise UsageError("boundary-probe-needs-every-pin", f"pins missing: {sorted(every - arm.pins)}", where=f"arm {arm.id}")
        longest = min(self.config.max_model_len, self.model.max_positions)
        for sequence in sequences:
            if len(sequence.token_ids) > longest:
                raise UsageError(
                    "sequence-too-long", f"sequence {sequence.id!r} has {len(sequence.token_ids)} tokens, the model takes {longest}"
                )
            # Megatron embeds an id that no rank owns as zeros, without a word.
            bad = [t for t in sequence.token_ids if not 0 <= t < self.model.vocab_size]
            if bad:
                raise UsageError(
                    "token-outside-vocabulary",
                    f"sequence {sequence.id!r} holds token id {bad[0]}, the vocabulary has {self.model.vocab_size}",
                )


def _ranks(group: torch.distributed.ProcessGroup) -> TpGroup:
    return TpGroup(group=group, size=group.size(), rank=group.rank())
