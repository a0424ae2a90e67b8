"""The trainer's contract, read back from the live GPTModel.

A value that was read names the attribute it comes from, or the trial by which the live engine was asked; a documented one names the
source file. The canonical forms are shared with the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rlmismatch.contract import not_applicable, read, unknown
from rlmismatch.engines import (
    attention_knobs,
    gradient_trials,
    megatron_attention,
    megatron_cp,
    megatron_plants,
    megatron_readings_gemm,
    megatron_trials,
)
from rlmismatch.engines.megatron_evidence import (
    Fields,
    by_table,
    dtype_of,
    fill,
    gemm_library,
    one_value,
)
from rlmismatch.engines.megatron_readings_attention import attention_readings, scores_module
from rlmismatch.engines.megatron_readings_logprob import logprob_family

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


def read_all(engine: MegatronEngine) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: three short trials run on all ranks."""
    return {
        "gemm.runtime_flags": megatron_readings_gemm.runtime_flags(engine),
        "gemm.kernel": _gemm_kernel(engine),
        "gemm.dgrad_reduce": gradient_trials.dgrad_reduce(engine),
        "gemm.forward_reduce": megatron_readings_gemm.forward_reduce(engine),
        "gemm.wgrad_accumulate": gradient_trials.wgrad_accumulate(engine),
        **attention_readings(engine),
        "attention.merge_order": megatron_cp.merge_readings(engine),
        "attention.precision": attention_knobs.held_precision(engine.config, _attention_precision(engine)),
        "attention.backend_reuse": attention_knobs.capability_readings(engine.config, engine.device),
        "attention.backward": megatron_attention.backward_readings(engine),
        **logprob_family(engine),
        "model.weights": {
            "tied_head": read(engine.live_tied, "share_embeddings_and_output_weights, output_layer.weight"),
            "buffers": read(sorted(name for name, _ in engine.gpt.named_buffers()), "GPTModel.named_buffers()"),
            "weight_version": read("as loaded", "the checkpoint is loaded once"),
        },
        "model.norm": _norm(engine),
        "model.qk_norm": _qk_norm(engine),
        "model.activation": _activation(engine),
        "model.mode": _mode(engine),
        "model.compile": {
            "mode": read("eager", "config.cuda_graph_impl")
            if engine.gpt.config.cuda_graph_impl == "none"
            else unknown("CUDA graphs are on"),
            "capture_sizes": read([], "config.cuda_graph_impl"),
            "padded_rows": read(0, "config.cuda_graph_impl"),
        },
    }


def _gemm_kernel(engine: MegatronEngine) -> Fields:
    return {
        "backend_id": by_table(gemm_library(engine), "tensor_parallel/layers.py"),
        "batch_invariant": read(bool(engine.gpt.config.batch_invariant_mode), "config.batch_invariant_mode"),
    }


def _attention_precision(engine: MegatronEngine) -> Fields:
    core = engine.gpt.decoder.layers[0].self_attention.core_attention
    local = engine.config.trainer_spec == "local"
    dtype, source = engine.config.dtype, "transformer/dot_product_attention.py: baddbmm, softmax, bmm" if local else "transformer_engine"
    if local and engine.cp.size > 1:
        return megatron_cp.precision_readings(engine)
    softmax = "float32" if not local or core.scale_mask_softmax.softmax_in_fp32 else dtype
    return {
        "accum_dtype": by_table("float32", source),
        "downcast_at": by_table("final_write", source),
        "kv_dtype": read(dtype_of(engine.gpt.decoder.layers[0].self_attention.linear_qkv.weight), "linear_qkv.weight.dtype"),
        "backend_policy": by_table(f"scores {dtype}, softmax {softmax}, probabilities {dtype}" if local else "fused", source),
    }


def _norm(engine: MegatronEngine) -> Fields:
    norms = megatron_plants.layer_norms(engine.gpt)
    local = engine.config.trainer_spec == "local"
    source = "torch.nn.functional.rms_norm" if local else "transformer_engine RMSNorm"
    return {
        "eps": read(one_value(float(norm.eps) for norm in norms), "eps of every layer norm"),
        "variant": read("rms" if engine.gpt.config.normalization == "RMSNorm" else engine.gpt.config.normalization, "config.normalization"),
        "norm_dtype": by_table("float32", source),
        "residual_rounded_before_norm": by_table(True, "fusions/fused_bias_dropout.py"),
        "cast_before_weight": by_table(False, f"{source} rounds once, behind the weight"),
        "fusion": read("none" if local else "norm and linear in one module", "type(linear_qkv)"),
    }


def _qk_norm(engine: MegatronEngine) -> Fields:
    present = megatron_trials.qk_norm_acts(engine)
    if not engine.gpt.config.qk_layernorm:
        return {"present": present, **fill(not_applicable("no q/k-norm in the model"), "eps", "norm_dtype", "cast_before_weight", "fusion")}
    layers = engine.gpt.decoder.layers
    source = "torch.nn.functional.rms_norm" if engine.config.trainer_spec == "local" else "transformer_engine RMSNorm"
    norms = [norm for layer in layers for norm in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)]
    return {
        "present": present,
        "eps": read(one_value(float(norm.eps) for norm in norms), "eps of every q/k norm"),
        "norm_dtype": by_table("float32", source),
        "cast_before_weight": by_table(False, f"{source} rounds once, behind the weight"),
        "fusion": read("none", "type(q_layernorm)"),
    }


def _activation(engine: MegatronEngine) -> Fields:
    config = engine.gpt.config
    swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    fused = config.bias_activation_fusion
    return {
        "kind": read("swiglu" if swiglu else getattr(config.activation_func, "__name__", "?"), "config.gated_linear_unit, activation_func"),
        "rounding": by_table("one" if fused else "silu, then the product", "transformer/mlp.py"),
        "fusion": read("bias and activation" if fused else "none", "config.bias_activation_fusion"),
    }


def _mode(engine: MegatronEngine) -> Fields:
    layers, training = engine.gpt.decoder.layers, engine.gpt.training

    def in_force(probabilities: Iterable[float]) -> Any:
        return one_value(p if training else 0.0 for p in probabilities)

    attention = [float(scores_module(engine, x.self_attention.core_attention).attention_dropout.p) for x in layers]
    return {
        "attention_dropout": read(in_force(attention), "core_attention.attention_dropout.p, if the modules are in train mode"),
        "hidden_dropout": read(in_force(float(x.hidden_dropout) for x in layers), "layer.hidden_dropout, if the modules are in train mode"),
        "training_flag": read(bool(training), "GPTModel.training"),
    }
