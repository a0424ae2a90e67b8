"""The trainer's readings of the attention axes, but for reduction, precision and backward (megatron_readings.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.contract import Reading, not_applicable, read
from rlmismatch.engines import attention_probe, head_canary, megatron_attention_trial, megatron_cp, megatron_trials, rope_probe
from rlmismatch.engines.megatron_attention_trial import AttentionTrial
from rlmismatch.engines.megatron_evidence import Fields, by_table, derived, dtype_of

if TYPE_CHECKING:
    from typing import Any

    from rlmismatch.engines.megatron import MegatronEngine

_OPERATOR_TRIAL: Final = "trial: known Q, K, V through core_attention"
_POW_ERROR: Final = 2.0**-21  # relative; four units in the last place of float32


def attention_readings(engine: MegatronEngine) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: a short trial runs on all ranks."""
    found = engine.attention_trial
    rope = _rope(engine, found)
    return {
        "attention.provenance": _attention_provenance(engine, rope, found),
        "attention.materialization": {
            "logical_rows": by_table("one query row per token", "transformer/dot_product_attention.py"),
            "physical_form": by_table("full_prefill", "models/gpt/gpt_model.py: forward without an inference context"),
            "chunk_size": not_applicable("the trainer runs a sequence in one piece"),
            "block_size": not_applicable("no KV cache in the trainer"),
        },
        "attention.rope": rope,
        "attention.layout": _attention_layout(engine, found),
        "attention.paged_kv": _no_cache(engine, rope),
        "attention.lse": megatron_cp.lse_readings(engine),
    }


def _attention_provenance(engine: MegatronEngine, rope: Fields, found: AttentionTrial) -> Fields:
    gpt = engine.gpt
    attention = gpt.decoder.layers[0].self_attention
    core, config = attention.core_attention, gpt.config
    scale = scores_module(engine, core).softmax_scale
    requested = config.attention_backend.name
    return {
        **_heads(engine),
        "dtype": read(dtype_of(attention.linear_qkv.weight), "linear_qkv.weight.dtype"),
        "tensor_parallel_size": read(engine.tp.size, "size of the live tensor-parallel group"),
        "context_parallel_size": read(int(config.context_parallel_size), "config.context_parallel_size"),
        **attention_probe.operator_fields(
            found.operators,
            scale=float(torch.tensor(scale, dtype=torch.float32)),
            soft_cap=0.0,
            window=live_window(engine),
            reaches_window=found.reaches_window,
            source=_OPERATOR_TRIAL,
        ),
        "rope_identity": derived(
            rope["theta"], lambda theta: f"theta={theta},scaling={rope['scaling'].value},factor={rope['attention_factor'].value}"
        ),
        "cache_identity": by_table("cold", "models/gpt/gpt_model.py: no inference context, so no cache"),
        "requested_backend": read(requested, "config.attention_backend"),
        "actual_backend": megatron_trials.attention_backend(engine),
        "mode": read("eager", "config.cuda_graph_impl"),
        "fallback_reason": _fallback(engine, requested),
    }


def _fallback(engine: MegatronEngine, requested: str) -> Reading:
    """Megatron's local spec has one attention class, whatever its config asks for."""
    if requested == "auto":
        return not_applicable("no backend was asked for by name")
    ran = megatron_trials.attention_backend(engine)
    if engine.config.trainer_spec == "local":
        return read(f"{requested} was asked for; the local spec builds {ran.value}", "type(core_attention), config.attention_backend")
    if requested in str(ran.value):
        return not_applicable("the backend that was asked for ran")
    return read(f"{requested} was asked for; transformer_engine ran {ran.value}", ran.source)


def live_window(engine: MegatronEngine) -> int:
    """Tokens in the window that is set, the current one included; Megatron's pair leaves the current one out. 0: none."""
    size = engine.gpt.config.window_size
    if engine.config.trainer_spec == "local" and engine.cp.size == 1:
        sizes = [layer.self_attention.core_attention.scale_mask_softmax.window_size for layer in engine.gpt.decoder.layers]
        size = max(sizes, key=lambda s: -1 if s is None else s[0])
    return 0 if size is None or size[0] < 0 else int(size[0]) + 1


