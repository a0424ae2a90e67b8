"""What ran on the trainer's side: versions, classes, switches, environment."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from rlmismatch.engines import attention_forced, attention_knobs, attention_ran, megatron_trials
from rlmismatch.engines.attention_ran import Ran
from rlmismatch.engines.megatron_evidence import core_version, dtype_of
from rlmismatch.engines.megatron_readings_attention import scores_module

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

_SWITCHES: Final = (
    "apply_rope_fusion",
    "attention_softmax_in_fp32",
    "batch_invariant_mode",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "deterministic_mode",
    "fp32_residual_connection",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
_ENVIRONMENT: Final = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
)


def provenance(engine: MegatronEngine) -> dict[str, Any]:
    """Versions, classes that run, groups, switches and environment: JSON."""
    gpt = engine.gpt
    layer, config = gpt.decoder.layers[0], gpt.config
    modules = {
        "input_layernorm": layer.input_layernorm,
        "linear_qkv": layer.self_attention.linear_qkv,
        "q_layernorm": layer.self_attention.q_layernorm,
        "core_attention": layer.self_attention.core_attention,
        "linear_proj": layer.self_attention.linear_proj,
        "pre_mlp_layernorm": layer.pre_mlp_layernorm,
        "linear_fc1": layer.mlp.linear_fc1,
        "linear_fc2": layer.mlp.linear_fc2,
        "final_layernorm": gpt.decoder.final_layernorm,
        "output_layer": gpt.output_layer,
    }
    return {
        "engine": "megatron-core",
        "versions": {
            "megatron-core": core_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "transformer-engine": _version("transformer-engine") or _version("transformer_engine_torch"),
            "cuda": torch.version.cuda,
            "nccl": _nccl() if engine.device.type == "cuda" else None,
        },
        "spec": engine.config.trainer_spec,
        "impl": engine.config.impl,
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": dtype_of(next(gpt.parameters())),
        "collectives": dist.get_backend(engine.tp.group),
        "tp_ranks": dist.get_process_group_ranks(engine.tp.group),
        "modules": {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules.items()},
        "config": {name: getattr(config, name) for name in _SWITCHES},
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "env": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "attention_ran": _attention_ran(engine),
        "attention_forced": attention_forced.facts(_shape(engine)) if engine.config.try_backends and engine.config.cp == 1 else {},
        "attention_candidates": attention_knobs.candidate_facts(engine.config),
        "plants": {name: plant.what for name, plant in engine.plants.items()},
    }


def _shape(engine: MegatronEngine) -> attention_forced.Shape:
    model, tp = engine.model, engine.tp.size
    dtype = getattr(torch, engine.config.dtype)
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    return attention_forced.Shape(heads=heads, kv_heads=kv_heads, dim=model.head_dim, dtype=dtype, device=engine.device)


def _attention_ran(engine: MegatronEngine) -> list[dict[str, Any]]:
    trial = engine.attention_trial
    backend = str(megatron_trials.attention_backend(engine).value)
    ran = [Ran(backend=backend, kernel="", calls=calls) for calls in trial.calls]
    attention = engine.gpt.decoder.layers[0].self_attention
    scale = float(scores_module(engine, attention.core_attention).softmax_scale)
    return attention_ran.rows("forward", ran, trial.operators, scale=scale, kv_dtype=dtype_of(attention.linear_qkv.weight))


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
