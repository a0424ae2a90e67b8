"""Known faults of the rollout's attention, put in on purpose (vllm_plants.py lists them)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rlmismatch.engines import attention_plants
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_live import LiveModel


def softmax_scale(live: LiveModel) -> Sequence[Patch]:
    for impl in _impls(live):
        impl.scale *= attention_plants.SCALE_FACTOR
    return ()


def window_off_by_one(live: LiveModel) -> Sequence[Patch]:
    for impl in _impls(live):
        one_more = impl.sliding_window
        impl.sliding_window = (one_more[0] + 1, one_more[1]) if isinstance(one_more, tuple) else one_more + 1
    return ()


def rope_interleaved(live: LiveModel) -> Sequence[Patch]:
    _own_rotary(live).is_neox_style = False
    return ()


def yarn_factor(live: LiveModel) -> Sequence[Patch]:
    _own_rotary(live).cos_sin_cache.mul_(attention_plants.YARN_FACTOR)
    return ()


def positions(live: LiveModel, of: Callable[[torch.Tensor], torch.Tensor], label: str) -> Sequence[Patch]:
    """Other positions than the engine passes on: `of` those."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda positions, *args, **kwargs: native(of(positions), *args, **kwargs)

    return [Patch(target=_own_rotary(live), name="forward", make=make, pins=(), label=label)]


def gqa_tiled(live: LiveModel) -> Sequence[Patch]:
    def order(heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
        slots = attention_plants.tiled(heads, kv_heads)
        return slots, attention_plants.inverse(slots)

    return _reordered(live, order, "gqa_tiled")


def heads_swapped(live: LiveModel) -> Sequence[Patch]:
    return _reordered(live, lambda heads, _: (attention_plants.swapped(heads), list(range(heads))), "heads_swapped")


def page_swap(live: LiveModel) -> Sequence[Patch]:
    """Attention reads through a table whose first two pages stand in each other's place; writes go where they should."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if metadata is None or metadata.block_table.shape[1] < 2:
                return native(layer, query, key, value, kv_cache, metadata, *args, **kwargs)
            wrong = copy.copy(metadata)
            long = metadata.seq_lens > kv_cache.shape[2]  # a sequence of one page has no second one to swap
            table = metadata.block_table.clone()
            rows = torch.nonzero(long[: len(table)])[:, 0].to(table.device)
            table[rows, :2] = table[rows, :2].flip(1)
            wrong.block_table = table
            return native(layer, query, key, value, kv_cache, wrong, *args, **kwargs)

        return forward

    return [Patch(target=impl, name="forward", make=make, pins=(), label="page_swap") for impl in _impls(live)]


@contextlib.contextmanager
def older_weights(live: LiveModel) -> Iterator[None]:
    """Other weights than the loaded ones while the context is open, as before an update; the loaded ones are back behind it."""
    weight = live.layers[0].input_layernorm.weight.data
    loaded = weight.clone()
    weight.mul_(1.25)
    try:
        yield
    finally:
        weight.copy_(loaded)


def _reordered(live: LiveModel, order: Callable[[int, int], tuple[list[int], list[int]]], label: str) -> Sequence[Patch]:
    """Query heads go into the operation in one order and come out in another: (head of each slot, slot of each head)."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, output: torch.Tensor,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            into, back = order(layer.num_heads, layer.num_kv_heads)
            q_THD = query.view(len(query), layer.num_heads, layer.head_size)[:, into].contiguous()
            scratch = torch.zeros_like(output)
            native(layer, q_THD.view(query.shape), key, value, kv_cache, metadata, scratch, *args, **kwargs)
            shape = (len(output), layer.num_heads, layer.head_size)
            output.view(shape).copy_(scratch.view(shape)[:, back])
            return output

        return forward

    return [Patch(target=impl, name="forward", make=make, pins=(), label=label) for impl in _impls(live)]


def _own_rotary(live: LiveModel) -> Any:
    """A rotary object of this model's own: vLLM shares one among all layers, and among all models of a process."""
    own = copy.deepcopy(live.layers[0].self_attn.rotary_emb)
    for layer in live.layers:
        layer.self_attn.rotary_emb = own
    return own


def _impls(live: LiveModel) -> list[Any]:
    return [layer.self_attn.attn.impl for layer in live.layers]
