"""The rollout's contract, read back from the live vLLM engine, and its provenance.

*Read* values name the attribute they come from, or the trial by which the live engine was asked. *Documented* ones hold for the versions
in `vllm_site.DOCUMENTED_VERSIONS` and name the source file; for any other version they are unknown. The forms are the trainer's too.
"""

from __future__ import annotations

from typing import Any

import torch

from rlmismatch.contract import not_applicable, read, unknown
from rlmismatch.engines import gemm_knobs, vllm_readings_gemm, vllm_trials, vllm_weights
from rlmismatch.engines.vllm_readings_attention import attention_readings
from rlmismatch.engines.vllm_readings_logprob import logprob_readings
from rlmismatch.engines.vllm_site import (
    Fields,
    Site,
    compile_mode,
    fill,
    forward_method,
    gemm_library,
    is_eager,
    one_value,
)


def readings(site: Site) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: short trials run on all ranks."""
    graph = site.vllm_config.compilation_config
    return {
        "gemm.runtime_flags": vllm_readings_gemm.runtime_flags(site),
        "gemm.kernel": {
            "backend_id": read(gemm_library(site), "qkv_proj.quant_method, cpu_linear"),
            "batch_invariant": read(gemm_knobs.vllm_batch_invariant(), "VLLM_BATCH_INVARIANT"),
        },
        "gemm.forward_reduce": vllm_readings_gemm.forward_reduce(site),
        "rollout.all_reduce_backend": vllm_readings_gemm.all_reduce_backend(site),
        **attention_readings(site),
        **logprob_readings(site),
        "model.weights": {
            "tied_head": read(vllm_weights.is_tied(site.live), "lm_head.weight and embed_tokens.weight share memory"),
            "buffers": read(_buffers(site), "named_buffers(), without rotary tables and KV scales"),
            "weight_version": read("as loaded", "the checkpoint is loaded once"),
        },
        "model.norm": _norm(site),
        "model.qk_norm": _qk_norm(site),
        "model.activation": {
            "kind": read("swiglu" if type(site.live.layers[0].mlp.act_fn).__name__ == "SiluAndMul" else "?", "type(mlp.act_fn)"),
            "rounding": site.by_device(
                cpu=("silu, then the product", "model_executor/layers/activation.py: forward_native"),
                cuda=("silu, then the product", "csrc/activation_kernels.cu"),
            ),
            "fusion": read(forward_method(site.live.layers[0].mlp.act_fn), "act_fn._forward_method"),
        },
        "model.mode": {
            "attention_dropout": read(_dropout(site, "attn.impl"), "attn.impl: no dropout attribute"),
            "hidden_dropout": read(_dropout(site, "modules"), "model.modules(): Dropout modules"),
            "training_flag": read(bool(site.live.model.training), "model.training"),
        },
        "model.compile": {
            "mode": read("eager" if is_eager(graph) else compile_mode(graph), "compilation_config.mode, cudagraph_mode"),
            "capture_sizes": read(list(graph.cudagraph_capture_sizes or []), "compilation_config.cudagraph_capture_sizes"),
            "padded_rows": read(0, "no graph is captured") if is_eager(graph) else unknown("graphs pad their rows"),
        },
    }


def _norm(site: Site) -> Fields:
    norms = [n for layer in site.live.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms.append(site.live.model.model.norm)
    return {
        "eps": read(one_value(float(n.variance_epsilon) for n in norms), "variance_epsilon of every layer norm"),
        "variant": read("rms" if one_value(type(n).__name__ for n in norms) == "RMSNorm" else "?", "type of every layer norm"),
        "norm_dtype": site.documented("float32", "ir/ops/layernorm.py"),
        "residual_rounded_before_norm": site.by_device(
            cpu=(False, "ir/ops/layernorm.py: fused_add_rms_norm"), cuda=(True, "csrc/layernorm_kernels.cu")
        ),
        "cast_before_weight": site.documented(True, "ir/ops/layernorm.py"),
        "fusion": read(f"add and norm, {forward_method(norms[0])}", "input_layernorm._forward_method"),
    }


def _qk_norm(site: Site) -> Fields:
    if not hasattr(site.attention, "q_norm"):
        absent = fill("eps norm_dtype cast_before_weight fusion", not_applicable("no q/k-norm in the model"))
        return {"present": read(False, "no self_attn.q_norm"), **absent}
    norms = [n for layer in site.live.layers for n in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
    return {
        "present": vllm_trials.qk_norm_acts(site.live, site.runner.dtype),
        "eps": read(one_value(float(n.variance_epsilon) for n in norms), "variance_epsilon of every q/k norm"),
        "norm_dtype": site.documented("float32", "ir/ops/layernorm.py"),
        "cast_before_weight": site.documented(True, "ir/ops/layernorm.py"),
        "fusion": read(forward_method(norms[0]), "q_norm._forward_method"),
    }


def _dropout(site: Site, where: str) -> Any:
    """The dropout in force: vLLM has none, so anything that could be one is looked for."""
    if where == "attn.impl":
        return one_value(float(getattr(layer.self_attn.attn.impl, "dropout", 0.0)) for layer in site.live.layers)
    return one_value([0.0, *(m.p for m in site.live.model.modules() if isinstance(m, torch.nn.Dropout) and m.training)])


def _buffers(site: Site) -> list[str]:
    ignored = (".rotary_emb.", ".attn._")
    return sorted(name for name, _ in site.live.model.named_buffers() if not any(part in name for part in ignored))
