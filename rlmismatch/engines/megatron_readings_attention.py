"""The trainer's readings of the attention axes, but for reduction, precision and backward (megatron_readings.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.contract import not_applicable, read
from rlmismatch.engines import megatron_cp, megatron_trials
from rlmismatch.engines.megatron_evidence import Fields, by_table, derived, dtype_of

if TYPE_CHECKING:
    from typing import Any

    from rlmismatch.engines.megatron import MegatronEngine

_POW_ERROR: Final = 2.0**-21  # relative; four units in the last place of float32


def attention_readings(engine: MegatronEngine) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: a short trial runs on all ranks."""
    rope = _rope(engine)
    return {
        "attention.provenance": _attention_provenance(engine, rope),
        "attention.materialization": {
            "logical_rows": by_table("one query row per token", "transformer/dot_product_attention.py"),
            "physical_form": by_table("full_prefill", "models/gpt/gpt_model.py: forward without an inference context"),
            "chunk_size": not_applicable("the trainer runs a sequence in one piece"),
            "block_size": not_applicable("no KV cache in the trainer"),
        },
        "attention.rope": rope,
        "attention.layout": _attention_layout(engine),
        "attention.lse": megatron_cp.lse_readings(engine),
    }


def _attention_provenance(engine: MegatronEngine, rope: Fields) -> Fields:
    gpt = engine.gpt
    attention = gpt.decoder.layers[0].self_attention
    core, config = attention.core_attention, gpt.config
    scale = scores_module(engine, core).softmax_scale
    return {
        **_heads(engine),
        "dtype": read(dtype_of(attention.linear_qkv.weight), "linear_qkv.weight.dtype"),
        "tensor_parallel_size": read(engine.tp.size, "size of the live tensor-parallel group"),
        "context_parallel_size": read(int(config.context_parallel_size), "config.context_parallel_size"),
        "mask": read(attention.attn_mask_type.name, "self_attention.attn_mask_type"),
        "sliding_window": read(0 if config.window_size is None else int(config.window_size[0]) + 1, "config.window_size"),
        "softmax_scale": read(float(torch.tensor(scale, dtype=torch.float32)), "core_attention.softmax_scale, as float32"),
        "logit_soft_cap": by_table(0.0, "transformer/dot_product_attention.py"),
        "sinks": read(config.softmax_type != "vanilla", "config.softmax_type"),
        "rope_identity": derived(
            rope["theta"], lambda theta: f"theta={theta},scaling={rope['scaling'].value},factor={rope['attention_factor'].value}"
        ),
        "cache_identity": by_table("cold", "models/gpt/gpt_model.py: no inference context, so no cache"),
        "requested_backend": read(config.attention_backend.name, "config.attention_backend"),
        "actual_backend": megatron_trials.attention_backend(engine),
        "mode": read("eager", "config.cuda_graph_impl"),
        "fallback_reason": not_applicable("the spec names the class"),
    }


def _rope(engine: MegatronEngine) -> Fields:
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
        "attention_factor": by_table(1.0, "transformer/attention.py: mscale is 1 without YaRN"),
        "rotary_dim": read(width, "rotary_pos_emb.inv_freq"),
        "rotary_layout": read("interleaved" if engine.gpt.config.rotary_interleaved else "half", "config.rotary_interleaved"),
        "position_ids": by_table("0..n-1", "models/common/embeddings/rotary_pos_embedding.py: arange, position ids are ignored"),
        "cache_position": by_table("absolute", "models/common/embeddings/rotary_pos_embedding.py"),
        "q_rope_state": by_table("rotated", "transformer/attention.py"),
        "k_cache_rope_state": by_table("rotated", "transformer/attention.py: K as core attention gets it"),
        "cos_sin_dtype": by_table(engine.config.dtype, "models/common/embeddings/rope_utils.py: cast to the operand's dtype"),
        "rope_fusion_boundary": read("fused" if engine.gpt.config.apply_rope_fusion else "unfused", "config.apply_rope_fusion"),
    }


def _attention_layout(engine: MegatronEngine) -> Fields:
    own = _query_heads(engine) // engine.tp.size
    return {
        **_heads(engine),
        "tp_head_ownership": read([[rank * own, (rank + 1) * own] for rank in range(engine.tp.size)], f"{_HEADS_SOURCE}, over ranks"),
        "gqa_mapping": by_table("block", "transformer/dot_product_attention.py: repeat_interleave"),
        "qkv_layout": by_table("per kv group: q heads, k, v", "transformer/attention.py: get_query_key_value_tensors"),
        "segment_boundaries": read("per sequence", "batch of 1, packed_seq_params is None"),
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
