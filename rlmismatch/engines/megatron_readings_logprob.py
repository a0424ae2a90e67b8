"""The trainer's log-prob contract, read back from the live GPTModel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines import megatron_trials
from rlmismatch.engines.megatron_evidence import (
    Fields,
    by_table,
    core_version,
    derived,
    dtype_of,
    forward_only,
    from_environment,
    gemm_library,
)

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


def logprob_family(engine: MegatronEngine) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: runs short trials on all ranks."""
    loss = megatron_trials.loss(engine)
    chain = loss.chain
    config = engine.gpt.config
    return {
        "logprob.provenance": _logprob_provenance(engine, chain),
        "logprob.vocab_padding": _vocab_padding(engine, loss.padding),
        "logprob.vocab_shards": _vocab_shards(engine),
        "logprob.reduce": _logprob_reduce(engine, loss.offset),
        "logprob.merge_order": _merge_order(engine),
        "logprob.precision": _logprob_precision(engine),
        "logprob.transform_chain": {
            "transform_chain": chain,
            "temperature_applied": loss.temperature,
            "logprobs_mode": derived(chain, lambda c: "processed_logprobs" if c else "raw_logprobs"),
            "soft_cap": derived(chain, lambda _: 0.0),
            "logit_scale": derived(chain, lambda _: 1.0),
            "top_p": derived(chain, lambda _: 1.0),
            "top_k": derived(chain, lambda _: 0),
            "min_p": derived(chain, lambda _: 0.0),
            "penalties": derived(chain, lambda _: []),
        },
        "logprob.selected_gather": {
            "single_owner": by_table(True, "tensor_parallel/cross_entropy.py: other ranks add 0"),
            "shift_convention": read("logits[t] score token t+1", "labels handed to GPTModel.forward"),
            "ignore_index": by_table("none", "tensor_parallel/cross_entropy.py"),
            "active_mask": read("response tokens", "slice of the loss that is kept"),
        },
        "logprob.head_gemm": _head_gemm(engine),
        "logprob.fusion": {
            "fusion_impl": read(
                config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else "none",
                "config.cross_entropy_loss_fusion",
            ),
            "block_size": not_applicable("no fused loss"),
            "chunk_size": not_applicable("no fused loss"),
        },
        "logprob.backward": forward_only("dlogits", "entropy_reduction", "grad_downcast_at", "autograd_path"),
    }


def _logprob_provenance(engine: MegatronEngine, chain: Reading) -> Fields:
    config = engine.gpt.config
    impl = f"mcore_{config.cross_entropy_fusion_impl}_fused" if config.cross_entropy_loss_fusion else "mcore_unfused"
    return {
        "vocab_size": _real_vocabulary(engine),
        "tensor_parallel_size": read(engine.tp.size, "size of the live tensor-parallel group"),
        "model_dtype": read(dtype_of(*engine.gpt.parameters()), "dtype of every parameter"),
        "transform_chain": chain,
        "active_mask": read("response tokens", "slice of the loss that is kept"),
        "impl": read(impl, "config.cross_entropy_loss_fusion"),
        "version": read(core_version(), "megatron.core.__version__"),
        "requested_backend": read(impl, "config.cross_entropy_loss_fusion"),
        "actual_backend": read(impl, "config.cross_entropy_loss_fusion is read at every call"),
        "fallback_reason": not_applicable("no fallback in the unfused loss"),
    }


def _vocab_padding(engine: MegatronEngine, padding: Reading) -> Fields:
    shard = engine.shard
    pad_rows = engine.gpt.vocab_size - shard.vocab_size
    return {
        "vocab_padding_policy": padding,
        "padded_vocab_size": read(int(engine.gpt.vocab_size), "GPTModel.vocab_size"),
        "org_vocab_size": _real_vocabulary(engine),
        "num_pad_rows": read(int(pad_rows), "GPTModel.vocab_size - config.json vocab_size"),
        "pad_row_init": megatron_trials.pad_rows(engine) if pad_rows else not_applicable("no padded row"),
    }


def _vocab_shards(engine: MegatronEngine) -> Fields:
    embedding = engine.gpt.embedding.word_embeddings
    width = embedding.vocab_end_index - embedding.vocab_start_index
    return {
        "global_vocab": _real_vocabulary(engine),
        "boundaries": read(
            [[r * width, (r + 1) * width] for r in range(engine.tp.size)], "word_embeddings.vocab_start_index, vocab_end_index"
        ),
    }


def _logprob_reduce(engine: MegatronEngine, offset: Reading) -> Fields:
    tp = engine.tp.size
    none = not_applicable("TP1: nothing to reduce" if tp == 1 else "two ranks: one addition, no order")
    order = none if tp <= 2 else unknown(f"{dist.get_backend(engine.tp.group)} does not report its order")
    return {
        # A denominator that is off by a constant is a sum with terms counted twice, whatever the order.
        "order": read(f"log-sum-exp off by {offset.value:+.4f}", offset.source) if offset.value else order,
        "acc_dtype": by_table("float32", "tensor_parallel/cross_entropy.py: logits upcast first"),
        "collective": read("none" if tp == 1 else "all_reduce of partials", "size of the live tensor-parallel group"),
        "engine": read(dist.get_backend(engine.tp.group), "torch.distributed.get_backend(tp group)"),
    }


def _merge_order(engine: MegatronEngine) -> Fields:
    tp = engine.tp.size
    few = not_applicable("at most two shards: one addition, no order")
    return {
        "merge_order": few if tp <= 2 else unknown(f"{dist.get_backend(engine.tp.group)} does not report its order"),
        "nccl_algo": from_environment("NCCL_ALGO"),
        "nccl_proto": from_environment("NCCL_PROTO"),
        "topology": read(f"{tp} ranks", "size of the live tensor-parallel group"),
    }


def _logprob_precision(engine: MegatronEngine) -> Fields:
    return {
        "head_dtype": megatron_trials.head_dtype(engine),
        "accum_dtype": by_table("float32", "tensor_parallel/cross_entropy.py: logits upcast first"),
        "downcast_at": by_table("final_write", "tensor_parallel/cross_entropy.py"),
        "transport_dtype": (
            not_applicable("TP1: nothing is sent") if engine.tp.size == 1 else by_table("exact", "tensor_parallel/cross_entropy.py")
        ),
    }


def _head_gemm(engine: MegatronEngine) -> Fields:
    return {
        "logical_rows": read("one row per scored token", "labels handed to GPTModel.forward"),
        "physical_rows": read("every token of the sequence", "GPTModel.forward"),
        "kernel": by_table(gemm_library(engine), "tensor_parallel/layers.py"),
        "tile_split_k": unknown("the library chooses, and does not report it"),
        "padded_batch_size": not_applicable("no graph is captured"),
    }


def _real_vocabulary(engine: MegatronEngine) -> Reading:
    return read(engine.model.vocab_size, "config.json: the live model knows the padded size only")
