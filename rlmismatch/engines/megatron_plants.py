"""Known faults of the trainer, put in on purpose: each must be found, and named, by the rest of the tool.

A plant acts on the native engine and stays in for as long as the engine lives. A pin that replaces the planted operation heals it.
Those of the log-prob and of attention have files of their own; the others and the table of all stand here, a little over 400 lines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rlmismatch.contract import Reading, documented
from rlmismatch.engines import attention_plants, attention_sinks, merge_plants
from rlmismatch.engines import megatron_plants_attention as attention_faults
from rlmismatch.engines import megatron_plants_gemm as gemm_plants
from rlmismatch.engines import megatron_plants_gradients as backward
from rlmismatch.engines import megatron_plants_logprob as faults
from rlmismatch.engines.gemm_faults import SAYS_INVARIANT, other_dtype
from rlmismatch.engines.logprob_plants import SAYS_ARRIVAL, SAYS_EOS, SAYS_OOV, SAYS_SHIFT
from rlmismatch.engines.megatron_model import set_inv_freq
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError
from rlmismatch.pins.context_parallel import ContextParallel
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.megatron import native_row_partial
from rlmismatch.pins.megatron_logprob import VocabShard

if TYPE_CHECKING:
    from rlmismatch.checkpoint import ModelConfig

_BLOCK = 16  # keys whose partial output attention_bf16_accumulate rounds at a time


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a plant goes: the live model and what it was built from."""

    gpt: Any
    config: SideConfig
    model: ModelConfig
    shard: VocabShard

    @property
    def layers(self) -> Sequence[Any]:
        layers: Sequence[Any] = self.gpt.decoder.layers
        return layers


@dataclass(frozen=True, kw_only=True)
class TrainerPlant:
    """One fault. apply: changes the live model, or returns patches that stay installed, or both."""

    what: str
    apply: Callable[[Site], Sequence[Patch]] = lambda site: ()
    # Why the fault can not exist in this run, or None.
    refuse: Callable[[SideConfig, ModelConfig], str | None] = lambda config, model: None
    # (axis, field) -> what an honest adapter would report of it, where nothing in the live engine shows it.
    says: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    specs: tuple[str, ...] = ("local", "te")
    with_cp: bool = True  # whether it keeps its meaning where ranks share the sequence


def chosen(config: SideConfig, model: ModelConfig) -> Mapping[str, TrainerPlant]:
    """The plants of this run, by id. Raises UsageError for an unknown one, and for one that can not exist in this run."""
    known = {**PLANTS, **(UNDER_CP if config.cp > 1 else {})}
    for name in config.plants:
        if name not in known:
            raise UsageError("plant-unknown", f"the trainer has no plant {name!r}", hint=f"known: {', '.join(sorted(PLANTS))}")
        plant = known[name]
        reason = plant.refuse(config, model)
        if config.trainer_spec not in plant.specs:
            reason = f"it is not built for the trainer spec {config.trainer_spec!r}"
        if config.cp > 1 and not plant.with_cp:
            reason = "it is not built for context parallelism"
        if reason is not None:
            raise UsageError("plant-without-effect", f"plant {name} can not be put into this trainer: {reason}", where="trainer")
    return {name: known[name] for name in config.plants}


def held_tokens(declared: ContextParallel, plants: Mapping[str, TrainerPlant]) -> ContextParallel:
    """Which tokens each rank is handed: those of the partition that rotary embedding and attention go by, but for a plant."""
    return dataclasses.replace(declared, partition="contiguous") if "cp_contiguous_vs_zigzag" in plants else declared


def overridden(readings: dict[str, dict[str, Reading]], plants: Mapping[str, TrainerPlant]) -> None:
    """Replace, in place, what the plants make untrue and nothing in the live engine shows."""
    for name, plant in plants.items():
        for (axis, field_name), value in plant.says.items():
            readings[axis][field_name] = documented(value, f"plant {name}: {plant.what}")


def _stale_tensor(site: Site) -> Sequence[Patch]:
    site.layers[0].mlp.linear_fc2.weight.data.mul_(1.01)
    return ()


