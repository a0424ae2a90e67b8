"""Known faults of the rollout side, put in on purpose. A plant acts on what the engine does natively; a pin of that operation heals it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlmismatch.checkpoint import ModelConfig
from rlmismatch.contract import Reading, documented
from rlmismatch.engines import attention_plants, attention_sinks, merge_plants
from rlmismatch.engines import vllm_plants_attention as attention_faults
from rlmismatch.engines import vllm_plants_gemm as gemm_plants
from rlmismatch.engines import vllm_plants_logprob as faults
from rlmismatch.engines.gemm_faults import SAYS_INVARIANT
from rlmismatch.engines.logprob_plants import SAYS_ARRIVAL, SAYS_EOS, SAYS_OOV, SAYS_SHIFT
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_attention import PagedCache
from rlmismatch.pins.vllm_live import LiveModel

# KV tokens after which the planted attention rounds its running output.
_TILE: Final = 32


@dataclass(frozen=True, kw_only=True)
class RolloutPlant:
    """One fault. apply: changes the live model, or returns hooks that stay in force, or both."""

    what: str
    apply: Callable[[LiveModel, SideConfig], Sequence[Patch]] = lambda live, config: ()
    # Why the fault can not exist in this run, or None.
    refuse: Callable[[SideConfig, ModelConfig], str | None] = lambda config, model: None
    # (axis, field) -> what an honest adapter would report of it, where nothing in the live engine shows it.
    says: Mapping[tuple[str, str], Any] = field(default_factory=dict)


def chosen(config: SideConfig, model: ModelConfig) -> Mapping[str, RolloutPlant]:
    """The plants of this run, by id. Raises UsageError for an unknown one, and for one that can change nothing in this run."""
    known = {**PLANTS, **(AT_TP1 if config.tp == 1 else {})}
    for name in config.plants:
        if name not in known:
            hint = "vLLM has no dropout" if name == "dropout_on" else f"known: {', '.join(sorted(PLANTS))}"
            raise UsageError("plant-unknown", f"the rollout has no plant {name!r}", where="rollout", hint=hint)
        reason = known[name].refuse(config, model)
        if reason is not None:
            raise UsageError("plant-without-effect", f"plant {name} can not be put into this rollout: {reason}", where="rollout")
    return {name: known[name] for name in config.plants}


def overridden(readings: dict[str, dict[str, Reading]], plants: Mapping[str, RolloutPlant]) -> None:
    """Replace, in place, what the plants make untrue and nothing in the live engine shows."""
    for name, plant in plants.items():
        for (axis, field_name), value in plant.says.items():
            readings[axis][field_name] = documented(value, f"plant {name}: {plant.what}")


def _one_stale_tensor(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    live.layers[0].post_attention_layernorm.weight.data.mul_(1.01)
    return ()


def _untied_head(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    head = live.model.lm_head
    own = copy.copy(head)  # tied, the head may be the embedding module itself
    own._parameters = {**head._parameters, "weight": torch.nn.Parameter(head.weight.data * 1.01, requires_grad=False)}
    own.quant_method.process_weights_after_loading(own)  # the CPU's packed copy
    live.model.lm_head = own
    return ()


def _eps(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    for layer in live.layers:
        for module in (layer.input_layernorm, layer.post_attention_layernorm):
            module.variance_epsilon = live.eps * 10
    live.model.model.norm.variance_epsilon = live.eps * 10
    return ()


def _rope_theta(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    # vLLM shares one rotary object among all layers, and among all models of a process.
    wrong = copy.deepcopy(live.layers[0].self_attn.rotary_emb)
    wrong.base = wrong.base / 10
    wrong.cos_sin_cache.copy_(wrong._compute_cos_sin_cache())
    for layer in live.layers:
        layer.self_attn.rotary_emb = wrong
    return ()


def _qk_norm_skipped(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    norms = [norm for layer in live.layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
    return [Patch(target=norm, name="forward", make=lambda native: lambda x: x, pins=(), label="qk_norm_skipped") for norm in norms]


def _wrong_gemm_one_layer(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: native(*args, **kwargs) * 1.02

    method = live.layers[0].mlp.gate_up_proj.quant_method
    return [Patch(target=method, name="apply", make=make, pins=(), label="wrong_gemm_one_layer")]


def _lse_offset_log_tp(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    # What summing an already summed log-sum-exp over ranks gives. With one rank there is nothing to sum: two are feigned.
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits: native(logits) - math.log(max(config.tp, 2))

    return [Patch(target=live.sampler, name="compute_logprobs", make=make, pins=(), label="lse_offset_log_tp")]


def _forward_reduce_bf16(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The ranks' partials added one by one, the running sum rounded to bfloat16 each time."""

    def hook(linear: Any) -> Patch:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, None]:
            partial = linear.quant_method.apply(linear, x, None)
            total, *rest = (p.bfloat16() for p in live.tp.gathered(partial))
            for part in rest:
                total = total + part
            return total.to(partial.dtype), None

        return Patch(target=linear, name="forward", make=lambda native: forward, pins=(), label="forward_reduce_bf16_accumulate")

    return [hook(linear) for layer in live.layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)]