def _rope(engine: MegatronEngine, found: AttentionTrial) -> Fields:
    """theta and scaling are those that reproduce the live frequencies; a wrong theta shows as what it is.

    Megatron computes them on the model's device, whose pow may round differently: a few units in the last place are no other theta.
    """
    rotary, spec = engine.gpt.rotary_pos_emb, engine.model.rope
    live = rotary.inv_freq.cpu()
    if rotary.seq_len_interpolation_factor is not None:
        live = live / rotary.seq_len_interpolation_factor
    width = 2 * live.numel()
    scaling = read(spec.scaling, "rotary_pos_emb.inv_freq, seq_len_interpolation_factor")
    theta = read(float(spec.theta), "rotary_pos_emb.inv_freq")
    if not torch.allclose(live, spec.inv_freq(width), rtol=_POW_ERROR, atol=0.0):
        # 1 / inv_freq[1] = theta ** (2 / width): no scaling rule touches so high a frequency.
        fitted = float(rotary.inv_freq.cpu().double()[1] ** (-width / 2)) if width > 2 else float("nan")
        theta = read(float(f"{fitted:.6g}"), "fitted to rotary_pos_emb.inv_freq, which is not the checkpoint's")
    return {
        "theta": theta,
        "scaling": scaling,
        **rope_probe.rotation_fields(found.rotation, [0], "trial: unit vectors through rotary_pos_emb and apply_rotary_pos_emb"),
        "cache_position": by_table("absolute", "models/common/embeddings/rotary_pos_embedding.py"),
        "q_rope_state": by_table("rotated", "transformer/attention.py"),
        "k_cache_rope_state": by_table("rotated", "transformer/attention.py: K as core attention gets it"),
        "cos_sin_dtype": by_table(engine.config.dtype, "models/common/embeddings/rope_utils.py: cast to the operand's dtype"),
        "rope_fusion_boundary": read("fused" if engine.gpt.config.apply_rope_fusion else "unfused", "config.apply_rope_fusion"),
    }


def _attention_layout(engine: MegatronEngine, found: AttentionTrial) -> Fields:
    own = _query_heads(engine) // engine.tp.size
    return {
        **_heads(engine),
        "tp_head_ownership": head_canary.ownership(found.heads[0], own, engine.tp.size),
        "gqa_mapping": attention_probe.gqa_field(found.operators, _OPERATOR_TRIAL),
        "qkv_layout": by_table("per kv group: q heads, k, v", "transformer/attention.py: get_query_key_value_tensors"),
        "segment_boundaries": megatron_attention_trial.segments(engine),
    }


def _no_cache(engine: MegatronEngine, rope: Fields) -> Fields:
    """What a rollout's cache has to come to: the trainer attends to K and V of the running forward, in the order of the tokens."""
    source = "models/gpt/gpt_model.py: no inference context, so no cache"
    none = not_applicable("no KV cache in the trainer")
    return {
        "logical_token_order": by_table("ascending", source),
        "cache_identity": by_table("cold", source),
        "position_ids": rope["position_ids"],
        "weight_version": by_table("as loaded", source),
        "kv_dtype": read(dtype_of(engine.gpt.decoder.layers[0].self_attention.linear_qkv.weight), "linear_qkv.weight.dtype"),
        **dict.fromkeys(("paged_kv_policy", "page_table", "block_size", "prefix_cache_hits"), none),
    }


def scores_module(engine: MegatronEngine, core: Any) -> Any:
    """The module that holds softmax scale and dropout; TE keeps a copy of both in each of its backends."""
    return core if engine.config.trainer_spec == "local" else core.unfused_attention


_HEADS_SOURCE: Final = "query heads per key/value head in self_attention, times config.num_query_groups"


def _query_heads(engine: MegatronEngine) -> int:
    """Of the whole model. Below one key/value head a rank, what the live attention calls a partition's are those of one key/value head."""
    attention = engine.gpt.decoder.layers[0].self_attention
    per_kv_head = attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
    return int(per_kv_head * engine.gpt.config.num_query_groups)


def _heads(engine: MegatronEngine) -> Fields:
    attention = engine.gpt.decoder.layers[0].self_attention
    return {
        "num_query_heads": read(_query_heads(engine), _HEADS_SOURCE),
        "num_kv_heads": read(int(engine.gpt.config.num_query_groups), "config.num_query_groups"),
        "head_dim": read(int(attention.hidden_size_per_attention_head), "self_attention.hidden_size_per_attention_head"),
    }