def _untied_head(site: Site) -> Sequence[Patch]:
    head = site.gpt.output_layer
    head.weight = torch.nn.Parameter(site.gpt.shared_embedding_or_output_weight().detach() * 1.01)

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda input_, weight=None, runtime_gather_output=None: native(input_, head.weight, runtime_gather_output)

    return [Patch(target=head, name="forward", make=make, pins=(), label="plant untied_head")]


def _eps(site: Site) -> Sequence[Patch]:
    for norm in layer_norms(site.gpt):
        norm.eps = float(f"{10 * site.model.rms_eps:.6g}")
    return ()


def layer_norms(gpt: Any) -> list[Any]:
    """The modules that hold the eps of the layer norms: input, post-attention, final. The TE spec keeps two of them in linears."""
    out = []
    for layer in gpt.decoder.layers:
        fused = hasattr(layer.self_attention.linear_qkv, "layer_norm_weight")
        out += [layer.self_attention.linear_qkv, layer.mlp.linear_fc1] if fused else [layer.input_layernorm, layer.pre_mlp_layernorm]
    return [*out, gpt.decoder.final_layernorm]


def _qk_norm_skipped(site: Site) -> Sequence[Patch]:
    norms = [norm for layer in site.layers for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)]
    return [Patch(target=n, name="forward", make=lambda _: lambda x: x, pins=(), label="plant qk_norm_skipped") for n in norms]


def _rope_theta(site: Site) -> Sequence[Patch]:
    wrong = dataclasses.replace(site.model.rope, theta=site.model.rope.theta / 10)
    # The linear kind divides positions, not frequencies, in this engine.
    wrong = dataclasses.replace(wrong, kind="default", factor=None) if wrong.kind == "linear" else wrong
    set_inv_freq(site.gpt, wrong.inv_freq(site.model.head_dim))
    return ()


def _dropout_on(site: Site) -> Sequence[Patch]:
    site.gpt.train()
    site.gpt.config.hidden_dropout = site.gpt.config.attention_dropout = 0.1
    for layer in site.layers:
        layer.hidden_dropout = 0.1
        layer.self_attention.core_attention.attention_dropout.p = 0.1
    return ()


def _pad_rows_nonzero(site: Site) -> Sequence[Patch]:
    weight = site.gpt.embedding.word_embeddings.weight if site.model.tied else site.gpt.output_layer.weight
    rows = weight.data[site.shard.real_width :]
    generator = torch.Generator().manual_seed(site.config.seed)
    noise = torch.randn(rows.shape, generator=generator) * float(weight.data[: site.shard.real_width].float().std())
    rows.copy_(noise)
    return ()


def _wrong_gemm(site: Site) -> Sequence[Patch]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: native(*args, **kwargs) * 1.02

    return [Patch(target=site.layers[0].mlp.linear_fc1, name="_forward_impl", make=make, pins=(), label="plant wrong_gemm_one_layer")]


def _lse_offset(site: Site) -> Sequence[Patch]:
    # What summing an already summed log-sum-exp over ranks gives. With one rank there is nothing to sum: two are feigned.
    offset = math.log(max(site.shard.tp.size, 2))

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda labels, logits: native(labels, logits) + offset

    return [Patch(target=site.gpt, name="compute_language_model_loss", make=make, pins=(), label="plant lse_offset_log_tp")]


def _attention_bf16(site: Site) -> Sequence[Patch]:
    cores = [layer.self_attention.core_attention for layer in site.layers]
    return [Patch(target=core, name="forward", make=lambda _: _bf16_attention, pins=(), label="plant") for core in cores]


def _bf16_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention [S, B, Hq * D] whose running output is rounded to bfloat16 after every block of keys."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    weights = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(mask, -torch.inf).softmax(-1)
    out = torch.zeros_like(q).bfloat16()
    for start in range(0, q.shape[2], _BLOCK):
        block = slice(start, start + _BLOCK)
        out = (out.float() + weights[..., block] @ v[:, :, block]).bfloat16()
    return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype).contiguous()


_DK_SCALE = 1.02


def _dk_scaled(site: Site) -> Sequence[Patch]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # The value of K is untouched; what flows back through it is not.
            out: torch.Tensor = native(query, key.detach() + (key - key.detach()) * _DK_SCALE, *args, **kwargs)
            return out

        return forward

    cores = [layer.self_attention.core_attention for layer in site.layers]
    return [Patch(target=core, name="forward", make=make, pins=(), label="plant dk_scaled") for core in cores]


