"""The rollout's readings of the attention axes."""

from __future__ import annotations

from typing import Any

import torch

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines import attention_knobs, attention_merges, attention_probe, head_canary, rope_probe, vllm_trials
from rlmismatch.engines.vllm_paged import CacheTrial
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
        "attention.lse": attention_merges.fields(site.trial.merged, _no_merge(site), "trial: the merge of KV splits inside attention"),
        "attention.merge_order": _merges(site),
        "attention.precision": attention_knobs.held_precision(site.config, _attention_precision(site)),
        "attention.backend_reuse": attention_knobs.capability_readings(site.config, site.live.inv_freq.device),
    }


def _merges(site: Site) -> Fields:
    """No rank holds a part of the keys. In how many splits the kernel itself goes through them it says, or chooses at every call."""
    policy, source = site.trial.kv_splits, "trial: the calls of the attention kernel, and vLLM's switch for the CPU's plan"
    return {
        **fill(
            "global_block_index acc_dtype merge_order cp_partition cp_comm_type engine",
            not_applicable("CP1: nothing is merged across ranks; what a kernel splits by itself it merges inside"),
        ),
        "split_kv_policy": unknown(f"{source}: no number is given") if policy is None else read(policy, source),
    }


def _no_merge(site: Site) -> str:
    """Why no LSE convention of the rollout's can matter: one pass over the keys, or a fold that stays inside the kernel."""
    found = site.trial.lse
    exported = "exports none" if found is None else f"exports one in base {found.base}, {found.shape}"
    merged = site.trial.merged
    if merged is not None:
        return f"CP1: only attention itself merges, by an LSE of slope {merged.slope:.4f} over float64 (the kernel {exported})"
    return f"CP1: no merge consumes an LSE (the kernel {exported})"


def _attention_provenance(site: Site, rope: Fields) -> Fields:
    impls = [layer.self_attn.attn.impl for layer in site.live.layers]
    backends = sorted(attention_backends(site))
    requested = site.vllm_config.attention_config.backend
    requested_name = "auto" if requested is None else str(getattr(requested, "name", requested))
    actual = one_value(layer.self_attn.attn.attn_backend.get_name() for layer in site.live.layers)
    operators = (*site.trial.prefill, *site.trial.decode)
    set_window = one_value(window(impl.sliding_window) for impl in impls)
    return {
        **_heads(site),
        "dtype": read(one_value(str(layer.self_attn.attn.dtype).removeprefix("torch.") for layer in site.live.layers), "attn.dtype"),
        "tensor_parallel_size": read(site.tp.world_size, "size of the live tensor-parallel group"),
        "context_parallel_size": read(
            int(site.vllm_config.parallel_config.decode_context_parallel_size), "parallel_config.decode_context_parallel_size"
        ),
        **attention_probe.operator_fields(
            operators,
            scale=one_value(_as_float32(impl.scale) for impl in impls),
            soft_cap=one_value(float(getattr(impl, "logits_soft_cap", None) or 0.0) for impl in impls),
            window=set_window,
            reaches_window=site.trial.reaches_window,
            source="trial: known Q, K, V through attn.impl, prefill and decode",
        ),
        "rope_identity": derived(
            rope["theta"], lambda theta: f"theta={theta},scaling={rope['scaling'].value},factor={rope['attention_factor'].value}"
        ),
        "cache_identity": _cache_identity(site),
        "requested_backend": read(requested_name, "attention_config.backend"),
        "actual_backend": read(
            backends[0] if len(backends) == 1 else backends,
            "; ".join(f"{phase}: {', '.join(calls)}" for phase, calls in site.trial.kernels.items()) or "attn.impl of every layer",
        ),
        "mode": read("eager" if is_eager(site.vllm_config.compilation_config) else "compiled", "compilation_config.mode"),
        "fallback_reason": (
            not_applicable("the backend that was asked for ran" if requested is not None else "no backend was asked for by name")
            if requested is None or actual == requested_name
            else read(f"{requested_name} cannot run on {site.config.device} here: the platform chose {actual}", "attn.attn_backend")
        ),
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
        **rope_probe.rotation_fields(
            site.trial.rotation, site.trial.positions_passed, "trial: unit vectors through rotary_emb; the positions it is called with"
        ),
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
        "tp_head_ownership": _ownership(site, own),
        "gqa_mapping": attention_probe.gqa_field((*site.trial.prefill, *site.trial.decode), "trial: known Q, K, V through attn.impl"),
        "qkv_layout": site.documented("q heads, k heads, v heads", "model_executor/layers/linear.py: QKVParallelLinear"),
        "segment_boundaries": read("per sequence", "query_start_loc and seq_lens of the attention metadata"),
    }


