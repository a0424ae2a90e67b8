"""The trainer's log-prob contract, read back from the live GPTModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch.distributed as dist

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines import collective_order, megatron_trials
from rlmismatch.engines.logprob_knobs import COLLECTIVES, ORDERS, chain_fields
from rlmismatch.engines.megatron_evidence import (
    Fields,
    by_table,
    core_version,
    dtype_of,
    from_environment,
    gemm_library,
)
from rlmismatch.engines.megatron_readings_backward import logprob_backward, loss_that_ran
from rlmismatch.pins.megatron_logprob import NATIVE_WAY, Fusion

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


_IMPLS: Final[Mapping[Fusion, str]] = {
    "none": "mcore_unfused",
    "native": "mcore_native_fused",
    "te": "mcore_te_fused",
    "chunked_linear_ce": "chunked_linear_ce",
    "slime_vocab_parallel": "slime_vocab_parallel",
}
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


def logprob_family(engine: MegatronEngine) -> dict[str, Fields]:
    """axis id -> field -> reading. Collective: runs short trials on all ranks."""
    loss = megatron_trials.loss(engine)
    chain, merge = loss.chain, _merge(engine)
    backward = logprob_backward(engine, loss)
    return {
        "logprob.provenance": _logprob_provenance(engine, chain, backward),
        "logprob.vocab_padding": _vocab_padding(engine, loss.padding),
        "logprob.vocab_shards": _vocab_shards(engine, loss.columns),
        "logprob.reduce": _logprob_reduce(engine, loss.offset, merge),
        "logprob.merge_order": _merge_order(engine, merge),
        "logprob.precision": _logprob_precision(engine),
        "logprob.transform_chain": chain_fields(chain),
        "logprob.selected_gather": {
            "single_owner": loss.single_owner,
            "shift_convention": read("logits[t] score token t+1", "labels handed to GPTModel.forward"),
            "ignore_index": by_table("none", "tensor_parallel/cross_entropy.py"),
            "active_mask": read("response tokens", "slice of the loss that is kept"),
        },
        "logprob.head_gemm": _head_gemm(engine),
        "logprob.fusion": _fusion(engine),
        "logprob.backward": backward,
    }


def _by_way(engine: MegatronEngine, value: Any, source: str) -> Reading:
    """`value` by the table of Megatron's own loss, or as read from the settings where another loss is in force."""
    settings = engine.native_settings
    own = settings.way == NATIVE_WAY and settings.fusion in ("none", "native")
    return by_table(value, source) if own else read(value, "settings of the loss that is in force")


def _fusion(engine: MegatronEngine) -> Fields:
    settings, config = engine.native_settings, engine.gpt.config
    live = config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else "none"
    none = not_applicable("no loss in tiles")
    tiled, chunked = settings.fusion == "chunked_linear_ce", settings.fusion in ("chunked_linear_ce", "slime_vocab_parallel")
    return {
        "fusion_impl": read("chunked_linear_ce" if tiled else live, "config.cross_entropy_loss_fusion, and the hook on the loss"),
        "block_size": read(settings.block_size, "settings of the loss that is in force") if tiled else none,
        "chunk_size": read(settings.chunk_size, "settings of the loss that is in force") if chunked else none,
    }


