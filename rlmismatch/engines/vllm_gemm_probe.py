"""The rollout's part of the GEMM probe: inputs of its live products out of a prefill, its ways to sum, and which of them ran when."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from rlmismatch.engines import gemm_flips, gemm_probe, vllm_sums
from rlmismatch.engines.gemm_probe import Product, Seen, SumSite
from rlmismatch.kernels import gemm
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    from rlmismatch.engines.vllm_collectives import Call, CollectiveLog, Phase
    from rlmismatch.engines.vllm_scoring import Scorer
    from rlmismatch.pins.vllm_live import LiveModel


@contextlib.contextmanager
def watching(live: LiveModel) -> Iterator[Seen]:
    """Keeps the inputs of every product of the forwards while the context is open."""
    seen = Seen()

    def hook(name: str, target: Any, place: str, argument: int) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen.add(name, args[argument])
                return native(*args, **kwargs)

            return call

        return Patch(target=target, name=place, make=make, pins=(), label=f"probe {name}")

    patches = [hook("lm_head", *_head_place(live), 1)]
    for i, layer in enumerate(live.layers):
        here, attention, mlp = f"layers.{i}", layer.self_attn, layer.mlp
        patches += [
            hook(f"{here}.qkv", attention.qkv_proj.quant_method, "apply", 1),
            hook(f"{here}.o_proj", attention.o_proj, "forward", 0),
            hook(f"{here}.gate_up", mlp.gate_up_proj.quant_method, "apply", 1),
            hook(f"{here}.down_proj", mlp.down_proj, "forward", 0),
        ]
    with installed(patches):
        yield seen


Began = tuple[Counter["Call"], Counter["Phase"]]


def steps(sequences: Seq[Sequence], *, scorer: Scorer, log: CollectiveLog, began: Began) -> dict[str, torch.Tensor]:
    """The ``alone`` and ``collective`` facts: all sequences decoded together, the first two again each by itself. Collective.

    began: the log's calls and steps when the arm began; what ran since is counted, prefills included.
    """
    scored = [s for s in sequences if s.response_ids]
    together = scorer.score("decode", scored)
    ran = _ran(log, began)
    apart = [(scorer.score("decode", [s])[s.id], together[s.id]) for s in scored[:2]]
    return gemm_probe.alone({"decode": apart if len(scored) > 1 else []}) | ran


def replay(
    live: LiveModel,
    seen: Seen,
    sequences: Seq[Sequence],
    *,
    log: CollectiveLog,
    communicator: Any | None,
    impl: gemm.Impl,
    interpreted: bool,
) -> dict[str, torch.Tensor]:
    """The ``replay``, ``sum``, ``backend`` and ``flag`` facts, with no pin in force. Collective."""
    ways, decoded = _ways(live, communicator, impl), sum(bool(s.response_ids) for s in sequences)
    site = SumSite(tp=live.tp, ways=ways, backends=log.live_backends(), decode_rows=decoded)
    flags = gemm_flips.live_flags(seen.joined("lm_head").device.type)
    return gemm_probe.tensors(_products(live, seen), site, impl=impl, interpreted=interpreted, flags=flags)


def _ran(log: CollectiveLog, began: Began) -> dict[str, torch.Tensor]:
    calls, steps = log.calls - began[0], log.steps - began[1]
    return {
        f"collective/{c.phase}/{c.op}/{c.backend}/{c.dtype}/{c.size_bytes}": torch.tensor([n, steps[c.phase]], dtype=torch.float64)
        for c, n in sorted(calls.items())
    }


def _head_place(live: LiveModel) -> tuple[Any, str]:
    """Where the head's product is called: a head in another dtype than the model's bypasses quant_method."""
    processor = live.model.logits_processor
    return (processor, "_apply_head") if hasattr(processor, "_apply_head") else (live.model.lm_head.quant_method, "apply")


def _products(live: LiveModel, seen: Seen) -> Iterator[Product]:
    def linear(name: str, module: Any, columns: Mapping[str, slice], *, partial: bool = False) -> Product:
        # A row-parallel layer's bias stands behind the sum over ranks.
        bias = None if partial else getattr(module, "bias", None)

        def native(x_MK: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module.quant_method.apply(module, x_MK, bias)
            return out

        weight = live.weight(module)
        return Product(name=name, x_MK=seen.joined(name), weight_NK=weight, bias_N=bias, native=native, columns=columns, partial=partial)

    nothing = slice(0)
    for i, layer in enumerate(live.layers):
        here, attention, mlp = f"layers.{i}", layer.self_attn, layer.mlp
        q, kv = attention.q_size, attention.kv_size
        heads = {
            f"{here}.q_proj": slice(0, q),
            f"{here}.k_proj": slice(q, q + kv) if live.owns_kv_heads else nothing,
            f"{here}.v_proj": slice(q + kv, q + 2 * kv) if live.owns_kv_heads else nothing,
        }
        yield linear(f"{here}.qkv", attention.qkv_proj, heads)
        yield linear(f"{here}.o_proj", attention.o_proj, {f"{here}.o_proj": slice(None)}, partial=True)
        width = live.weight(mlp.gate_up_proj).shape[0] // 2
        halves = {f"{here}.gate_proj": slice(0, width), f"{here}.up_proj": slice(width, None)}
        yield linear(f"{here}.gate_up", mlp.gate_up_proj, halves)
        yield linear(f"{here}.down_proj", mlp.down_proj, {f"{here}.down_proj": slice(None)}, partial=True)
    yield _head(live, seen)


def _head(live: LiveModel, seen: Seen) -> Product:
    head, shard = live.model.lm_head, live.model.lm_head.shard_indices
    target, place = _head_place(live)
    dtype = getattr(live.model.logits_processor, "head_dtype", None) or seen.joined("lm_head").dtype
    real = slice(0, shard.org_vocab_end_index - shard.org_vocab_start_index)
    return Product(
        name="lm_head",
        x_MK=seen.joined("lm_head").to(dtype),
        weight_NK=live.weight(head).to(dtype),
        native=lambda x_MK: getattr(target, place)(head, x_MK, None),
        columns={"lm_head": real},
    )


def _ways(live: LiveModel, communicator: Any | None, impl: gemm.Impl) -> dict[str, gemm_probe.Sum]:
    """The engine's all-reduce as its layers call it, its reduce-scatter and all-gather, and rank order; whole sums [M, N]."""
    if communicator is None:
        return {}
    return {
        "all_reduce": live.all_reduce,
        "reduce_scatter": vllm_sums.by_reduce_scatter(communicator),
        "rank_order": vllm_sums.in_rank_order(live.tp, impl),
    }
