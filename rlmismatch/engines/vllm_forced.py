"""A rollout whose attention another backend computes for one arm: one of `attention_forced`, or another kernel of vLLM's own on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from rlmismatch.engines import attention_forced, vllm_kernel_calls
from rlmismatch.engines.attention_candidates import Candidate
from rlmismatch.engines.attention_forced import Calls, Shape
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.vllm_attention import PagedCache
from rlmismatch.pins.vllm_live import LiveModel

# vLLM's portable CPU kernel: it takes every page of 16 tokens, and a live engine can be told to use it instead of its own choice.
_PORTABLE: Final = "vec16"


def facts(live: LiveModel) -> dict[str, str]:
    """`attention_forced.facts` of the live model's shape, and vLLM's other kernel where it runs another."""
    attn = live.layers[0].self_attn.attn
    impl = attn.impl
    shape = Shape(heads=impl.num_heads, kv_heads=impl.num_kv_heads, dim=impl.head_size, dtype=attn.dtype, device=live.inv_freq.device)
    own = getattr(attn, "isa", _PORTABLE)
    return attention_forced.facts(shape) | ({} if own == _PORTABLE else {_PORTABLE: f"vLLM's kernel {_PORTABLE} in place of {own}"})


@contextlib.contextmanager
def in_force(live: LiveModel, runner: Any, name: str) -> Iterator[Calls]:
    """Every layer's attention by `name` while the context is open; counts its calls. The prefix cache must be empty on entry."""
    calls = Calls()
    if name == _PORTABLE:
        with _portable(live, runner), installed(vllm_kernel_calls.hooks(live.layers[0].self_attn.attn.impl, _counted(live, calls))):
            yield calls
        return
    candidate, cache = attention_forced.find(name, live.inv_freq.device), PagedCache()
    patches: list[Patch] = []
    for attn in (layer.self_attn.attn for layer in live.layers):
        patches.append(Patch(target=attn.impl, name="forward", make=_attending(candidate, calls, cache), pins=(), label=f"forced {name}"))
        patches += cache.write_hook(attn, pins=(), label=f"forced {name}")
    with installed(patches):
        yield calls


def _attending(candidate: Candidate, calls: Calls, cache: PagedCache) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            if attn_metadata is None:
                out: torch.Tensor = native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                return out
            for rows, given in cache.sequences(layer, query, kv_cache, attn_metadata):
                output[rows].view(given.q_THD.shape).copy_(attention_forced.attend(candidate, calls, given))
            return output

        return forward

    return make


def _counted(live: LiveModel, calls: Calls) -> vllm_kernel_calls.Called:
    def called(name: str, kwargs: dict[str, Any], native: Callable[..., Any]) -> None:
        calls.count += all(layer.self_attn.attn.isa == _PORTABLE for layer in live.layers)

    return called


@contextlib.contextmanager
def _portable(live: LiveModel, runner: Any) -> Iterator[None]:
    """What vLLM asks for the instruction set of: its layers, when they write the cache, and the builders of its kernel's plan."""
    holders = [layer.self_attn.attn for layer in live.layers]
    holders += [builder for groups in runner.attn_groups for group in groups for builder in group.metadata_builders]
    native = [holder.isa for holder in holders]
    try:
        for holder in holders:
            holder.isa = _PORTABLE
        yield
    finally:
        for holder, isa in zip(holders, native, strict=True):
            holder.isa = isa
