"""The rollout's readings of the attention axes."""

from __future__ import annotations

from typing import Any

import torch

from rlmismatch.contract import not_applicable, read
from rlmismatch.engines import attention_knobs, vllm_trials
from rlmismatch.engines.vllm_site import (
    Fields,
    Site,
    attention_backends,
    block_size,
    derived,
    dtype_name,
    fill,
    forward_method,
    is_eager,
    one_value,
)


def attention_readings(site: Site) -> dict[str, Fields]:
    """axis id -> field -> reading, of the attention family."""
    rope = _rope(site)
    return {
        "attention.provenance": _attention_provenance(site, rope),
        "attention.materialization": {
            "logical_rows": read("one query row per token", "query_start_loc of the attention metadata"),
            "physical_form": read(["full_prefill", "chunked_prefill", "decode"], "scheduler steps, checked in every path"),
            "chunk_size": read(site.config.chunk_size, "scheduler.max_num_scheduled_tokens, set for the chunked path"),
            "block_size": read(block_size(site), "kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size"),
        },
        "attention.rope": rope,
        "attention.layout": _attention_layout(site),
        "attention.paged_kv": _paged_kv(site),
        "attention.lse": fill("lse_export lse_domain lse_base lse_shape masked_row", not_applicable("CP1: no merge consumes an LSE")),
        "attention.merge_order": fill(
            "global_block_index acc_dtype merge_order cp_partition cp_comm_type split_kv_policy engine", not_applicable("CP1, one split")
        ),
        "attention.precision": attention_knobs.held_precision(site.config, _attention_precision(site)),
        "attention.backend_reuse": attention_knobs.capability_readings(site.config, site.live.inv_freq.device),
    }


def _attention_provenance(site: Site, rope: Fields) -> Fields:
    impls = [layer.self_attn.attn.impl for layer in site.live.layers]
    backends = sorted(attention_backends(site))
    requested = site.vllm_config.attention_config.backend
    return {
        **_heads(site),
        "dtype": read(one_value(str(layer.self_attn.attn.dtype).removeprefix("torch.") for layer in site.live.layers), "attn.dtype"),
        "tensor_parallel_size": read(site.tp.world_size, "size of the live tensor-parallel group"),
        "context_parallel_size": read(
            int(site.vllm_config.parallel_config.decode_context_parallel_size), "parallel_config.decode_context_parallel_size"
        ),
        "mask": read("causal" if site.attention.attn.attn_type == "decoder" else str(site.attention.attn.attn_type), "attn.attn_type"),
        "sliding_window": read(one_value(_window(impl.sliding_window) for impl in impls), "attn.impl.sliding_window"),
        "softmax_scale": read(one_value(_as_float32(impl.scale) for impl in impls), "attn.impl.scale, as float32"),
        "logit_soft_cap": read(
            one_value(float(getattr(impl, "logits_soft_cap", None) or 0.0) for impl in impls), "attn.impl.logits_soft_cap"
        ),
        "sinks": read(one_value(getattr(impl, "sinks", None) is not None for impl in impls), "attn.impl.sinks"),
        "rope_identity": derived(
            rope["theta"], lambda theta: f"theta={theta},scaling={rope['scaling'].value},factor={rope['attention_factor'].value}"
        ),
        "cache_identity": read("cold", "num_cached_tokens of every request is 0, or the request is refused"),
        "requested_backend": read("auto" if requested is None else getattr(requested, "name", str(requested)), "attention_config.backend"),
        "actual_backend": read(backends[0] if len(backends) == 1 else backends, "attn.backend, attn.impl of every layer"),
        "mode": read("eager" if is_eager(site.vllm_config.compilation_config) else "compiled", "compilation_config.mode"),
        "fallback_reason": not_applicable("the platform has one backend for this model"),
    }