def _logprob_provenance(engine: MegatronEngine, chain: Reading, backward: Fields) -> Fields:
    config = engine.gpt.config
    settings = engine.native_settings
    live: Fusion = config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else "none"
    impl = _IMPLS[settings.fusion if settings.fusion in ("chunked_linear_ce", "slime_vocab_parallel") else live]
    asked = {k: v for k, v in engine.config.knobs.items() if k in ("logprob.trainer_impl", "logprob.fusion_impl")}
    fusion = asked.get("logprob.fusion_impl")
    requested = _IMPLS[cast(Fusion, fusion)] if fusion else asked.get("logprob.trainer_impl", "mcore_unfused")
    ran = loss_that_ran(engine, backward, impl)
    refused = "; ".join(o["reason"] for k, o in engine.knob_outcomes.items() if k in asked and o["status"] != "applied")
    return {
        "vocab_size": _real_vocabulary(engine),
        "tensor_parallel_size": read(engine.tp.size, "size of the live tensor-parallel group"),
        "model_dtype": read(dtype_of(*engine.gpt.parameters()), "dtype of every parameter"),
        "transform_chain": chain,
        "active_mask": read("response tokens", "slice of the loss that is kept"),
        "impl": ran,
        "version": read(core_version(), "megatron.core.__version__"),
        "requested_backend": read(requested, "--trainer-impl, --fusion-impl"),
        "actual_backend": ran,
        "fallback_reason": read(refused, "outcome of the knob") if refused else not_applicable("what was asked for is in force"),
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


def _vocab_shards(engine: MegatronEngine, columns: Reading) -> Fields:
    embedding = engine.gpt.embedding.word_embeddings
    width = embedding.vocab_end_index - embedding.vocab_start_index
    return {
        "global_vocab": columns,
        "boundaries": read(
            [[r * width, (r + 1) * width] for r in range(engine.tp.size)], "word_embeddings.vocab_start_index, vocab_end_index"
        ),
    }


def _merge(engine: MegatronEngine) -> Reading:
    """In which order the ranks' partials become one: of the live collective, or of the loss of ours that is in force. Collective."""
    tp, way = engine.tp, engine.native_settings.way
    if tp.size <= 2:
        return not_applicable("TP1: nothing to reduce" if tp.size == 1 else "two ranks: one addition, no order")
    if way.reduce in ORDERS:
        return read(ORDERS[way.reduce], "settings of the loss that is in force")

    what = f"{collective_order.backend_of(tp)}'s all_reduce of the tp group"
    return collective_order.asked(collective_order.all_reduce(tp), tp, engine.device, what)[0]


def _logprob_reduce(engine: MegatronEngine, offset: Reading, merge: Reading) -> Fields:
    tp, way = engine.tp.size, engine.native_settings.way
    return {
        # A denominator that is off by a constant is a sum with terms counted twice, whatever the order.
        "order": read(f"log-sum-exp off by {offset.value:+.4f}", offset.source) if offset.value else merge,
        "acc_dtype": _by_way(engine, _DTYPES[way.accum], "tensor_parallel/cross_entropy.py: logits upcast first"),
        "collective": read("none" if tp == 1 else COLLECTIVES[way.reduce], "size of the live tensor-parallel group"),
        "engine": read(dist.get_backend(engine.tp.group), "torch.distributed.get_backend(tp group)"),
    }


def _merge_order(engine: MegatronEngine, merge: Reading) -> Fields:
    fixed = engine.native_settings.way.reduce in ORDERS and engine.tp.size > 2
    return {
        "merge_order": read("global_vocab_shard_index", merge.source) if fixed else merge,
        "nccl_algo": from_environment("NCCL_ALGO"),
        "nccl_proto": from_environment("NCCL_PROTO"),
        "topology": read(
            "; ".join(filter(None, (f"{engine.tp.size} ranks", engine.config.sharing))), "size of the live tensor-parallel group"
        ),
    }


def _logprob_precision(engine: MegatronEngine) -> Fields:
    way = engine.native_settings.way
    sent = "bfloat16 partials" if way.downcast == "per_partial" else "exact"
    return {
        "head_dtype": megatron_trials.head_dtype(engine),
        "accum_dtype": _by_way(engine, _DTYPES[way.accum], "tensor_parallel/cross_entropy.py: logits upcast first"),
        "downcast_at": _by_way(engine, way.downcast, "tensor_parallel/cross_entropy.py"),
        "transport_dtype": (
            not_applicable("TP1: nothing is sent") if engine.tp.size == 1 else _by_way(engine, sent, "tensor_parallel/cross_entropy.py")
        ),
    }


def _head_gemm(engine: MegatronEngine) -> Fields:
    rows = engine.ops.shape.head.rows
    return {
        "logical_rows": megatron_trials.head_rows(engine),
        "physical_rows": read(
            rows or "every token of the sequence", "settings of the head that is in force" if rows else "GPTModel.forward"
        ),
        "kernel": by_table(gemm_library(engine), "tensor_parallel/layers.py"),
        "tile_split_k": unknown("the library chooses, and does not report it"),
        "padded_batch_size": not_applicable("no graph is captured"),
    }


def _real_vocabulary(engine: MegatronEngine) -> Reading:
    return read(engine.model.vocab_size, "config.json: the live model knows the padded size only")
