"""The trainer's part of the log-prob probe: scored rows out of a live forward, and Megatron's own losses on one logits tensor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch.engines import logprob_probe, megatron_backward, megatron_model
from rlmismatch.engines.logprob_probe import MAX_ROWS, ProbeSite
from rlmismatch.pins import logprob_ways
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.logprob_ways import Reduce, Tiling, Way
from rlmismatch.pins.megatron_logprob import FIXED_MERGE, Fusion, LossSettings, merged_logprob, native_loss
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

# Blocks of columns and chunks of rows of the fused linear loss that are tried.
_TILINGS: Final = (Tiling(block_size=128, chunk_size=8), Tiling(block_size=1024, chunk_size=32), Tiling(block_size=8192, chunk_size=64))
_IMPLS: Final[Mapping[str, Fusion]] = {
    "mcore_unfused": "none",
    "mcore_native_fused": "native",
    "mcore_te_fused": "te",
    "slime_vocab_parallel": "slime_vocab_parallel",
}


@dataclasses.dataclass
class HeadRows:
    """Hidden rows and logits of the scored tokens, as the head read and wrote them."""

    hidden: list[torch.Tensor] = dataclasses.field(default_factory=list)
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watching_head(engine: MegatronEngine) -> Iterator[HeadRows]:
    """Keeps what the head reads and writes, whole, of every forward while the context is open. Collective."""
    rows = HeadRows()

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward_impl(input: torch.Tensor, **rest: Any) -> torch.Tensor:
            out: torch.Tensor = native(input=input, **rest)
            whole = torch.cat(engine.tp.gathered(input)) if rest["sequence_parallel"] else input
            rows.hidden.append(engine.cp.whole(whole[:, 0]).clone())
            rows.logits.append(engine.cp.whole(torch.cat(engine.tp.gathered(out[:, 0]), dim=-1)))
            return out

        return forward_impl

    with installed([Patch(target=engine.gpt.output_layer, name="_forward_impl", make=make, pins=(), label="probe")]):
        yield rows


def probe(engine: MegatronEngine, seen: HeadRows, scores: Mapping[str, torch.Tensor], sequences: Seq[Sequence]) -> dict[str, torch.Tensor]:
    """The tensors of `logprob_probe` for the first MAX_ROWS scored tokens of `sequences`. Collective."""
    hidden, logits, targets = [], [], []
    for sequence, hidden_SH, logits_SV in zip(sequences, seen.hidden, seen.logits, strict=True):
        scored = slice(len(sequence.prompt_ids) - 1, len(sequence.token_ids) - 1)
        hidden.append(hidden_SH[scored])
        logits.append(logits_SV[scored])
        targets += list(sequence.response_ids)
    recorded = torch.cat([scores[s.id] for s in sequences])[:MAX_ROWS]
    head = engine.gpt.shared_embedding_or_output_weight() if engine.live_tied else engine.gpt.output_layer.weight
    weight_VH = torch.cat(engine.tp.gathered(head.detach()))[: engine.shard.vocab_size]
    logits_NV = torch.cat(logits)[:MAX_ROWS]
    targets_N = torch.tensor(targets, device=engine.device)[:MAX_ROWS]
    hidden_NH = torch.cat(hidden)[:MAX_ROWS]

    def more() -> dict[str, torch.Tensor]:
        out = _linear(engine, hidden_NH, head.detach(), targets_N)
        out |= _impls(engine, logits_NV, targets_N)
        return out | megatron_backward.measure(engine, logits_NV, targets_N, hidden_NH, head.detach())

    site = ProbeSite(
        hidden_NH=hidden_NH,
        logits_NV=logits_NV,
        targets_N=targets_N,
        recorded_N=recorded,
        weight_VH=weight_VH,
        vocab_size=engine.shard.vocab_size,
        chain=engine.ops.shape.chain,
        head=lambda x_MH, dtype: _head(engine, head.detach(), x_MH, dtype),
        joined=lambda x_NV, t_N, reduce: _joined(engine, x_NV, t_N, reduce),
        more=more,
    )
    return logprob_probe.tensors(site)


def _head(engine: MegatronEngine, weight_VH: torch.Tensor, x_MH: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Logits [M, V, padding included] of all ranks by Megatron's own column-parallel GEMM."""
    x_MH, weight_VH = (t if dtype is None else t.to(dtype) for t in (x_MH, weight_VH))
    with torch.no_grad():
        own = engine.gpt.output_layer._forward_impl(
            input=x_MH[:, None].contiguous(),
            weight=weight_VH,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=engine.tp.group,
            grad_output_buffer=None,
        )
    return torch.cat(engine.tp.gathered(own[:, 0]), dim=-1)


def _own(engine: MegatronEngine, logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV[:, engine.shard.start : engine.shard.start + engine.shard.width].contiguous()


def _joined(engine: MegatronEngine, logits_NV: torch.Tensor, targets_N: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    shard, chain, own_NV = engine.shard, engine.ops.shape.chain, _own(engine, logits_NV)
    if reduce == FIXED_MERGE.reduce:
        return merged_logprob(own_NV, targets_N, shard.vocab_size, chain=chain, shard=shard, impl=engine.config.impl)
    prepared_NV = chain.apply(logits_NV[:, : shard.vocab_size].float())
    own_NV = prepared_NV[:, shard.start : shard.start + shard.width]
    way = Way(reduce=reduce, gather="masked_sum_allreduce")
    return logprob_ways.selected(own_NV, targets_N, start=shard.start, way=way, tp=shard.tp)


def _linear(engine: MegatronEngine, hidden_NH: torch.Tensor, head_VH: torch.Tensor, targets_N: torch.Tensor) -> dict[str, torch.Tensor]:
    shard, chain = engine.shard, engine.ops.shape.chain
    if not chain.elementwise:
        return {}
    return {
        f"linear/{t.block_size}x{t.chunk_size}": logprob_ways.linear_selected(
            hidden_NH, head_VH[: shard.real_width], targets_N, start=shard.start, chain=chain, tiling=t, tp=shard.tp
        )
        for t in _TILINGS
    }


def _impls(engine: MegatronEngine, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every loss that can run here, on the same logits, padding masked."""
    out = {}
    for name, fusion in _IMPLS.items():
        if fusion == "te" and not megatron_model.has_te_loss(engine.gpt):
            continue
        settings = LossSettings(padding="mask", chain=engine.ops.shape.chain, fusion=fusion)
        with torch.no_grad(), megatron_model.fused_loss(engine.gpt.config, fusion):
            loss = native_loss(
                engine.gpt.compute_language_model_loss,
                targets_N[None],
                _own(engine, logits_NV)[:, None],
                settings=settings,
                shard=engine.shard,
                impl=engine.config.impl,
            )
        out[f"impl/{name}"] = -loss[0]
    return out