def _ownership(site: Site, own: int) -> Reading:
    ranks = site.tp.world_size
    if site.trial.heads:
        return head_canary.ownership(site.trial.heads[0], own, ranks)
    return read([[r * own, (r + 1) * own] for r in range(ranks)], "self_attn.num_heads, over ranks; compiled code calls no hook")


def _paged_kv(site: Site) -> Fields:
    cache, source = site.cache, "trial: K and V of the first layer, read through the kernel's own block table"
    positions = rope_probe.rotation_fields(site.trial.rotation, site.trial.positions_passed, "trial: positions of prefill and decode steps")
    written = "the older weights" if cache.stale_pages else "as loaded"
    return {
        "logical_token_order": read(cache.order, cache.why or source) if cache.order else unknown(f"{source}: {cache.why}"),
        "cache_identity": _cache_identity(site),
        "position_ids": positions["position_ids"],
        "weight_version": read(written, f"trial: {_pages(cache)} that outlived a weight update, against what the loaded weights write"),
        "kv_dtype": read(dtype_name(site.attention.attn.kv_cache), "attn.kv_cache.dtype"),
        "paged_kv_policy": read(type(site.scheduler.kv_cache_manager).__name__, "type(scheduler.kv_cache_manager)"),
        "page_table": read(
            {"as handed out": list(cache.pages), "shuffled": list(cache.shuffled), "sha256 in logical order": cache.digest},
            f"pages of the trial's request; the cache has {site.runner.kv_cache_config.num_blocks}",
        ),
        "block_size": read(block_size(site), "kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size"),
        "prefix_cache_hits": read(
            cache.survived, "trial: tokens that a request reads behind a weight update, where nothing resets the prefix cache"
        ),
    }


def _cache_identity(site: Site) -> Reading:
    source = "trial: a weight update with what this tool does at one, then a request that may read the prefix cache"
    if site.cache.after_reset:
        return read(f"K and V of older weights in {site.cache.stale_pages} pages", source)
    return read("cold", source)


def _pages(cache: CacheTrial) -> str:
    return f"{cache.after_reset} cached tokens" if cache.after_reset else "no page"


def _attention_precision(site: Site) -> Fields:
    isa, dtype = getattr(site.attention.attn, "isa", ""), site.config.dtype
    triton = not isa and site.attention.attn.attn_backend.get_name() == "TRITON_ATTN"
    source = f"csrc/cpu/cpu_attn_{isa}.hpp" if isa else "triton_unified_attention.py" if triton else "vllm_flash_attn"
    policy = f"scores and softmax float32, probabilities {dtype}"
    if isa == "vec":
        policy = "scores, softmax and probabilities float32"
    elif triton and dtype == "float32":  # tl.dot without input_precision: torch's switch for TF32 does not reach it
        policy = "products TF32, softmax float32"
    return {
        "accum_dtype": site.documented("float32", source),
        "downcast_at": site.documented("final_write", source),
        "kv_dtype": read(dtype_name(site.attention.attn.kv_cache), "attn.kv_cache.dtype"),
        "backend_policy": site.documented(policy, source),
    }


def window(value: Any) -> int:
    """Tokens in the window, the current one included; 0 is none. As a pair, vLLM's value leaves the current token out."""
    left = value[0] if isinstance(value, tuple) else value
    if left is None or left < 0:
        return 0
    return int(left) + 1 if isinstance(value, tuple) else int(left)


def _as_float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def _only(values: Any) -> float:
    (value,) = values
    return float(value)
