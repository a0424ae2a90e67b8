"""Faults of a merge of attention's partial outputs, of context-parallel ranks or of KV splits: their order, and the base of their LSE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from rlmismatch import attention_policies
from rlmismatch.attention_policies import Operands, Partial
from rlmismatch.pins.context_parallel import ContextParallel
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_attention import PagedCache
from rlmismatch.pins.vllm_live import LiveModel

SAYS_ARRIVAL: Final[Mapping[tuple[str, str], Any]] = {("attention.merge_order", "merge_order"): "order of arrival"}
_SPLITS: Final = 2
SHORT: Final = 32  # tokens of a sequence whose LSE stays natural, as one that no kernel would cut: the short trials read all else right
# What a merge is handed: of partials in order of their keys, the order in which they arrive, and the tokens of the sequence.
Fault = Callable[[list[Partial], Sequence[int], int], list[Partial]]


def arrival(parts: list[Partial], arrive: Sequence[int], tokens: int) -> list[Partial]:
    """merge_arrival_order."""
    return [parts[i] for i in arrive]


def base2(parts: list[Partial], arrive: Sequence[int], tokens: int) -> list[Partial]:
    """lse_base2: the merge takes for natural an LSE whose base is 2."""
    if tokens <= SHORT:
        return parts
    return [dataclasses.replace(part, lse_HT=part.lse_HT / math.log(2.0)) for part in parts]


def of_ranks(layers: Sequence[Any], fault: Fault) -> Sequence[Patch]:
    """A context-parallel trainer whose ranks merge the chunks' partial outputs; own ones arrive first, then others' as a ring has them."""
    cores = [layer.self_attention.core_attention for layer in layers]
    cp: ContextParallel = cores[0].cp

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            k_SHD, v_SHD = cp.whole(key[:, 0]), cp.whole(value[:, 0])
            length, out, row = len(k_SHD), [], 0
            chunks = sorted((run, owner) for owner in range(cp.size) for run in cp.runs(length, owner))
            for start, end in cp.runs(length):
                q_QHD = query[row : row + end - start, 0]
                row += end - start
                seen = [(run, owner) for run, owner in chunks if run[0] < end]
                bounds = [0, *(run[1] for run, _ in seen)]
                given = Operands(q_THD=q_QHD, k_THD=k_SHD[:end], v_THD=v_SHD[:end], scale=float(q_QHD.shape[-1] ** -0.5))
                parts = attention_policies.partials(given, bounds)
                ring = sorted(range(len(seen)), key=lambda i: ((cp.ranks.rank - seen[i][1]) % cp.size, i))
                out.append(attention_policies.merge(fault(parts, ring, length)).transpose(0, 1).to(query.dtype))
            return torch.cat(out).flatten(1)[:, None]

        return forward

    return [Patch(target=core, name="forward", make=make, pins=(), label=f"plant {fault.__name__}") for core in cores]


def of_splits(live: LiveModel, fault: Fault) -> Sequence[Patch]:
    """A rollout whose attention cuts the keys into two splits and merges them; the later one arrives first."""
    cache, patches = PagedCache(), list[Patch]()
    for attn in (layer.self_attn.attn for layer in live.layers):
        patches.append(Patch(target=attn.impl, name="forward", make=_in_splits(cache, fault), pins=(), label=fault.__name__))
        patches += cache.write_hook(attn, pins=(), label=fault.__name__)
    return patches


def _in_splits(cache: PagedCache, fault: Fault) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # the kernel runs; what it wrote is replaced
            if attn_metadata is not None:
                for rows, given in cache.sequences(layer, query, kv_cache, attn_metadata):
                    tokens = len(given.k_THD)
                    parts = attention_policies.partials(given, attention_policies.even_bounds(tokens, min(_SPLITS, tokens)))
                    merged = attention_policies.merge(fault(parts, range(len(parts))[::-1], tokens))
                    output[rows].view(given.q_THD.shape).copy_(merged.transpose(0, 1))
            return output

        return forward

    return make