def _rope(site: Site) -> Fields:
    """Theta is the one that reproduces the live table; scaling is the checkpoint's where the live class is the one that implements it."""
    rotary, spec = site.attention.rotary_emb, site.model.rope
    theta = vllm_trials.fitted_theta(site.live)
    kinds = {"RotaryEmbedding": "default", "LinearScalingRotaryEmbedding": "linear", "Llama3RotaryEmbedding": "llama3"}
    live_kind = kinds.get(type(rotary).__name__)
    numbers = {
        "linear": lambda: [_only(rotary.scaling_factors)] == [spec.factor],
        "llama3": lambda: (
            [rotary.scaling_factor, rotary.low_freq_factor, rotary.high_freq_factor, rotary.orig_max_position]
            == [spec.factor, spec.low_freq_factor, spec.high_freq_factor, spec.original_max_positions]
        ),
    }
    as_asked = live_kind == spec.kind and numbers.get(spec.kind, lambda: True)()
    return {
        "theta": theta,
        "scaling": read(spec.scaling if as_asked else type(rotary).__name__, "type(rotary_emb) and its factors"),
        "attention_factor": read(float(getattr(rotary, "attention_factor", 1.0)), "rotary_emb.attention_factor, absent without YaRN"),
        "rotary_dim": read(int(rotary.rotary_dim), "rotary_emb.rotary_dim"),
        "rotary_layout": read("half" if rotary.is_neox_style else "interleaved", "rotary_emb.is_neox_style"),
        "position_ids": site.documented("0..n-1", "v1/worker/gpu_model_runner.py: computed tokens + arange"),
        "cache_position": site.documented("absolute", "v1/worker/gpu_model_runner.py"),
        "q_rope_state": site.documented("rotated", "model_executor/models: rotary_emb before attn"),
        "k_cache_rope_state": site.documented("rotated", "model_executor/models: rotary_emb before attn, which writes the cache"),
        "cos_sin_dtype": read(dtype_name(rotary.cos_sin_cache), "rotary_emb.cos_sin_cache.dtype"),
        "rope_fusion_boundary": read(forward_method(rotary), "rotary_emb._forward_method"),
    }


def _heads(site: Site) -> Fields:
    attention = site.attention
    return {
        "num_query_heads": read(int(attention.total_num_heads), "self_attn.total_num_heads"),
        "num_kv_heads": read(int(attention.total_num_kv_heads), "self_attn.total_num_kv_heads"),
        "head_dim": read(int(attention.head_dim), "self_attn.head_dim"),
    }


def _attention_layout(site: Site) -> Fields:
    own = int(site.attention.num_heads)
    return {
        **_heads(site),
        "tp_head_ownership": read(
            [[rank * own, (rank + 1) * own] for rank in range(site.tp.world_size)], "self_attn.num_heads, over ranks"
        ),
        "gqa_mapping": site.by_device(
            cpu=("block", "csrc/cpu/cpu_attn_impl.hpp: q_heads_per_kv"), cuda=("block", "vllm_flash_attn: h // (Hq / Hkv)")
        ),
        "qkv_layout": site.documented("q heads, k heads, v heads", "model_executor/layers/linear.py: QKVParallelLinear"),
        "segment_boundaries": read("per sequence", "query_start_loc and seq_lens of the attention metadata"),
    }


def _paged_kv(site: Site) -> Fields:
    return {
        "logical_token_order": site.documented("ascending", "v1/core/kv_cache_manager.py: blocks in order of position"),
        "cache_identity": read("cold", "num_cached_tokens of every request is 0, or the request is refused"),
        "position_ids": site.documented("0..n-1", "v1/worker/gpu_model_runner.py"),
        "weight_version": read("as loaded", "the checkpoint is loaded once"),
        "kv_dtype": read(dtype_name(site.attention.attn.kv_cache), "attn.kv_cache.dtype"),
        "paged_kv_policy": read(type(site.scheduler.kv_cache_manager).__name__, "type(scheduler.kv_cache_manager)"),
        "page_table": read(f"{int(site.runner.kv_cache_config.num_blocks)} blocks", "kv_cache_config.num_blocks"),
        "block_size": read(block_size(site), "kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size"),
        "prefix_cache_hits": read(0, "num_cached_tokens of every request"),
    }


def _attention_precision(site: Site) -> Fields:
    isa = getattr(site.attention.attn, "isa", "")
    source = f"csrc/cpu/cpu_attn_{isa}.hpp" if isa else "vllm_flash_attn"
    return {
        "accum_dtype": site.documented("float32", source),
        "downcast_at": site.documented("final_write", source),
        "kv_dtype": read(dtype_name(site.attention.attn.kv_cache), "attn.kv_cache.dtype"),
        "backend_policy": site.documented(
            "scores, softmax and probabilities float32"
            if isa == "vec"
            else f"scores and softmax float32, probabilities {site.config.dtype}",
            source,
        ),
    }


def _window(window: Any) -> int:
    """Tokens in the window, the current one included; 0 is none. As a pair, vLLM's value leaves the current token out."""
    left = window[0] if isinstance(window, tuple) else window
    if left is None or left < 0:
        return 0
    return int(left) + 1 if isinstance(window, tuple) else int(left)


def _as_float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def _only(values: Any) -> float:
    (value,) = values
    return float(value)