def _attention_bf16(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    cache, patches = PagedCache(), list[Patch]()
    for attn in (layer.self_attn.attn for layer in live.layers):
        patches.append(Patch(target=attn.impl, name="forward", make=_attend_bf16(cache), pins=(), label="attention_bf16_accumulate"))
        patches += cache.write_hook(attn, pins=(), label="attention_bf16_accumulate")
    return patches


def _attend_bf16(cache: PagedCache) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attention whose output is rounded to bfloat16 after every tile of KV tokens is added; all else in float32."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            # The engine's kernel is called all the same: only the numbers are to be wrong, not what reads the pages.
            native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if attn_metadata is not None:
                for rows, given in cache.sequences(layer, query, kv_cache, attn_metadata):
                    output[rows].view(given.q_THD.shape).copy_(_bf16_fold(given.q_THD, given.k_THD, given.v_THD))
            return output

        return forward

    return make


def _bf16_fold(q_QHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor) -> torch.Tensor:
    """bfloat16 [Q, Hq, D]: attention of the last Q of N tokens."""
    group = q_QHD.shape[1] // k_NHD.shape[1]
    k_NHD, v_NHD = (x.float().repeat_interleave(group, dim=1) for x in (k_NHD, v_NHD))
    score_HQN = torch.einsum("qhd,nhd->hqn", q_QHD.float(), k_NHD) * q_QHD.shape[2] ** -0.5
    position = torch.arange(k_NHD.shape[0], device=q_QHD.device)
    later = position[None, :] > position[-q_QHD.shape[0] :, None]
    weight_HQN = torch.softmax(score_HQN.masked_fill(later, -torch.inf), dim=-1)
    out_QHD = torch.zeros_like(q_QHD, dtype=torch.bfloat16)
    for first in range(0, k_NHD.shape[0], _TILE):
        tile = slice(first, first + _TILE)
        out_QHD = (out_QHD.float() + torch.einsum("hqn,nhd->qhd", weight_HQN[..., tile], v_NHD[tile])).bfloat16()
    return out_QHD


PLANTS: Final[Mapping[str, RolloutPlant]] = {
    "one_stale_tensor": RolloutPlant(what="layer 0's post_attention_layernorm is 1 % too large", apply=_one_stale_tensor),
    "untied_head": RolloutPlant(
        what="the head is no longer the embedding",
        apply=_untied_head,
        refuse=lambda config, model: None if model.tied else "the checkpoint's head is a tensor of its own",
    ),
    "eps": RolloutPlant(what="the layer norms' eps is ten times the checkpoint's", apply=_eps),
    "rope_theta": RolloutPlant(what="the rotary base is a tenth of the checkpoint's", apply=_rope_theta),
    "qk_norm_skipped": RolloutPlant(
        what="Q and K are not normalised",
        apply=_qk_norm_skipped,
        refuse=lambda config, model: None if model.qk_norm else "the model has no q/k-norm",
    ),
    "two_bos": RolloutPlant(what="the first token stands twice; the worker, which hands out the tokens, puts it in"),
    "temperature_not_applied": RolloutPlant(
        what="log-probs are of logits that were not divided by the temperature; the engine leaves the setting out",
        refuse=lambda config, model: "the temperature is 1" if config.temperature == 1.0 else None,
    ),
    "wrong_gemm_one_layer": RolloutPlant(what="layer 0's gate_up GEMM gives 2 % too much", apply=_wrong_gemm_one_layer),
    "lse_offset_log_tp": RolloutPlant(what="log-probs are log(TP) too small", apply=_lse_offset_log_tp),
    "attention_bf16_accumulate": RolloutPlant(
        what="attention rounds its running output to bfloat16 after every tile of keys",
        apply=_attention_bf16,
        says={("attention.precision", "accum_dtype"): "bfloat16"},
    ),
    "forward_reduce_bf16_accumulate": RolloutPlant(
        what="the sum over ranks behind a row-parallel layer runs in bfloat16",
        apply=_forward_reduce_bf16,
        refuse=lambda config, model: "one rank has nothing to sum" if config.tp == 1 else None,
        says={("gemm.forward_reduce", "acc_dtype"): "bfloat16"},
    ),
    "auto_split_under_invariance_claim": RolloutPlant(
        what="the backend that is to stand in splits a decode step's keys by load; the trial of it (attention_candidates.py) puts it in"
    ),
    "softmax_scale": RolloutPlant(
        what="attention scales the scores by twice as much", apply=lambda live, config: attention_faults.softmax_scale(live)
    ),
    "window_off_by_one": RolloutPlant(
        what="a token sees one more than the window holds",
        apply=lambda live, config: attention_faults.window_off_by_one(live),
        refuse=lambda config, model: None if model.sliding_window else "the checkpoint has no sliding window",
    ),
    "sink_dropped": RolloutPlant(
        what="the sink that is asked for is left out of the denominator; the engine leaves it out",
        refuse=attention_sinks.why_not_dropped,
    ),
    "backend_fell_back": RolloutPlant(
        what="FLASH_ATTN is asked for and the platform's own runs; the engine asks for it",
        refuse=lambda config, model: None if config.device == "cpu" else "on CUDA vLLM runs what it is asked for, or stops",
    ),
    "lse_base2": RolloutPlant(
        what="attention cuts its keys into two splits, and the merge takes their LSE in base 2 for natural",
        apply=lambda live, config: merge_plants.of_splits(live, merge_plants.base2),
    ),
    "rope_interleaved": RolloutPlant(
        what="RoPE pairs neighbouring elements", apply=lambda live, config: attention_faults.rope_interleaved(live)
    ),
    "yarn_factor": RolloutPlant(
        what="cos and sin are 1.4159 times too large", apply=lambda live, config: attention_faults.yarn_factor(live)
    ),
    "positions_jump": RolloutPlant(
        what="positions skip 5 ahead at token 8",
        apply=lambda live, config: attention_faults.positions(live, attention_plants.jumping, "positions_jump"),
    ),
    "positions_shifted": RolloutPlant(
        what="all positions are 7 higher",
        apply=lambda live, config: attention_faults.positions(live, attention_plants.shifted, "positions_shifted"),
    ),
    "gqa_tiled": RolloutPlant(
        what="query heads take key/value heads in turn",
        apply=lambda live, config: attention_faults.gqa_tiled(live),
        refuse=lambda config, model: attention_plants.why_not_tiled(model.num_heads, model.num_kv_heads, config.tp),
    ),
    "heads_swapped": RolloutPlant(
        what="a rank's first and last query head are swapped",
        apply=lambda live, config: attention_faults.heads_swapped(live),
        refuse=lambda config, model: None if model.num_heads > config.tp else "a rank has one query head",
    ),
    "page_swap": RolloutPlant(
        what="attention reads the first two pages of a sequence in each other's place",
        apply=lambda live, config: attention_faults.page_swap(live),
    ),
    "stale_kv": RolloutPlant(
        what="the prefix cache outlives a weight update, and decode reads from it; the scorer leaves the reset out",
    ),
    "pad_rows_included": RolloutPlant(what="the padded rows are counted in the denominator", apply=faults.pad_rows_included),
    "shard_gap": RolloutPlant(what="a row of the head belongs to no rank", apply=faults.shard_gap),
    "shard_overlap": RolloutPlant(what="a row of the head belongs to two ranks", apply=faults.shard_overlap),
    "head_fp32_one_sided": RolloutPlant(
        what="the head multiplies and writes in float32",
        refuse=lambda config, model: "the model is float32" if config.dtype == "float32" else None,
    ),
    "soft_cap_missing": RolloutPlant(what="the logits are not capped; the engine leaves the setting out"),
    "cap_after_scale": RolloutPlant(what="the logits are scaled before they are capped"),
    "top_p_renormalised": RolloutPlant(what="the distribution is cut to a nucleus of 0.8 and renormalised"),
    "shift_by_one": RolloutPlant(what="every token is scored with the row before", apply=faults.shift_by_one, says=SAYS_SHIFT),
    "double_owner": RolloutPlant(what="two ranks supply the target's logit", apply=faults.double_owner),
    "oov_target": RolloutPlant(what="a target counts as outside the vocabulary and is reported as 0; the worker puts it in", says=SAYS_OOV),
    "eos_logprob_zero": RolloutPlant(what="the last token's log-prob is reported as 0; the worker puts it in", says=SAYS_EOS),
    "merge_arrival_order": RolloutPlant(
        what="the ranks' parts of the denominator are merged as they arrive",
        apply=faults.merge_arrival_order,
        refuse=lambda config, model: "one rank has nothing to merge" if config.tp == 1 else None,
        says=SAYS_ARRIVAL,
    ),
    "fallback_reported_as_requested": RolloutPlant(
        what="another log-softmax runs than the sampler's own", apply=faults.fallback_reported_as_requested
    ),
    "tf32_one_sided": RolloutPlant(what="float32 products may use TF32", apply=gemm_plants.tf32),
    "compute_dtype_one_sided": RolloutPlant(
        what="the layers' products run in another 16-bit dtype than the model's", apply=gemm_plants.compute_dtype
    ),
    "autocast_head_one_sided": RolloutPlant(
        what="the head and the log-softmax run under bfloat16 autocast",
        apply=gemm_plants.autocast_head,
        refuse=lambda config, model: None if config.dtype == "float32" else "its head computes in 16 bits anyway",
    ),
    "batch_invariance_claimed_but_broken": RolloutPlant(
        what="layer 0's gate_up adds two rounded halves of K when it has more than one row, and the side promises batch invariance",
        apply=gemm_plants.depends_on_rows,
        says=SAYS_INVARIANT,
    ),
    "all_reduce_wrong_data": RolloutPlant(
        what="the last rank's partials are lost in every all-reduce",
        apply=gemm_plants.all_reduce_wrong_data,
        refuse=lambda config, model: "one rank has nothing to sum" if config.tp == 1 else None,
    ),
    "head_row_off_by_one": RolloutPlant(what="the head reads the hidden state of the row before", apply=faults.head_row_off_by_one),
}
# Where no rank holds a part of the vocabulary, what can be merged are attention's partial outputs.
AT_TP1: Final[Mapping[str, RolloutPlant]] = {
    "merge_arrival_order": RolloutPlant(
        what="attention cuts its keys into two splits and merges the later one first",
        apply=lambda live, config: merge_plants.of_splits(live, merge_plants.arrival),
        says=merge_plants.SAYS_ARRIVAL,
    ),
}