def _reduce_bf16(site: Site) -> Sequence[Patch]:
    def patch(module: Any) -> Patch:
        def forward(input_: torch.Tensor) -> tuple[torch.Tensor, None]:
            total, *rest = site.shard.tp.gathered(native_row_partial(module, input_).bfloat16())
            for partial in rest:
                total = total + partial
            total = total.to(input_.dtype)
            return (total.chunk(site.shard.tp.size)[site.shard.tp.rank].contiguous() if site.config.sp else total), None

        return Patch(target=module, name="forward", make=lambda _: forward, pins=(), label="plant forward_reduce_bf16_accumulate")

    return [patch(module) for layer in site.layers for module in (layer.self_attention.linear_proj, layer.mlp.linear_fc2)]


PLANTS: Mapping[str, TrainerPlant] = {
    "one_stale_tensor": TrainerPlant(what="layer 0's down_proj is 1 % too large", apply=_stale_tensor),
    "untied_head": TrainerPlant(
        what="the head is no longer the embedding",
        apply=_untied_head,
        refuse=lambda config, model: None if model.tied else "the checkpoint's head is a tensor of its own",
    ),
    "eps": TrainerPlant(what="the layer norms' eps is ten times the checkpoint's", apply=_eps),
    "qk_norm_skipped": TrainerPlant(
        what="Q and K are not normalised",
        apply=_qk_norm_skipped,
        refuse=lambda config, model: None if model.qk_norm else "the model has no q/k-norm",
    ),
    "rope_theta": TrainerPlant(what="the rotary base is a tenth of the checkpoint's", apply=_rope_theta),
    "dropout_on": TrainerPlant(
        what="train mode with dropout 0.1 on attention and residuals", apply=_dropout_on, specs=("local",), with_cp=False
    ),
    "two_bos": TrainerPlant(what="the first token stands twice; the worker, which hands out the tokens, puts it in"),
    "temperature_not_applied": TrainerPlant(
        what="logits are not divided by the temperature; the engine leaves the setting out",
        refuse=lambda config, model: "the temperature is 1" if config.temperature == 1.0 else None,
    ),
    "pad_rows_nonzero": TrainerPlant(
        what="the padded rows of the head hold noise instead of zeros",
        apply=_pad_rows_nonzero,
        refuse=lambda config, model: "the vocabulary has no padded row" if model.padded_vocab_size(config.tp) == model.vocab_size else None,
    ),
    "wrong_gemm_one_layer": TrainerPlant(what="layer 0's gate_up GEMM gives 2 % too much", apply=_wrong_gemm, specs=("local",)),
    "lse_offset_log_tp": TrainerPlant(what="log-probs are log(TP) too small", apply=_lse_offset),
    "attention_bf16_accumulate": TrainerPlant(
        what="attention rounds its running output to bfloat16 after every block of keys",
        apply=_attention_bf16,
        says={("attention.precision", "accum_dtype"): "bfloat16"},
        with_cp=False,
    ),
    "forward_reduce_bf16_accumulate": TrainerPlant(
        what="the sum over ranks behind a row-parallel layer runs in bfloat16",
        apply=_reduce_bf16,
        refuse=lambda config, model: "one rank has nothing to sum" if config.tp == 1 else None,
        says={("gemm.forward_reduce", "acc_dtype"): "bfloat16"},
        specs=("local",),
    ),
    "pad_rows_included": TrainerPlant(
        what="the padded rows are counted in the denominator; the engine leaves the policy out",
        refuse=lambda config, model: (
            "the vocabulary has no padded row"
            if model.padded_vocab_size(config.tp) == model.vocab_size
            else "the policy counts them anyway"
            if config.vocab_padding_policy == "include"
            else None
        ),
    ),
    "shard_gap": TrainerPlant(what="a row of the head belongs to no rank", apply=lambda site: faults.shard_gap(site.gpt, site.shard)),
    "shard_overlap": TrainerPlant(
        what="a row of the head belongs to two ranks", apply=lambda site: faults.shard_overlap(site.gpt, site.shard)
    ),
    "head_fp32_one_sided": TrainerPlant(
        what="the head multiplies and writes in float32",
        refuse=lambda config, model: "the model is float32" if config.dtype == "float32" else None,
    ),
    "soft_cap_missing": TrainerPlant(what="the logits are not capped; the engine leaves the setting out"),
    "cap_after_scale": TrainerPlant(what="the logits are scaled before they are capped"),
    "shift_by_one": TrainerPlant(
        what="every row of logits scores the token before",
        apply=lambda site: faults.shift_by_one(site.gpt, site.shard),
        says=SAYS_SHIFT,
        with_cp=False,
    ),
    "double_owner": TrainerPlant(what="two ranks supply the target's logit", apply=lambda site: faults.double_owner(site.gpt, site.shard)),
    "oov_target": TrainerPlant(what="a target counts as outside the vocabulary and is reported as 0; the worker puts it in", says=SAYS_OOV),
    "eos_logprob_zero": TrainerPlant(what="the last token's log-prob is reported as 0; the worker puts it in", says=SAYS_EOS),
    "head_row_off_by_one": TrainerPlant(
        what="the head reads the hidden state of the row before",
        apply=lambda site: faults.head_row_off_by_one(site.gpt, site.shard),
        with_cp=False,
    ),
    "softmax_scale": TrainerPlant(
        what="attention scales the scores by twice as much",
        apply=lambda site: attention_faults.softmax_scale(site.gpt),
        specs=("local",),
        with_cp=False,
    ),
    "window_off_by_one": TrainerPlant(
        what="a token sees one more than the window holds",
        apply=lambda site: attention_faults.window_off_by_one(site.gpt),
        refuse=lambda config, model: None if model.sliding_window else "the checkpoint has no sliding window",
        specs=("local",),
        with_cp=False,
    ),
    "sink_dropped": TrainerPlant(
        what="the sink that is asked for is left out of the denominator; the engine leaves it out",
        refuse=attention_sinks.why_not_dropped,
        specs=("local",),
        with_cp=False,
    ),
    "backend_fell_back": TrainerPlant(
        what="flash attention is asked for and the local spec's own runs",
        apply=lambda site: attention_faults.backend_fell_back(site.gpt),
        specs=("local",),
    ),
    "rope_interleaved": TrainerPlant(
        what="RoPE pairs neighbouring elements", apply=lambda site: attention_faults.rope_interleaved(site.gpt)
    ),
    "yarn_factor": TrainerPlant(what="cos and sin are 1.4159 times too large", apply=lambda site: attention_faults.yarn_factor(site.gpt)),
    "positions_jump": TrainerPlant(
        what="positions skip 5 ahead at token 8",
        apply=lambda site: attention_faults.positions(site.gpt, attention_plants.jumping, "positions_jump"),
        with_cp=False,
    ),
    "positions_shifted": TrainerPlant(
        what="all positions are 7 higher",
        apply=lambda site: attention_faults.positions(site.gpt, attention_plants.shifted, "positions_shifted"),
        with_cp=False,
    ),
    "gqa_tiled": TrainerPlant(
        what="query heads take key/value heads in turn",
        apply=lambda site: attention_faults.gqa_tiled(site.gpt),
        refuse=lambda config, model: attention_plants.why_not_tiled(model.num_heads, model.num_kv_heads, config.tp),
    ),
    "heads_swapped": TrainerPlant(
        what="a rank's first and last query head are swapped",
        apply=lambda site: attention_faults.heads_swapped(site.gpt),
        refuse=lambda config, model: None if model.num_heads > config.tp else "a rank has one query head",
    ),
    "packed_without_segments": TrainerPlant(
        what="each sequence is scored behind the one before it, as in a pack without segment boundaries; the engine puts it there",
    ),
    "cp_contiguous_vs_zigzag": TrainerPlant(
        what="context-parallel ranks are handed contiguous pieces, and rotary embedding and attention take them for zigzag ones",
        refuse=lambda config, model: (
            "one rank holds the whole sequence"
            if config.cp == 1
            else "the pieces are to be contiguous"
            if config.cp_partition == "contiguous"
            else None
        ),
    ),
    "lse_base2": TrainerPlant(
        what="the merge of the context-parallel ranks' partial outputs takes an LSE in base 2 for natural",
        apply=lambda site: merge_plants.of_ranks(site.layers, merge_plants.base2),
        refuse=lambda config, model: "one rank holds all keys, and its attention merges nothing" if config.cp == 1 else None,
        specs=("local",),
    ),
    "dk_scaled": TrainerPlant(what="dK of every layer is 2 % too large", apply=_dk_scaled, with_cp=False),
    "merge_arrival_order": TrainerPlant(
        what="the ranks' parts of the denominator are merged as they arrive",
        apply=lambda site: faults.merge_arrival_order(site.gpt, site.shard),
        refuse=lambda config, model: "one rank has nothing to merge" if config.tp == 1 else None,
        says=SAYS_ARRIVAL,
    ),
    "fallback_reported_as_requested": TrainerPlant(
        what="another loss runs than the config says",
        apply=lambda site: faults.fallback_reported_as_requested(site.gpt, site.shard),
    ),
    "tf32_one_sided": TrainerPlant(what="float32 products may use TF32", apply=lambda site: gemm_plants.tf32()),
    "compute_dtype_one_sided": TrainerPlant(
        what="the layers' products run in another 16-bit dtype than the model's",
        apply=lambda site: gemm_plants.compute_dtype(site.gpt, other_dtype(site.config.dtype)),
        specs=("local",),
    ),
    "autocast_head_one_sided": TrainerPlant(
        what="the head and the log-softmax run under bfloat16 autocast",
        apply=lambda site: gemm_plants.autocast_head(site.gpt, site.config.device),
        refuse=lambda config, model: None if config.dtype == "float32" else "its head computes in 16 bits anyway",
    ),
    "batch_invariance_claimed_but_broken": TrainerPlant(
        what="layer 0's gate_up adds two rounded halves of K when it has more than one row, and the side promises batch invariance",
        apply=lambda site: gemm_plants.depends_on_rows(site.gpt),
        says=SAYS_INVARIANT,
        specs=("local",),
    ),
    "zero_grad_non_owner": TrainerPlant(
        what="ranks that do not own the target get no gradient",
        apply=lambda site: faults.zero_grad_non_owner(site.gpt, site.shard),
        refuse=lambda config, model: "one rank owns every target" if config.tp == 1 else None,
    ),
    "entropy_before_temperature": TrainerPlant(
        what="the entropy is taken of the logits before temperature; the measurement leaves it out",
        refuse=lambda config, model: "the temperature is 1" if config.temperature == 1.0 else None,
    ),
    "dgrad_not_reduced": TrainerPlant(
        what="dX stays a rank's own partial",
        apply=lambda site: backward.dgrad_not_reduced(site.gpt, site.shard.tp),
        refuse=lambda config, model: "one rank has nothing to sum" if config.tp == 1 else None,
        specs=("local",),
    ),
    "dgrad_bf16_accumulate": TrainerPlant(
        what="dX is added rank by rank in bfloat16",
        apply=lambda site: backward.dgrad_bf16_accumulate(site.gpt, site.shard.tp),
        refuse=lambda config, model: (
            "one rank has nothing to sum"
            if config.tp == 1
            else "the partials are bfloat16 themselves, so the collective adds in it anyway; use --dtype float32"
            if config.dtype == "bfloat16"
            else None
        ),
        specs=("local",),
    ),
    "wgrad_bf16_accumulate": TrainerPlant(
        what="main_grad is bfloat16; the gradient buffers are built so",
        refuse=lambda config, model: None if config.dtype == "bfloat16" else "main_grad takes the model's dtype, which is no bfloat16",
        specs=("local",),
    ),
}
# Where ranks share the sequence, what they merge are attention's partial outputs.
UNDER_CP: Mapping[str, TrainerPlant] = {
    "merge_arrival_order": TrainerPlant(
        what="attention's partial outputs are merged as a ring brings them",
        apply=lambda site: merge_plants.of_ranks(site.layers, merge_plants.arrival),
        says=merge_plants.SAYS_ARRIVAL,
        specs=("local",),
    ),
}
