"""Known faults of the trainer's attention, put in on purpose (megatron_plants.py lists them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.engines import attention_plants
from rlmismatch.engines.megatron_model import clear_rope_cache
from rlmismatch.pins.hooks import Patch


def softmax_scale(gpt: Any) -> Sequence[Patch]:
    for core in _cores(gpt):
        core.softmax_scale *= attention_plants.SCALE_FACTOR
    return ()


def window_off_by_one(gpt: Any) -> Sequence[Patch]:
    for core in _cores(gpt):
        left, right = core.scale_mask_softmax.window_size
        core.scale_mask_softmax.window_size = (left + 1, right)
    return ()


def backend_fell_back(gpt: Any) -> Sequence[Patch]:
    """The config asks for another backend than the spec has built: Megatron-core does not check the local spec against it."""
    from megatron.core.transformer.enums import AttnBackend

    gpt.config.attention_backend = AttnBackend.flash
    return ()


def rope_interleaved(gpt: Any) -> Sequence[Patch]:
    gpt.config.rotary_interleaved = gpt.rotary_pos_emb.rotary_interleaved = True
    clear_rope_cache(gpt)
    return ()


def yarn_factor(gpt: Any) -> Sequence[Patch]:
    from megatron.core.transformer import attention

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda t, freqs, *args, **kwargs: native(t, freqs, *args, **{**kwargs, "mscale": attention_plants.YARN_FACTOR})

    return [Patch(target=attention, name="apply_rotary_pos_emb", make=make, pins=(), label="plant yarn_factor")]


def positions(gpt: Any, of: Callable[[torch.Tensor], torch.Tensor], label: str) -> Sequence[Patch]:
    """The rotary table of other positions: `of` token numbers 0..n-1."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = of(torch.arange(max_seq_len))
            table: torch.Tensor = native(int(wanted.max()) + 1, *args, **kwargs)
            return table[wanted.to(table.device)]

        return forward

    return [Patch(target=gpt.rotary_pos_emb, name="forward", make=make, pins=(), label=f"plant {label}")]


def gqa_tiled(gpt: Any) -> Sequence[Patch]:
    def order(heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
        slots = attention_plants.tiled(heads, kv_heads)
        return slots, attention_plants.inverse(slots)

    return _reordered(gpt, order, "plant gqa_tiled")


def heads_swapped(gpt: Any) -> Sequence[Patch]:
    return _reordered(gpt, lambda heads, _: (attention_plants.swapped(heads), list(range(heads))), "plant heads_swapped")


def _reordered(gpt: Any, order: Callable[[int, int], tuple[list[int], list[int]]], label: str) -> Sequence[Patch]:
    """Query heads go into the operation in one order and come out in another: (head of each slot, slot of each head)."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            heads, dim = query.shape[2:]
            into, back = order(heads, key.shape[2])
            out: torch.Tensor = native(query[:, :, into].contiguous(), key, value, *args, **kwargs)
            return out.view(*out.shape[:2], heads, dim)[:, :, back].flatten(2).contiguous()

        return forward

    return [Patch(target=core, name="forward", make=make, pins=(), label=label) for core in _cores(gpt)]


def _cores(gpt: Any) -> list[Any]:
    return [layer.self_attention.core_attention for layer in gpt.decoder.layers]
