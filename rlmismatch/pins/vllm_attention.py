"""The pin `attention` inside vLLM: our kernel over the engine's own paged KV cache, in prefill, chunked prefill and decode alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from rlmismatch.attention_policies import Operands, Policy
from rlmismatch.errors import EnvironmentUnfitError
from rlmismatch.kernels import attention
from rlmismatch.kernels.attention import reference as attention_fp64
from rlmismatch.pins import attention_policy
from rlmismatch.pins.hooks import OpSwitch, Patch

# Instruction sets of vLLM's CPU attention whose KV cache holds K transposed and V plain (seen). Others pack K in ways of their own.
_PLAIN_ISAS: Final = ("vec",)


class PagedCache:
    """K and V of an attention layer as plain rows, whatever layout the engine keeps them in.

    Where the engine's layout is known, its own memory is read. Where it packs K for an instruction set, the rows are kept a second
    time from the moment `write_hook` is in force; whoever installs it starts with an empty prefix cache.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write_hook(self, layer: Any, *, pins: tuple[str, ...], label: str) -> tuple[Patch, ...]:
        """The hook on the engine's cache writes, where the layer needs one."""
        if not _is_packed(layer):
            return ()
        return (Patch(target=layer.impl, name="do_kv_cache_update", make=self._write, pins=pins, label=f"{label}.kv_cache_update"),)

    def views(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V), each a strided view [blocks, block, Hkv, D]. Raises EnvironmentUnfitError for a layout that is not known."""
        if _is_packed(layer):
            k, v = (rows.view(kv_cache.shape[0], kv_cache.shape[2], *rows.shape[1:]) for rows in self._rows[id(layer)])
            return k, v
        if hasattr(layer, "isa"):
            blocks, heads, block_size, _ = kv_cache.shape
            halves = kv_cache.view(blocks, heads, 2, block_size * layer.head_size)
            k = halves[:, :, 0].view(blocks, heads, layer.head_size, block_size).permute(0, 3, 1, 2)
            return k, halves[:, :, 1].view(blocks, heads, block_size, layer.head_size).transpose(1, 2)
        if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
            raise EnvironmentUnfitError(
                "kv-cache-layout-unknown",
                f"{type(layer.impl).__name__} keeps a KV cache of {list(kv_cache.shape)}; the pin reads [blocks, 2, block, heads, dim]",
                where="rollout",
                hint="leave the pin attention out, or use the FLASH_ATTN backend",
            )
        k, v = kv_cache.unbind(1)
        return k, v

    def sequences(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> Iterator[tuple[slice, Operands]]:
        """Each sequence of a step: its rows of `query`, and its operands, whose K and V are all its tokens' in logical order."""
        k_NBHD, v_NBHD = self.views(layer, kv_cache)
        bounds, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for s, (start, end) in enumerate(itertools.pairwise(bounds)):
            position = torch.arange(lengths[s], device=query.device)
            page, slot = metadata.block_table[s, position // k_NBHD.shape[1]].long(), position % k_NBHD.shape[1]
            q_QHD = query[start:end].view(end - start, layer.num_heads, layer.head_size)
            scale = float(layer.head_size**-0.5)
            yield slice(start, end), Operands(q_THD=q_QHD, k_THD=k_NBHD[page, slot], v_THD=v_NBHD[page, slot], scale=scale)

    def _write(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def update(layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
            blocks, heads, block_size, _ = kv_cache.shape
            if id(layer) not in self._rows:
                shape = (blocks * block_size, heads, layer.head_size)
                self._rows[id(layer)] = (torch.empty(shape, dtype=kv_cache.dtype), torch.empty(shape, dtype=kv_cache.dtype))
            real = slot_mapping >= 0  # padding has no slot
            for rows, new in zip(self._rows[id(layer)], (key, value), strict=True):
                rows[slot_mapping[real]] = new[: slot_mapping.shape[0]][real].view(-1, heads, layer.head_size)
            return native(layer, key, value, kv_cache, slot_mapping)

        return update


def attention_patches(
    layer: Any,
    boundary: str,
    *,
    window: int | None,
    sink: float | None = None,
    impl: attention.Impl,
    switch: OpSwitch,
    cache: PagedCache,
    policy: Policy | None = None,
) -> tuple[Patch, ...]:
    """The hooks of one attention layer. vLLM hands the output buffer in, and K and V through the cache.

    window: the checkpoint's. sink: logit of one a head. policy: arithmetic that a knob asks of the pin; None: the kernel's own.
    """

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            if attn_metadata is None:  # a dummy step, which has no cache
                native(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                return output
            tokens = attn_metadata.num_actual_tokens
            q_THD = query[:tokens].view(tokens, layer.num_heads, layer.head_size)
            sinks_H = None if sink is None else q_THD.new_full((layer.num_heads,), sink, dtype=torch.float32)
            scores: dict[str, Any] = {"scale": float(layer.head_size**-0.5), "window": window, "sinks_H": sinks_H}

            def native_op() -> torch.Tensor:
                scratch = torch.empty_like(output)
                native(layer, query, key, value, kv_cache, attn_metadata, scratch, *args, **kwargs)
                return scratch[:tokens].view_as(q_THD)

            def operands() -> tuple[Any, ...]:
                bounds = attn_metadata.query_start_loc.tolist()
                lengths = attn_metadata.seq_lens[: len(bounds) - 1].tolist()
                return (q_THD, *cache.views(layer, kv_cache), attn_metadata.block_table[: len(lengths)], bounds, lengths)

            def pinned() -> torch.Tensor:
                if policy is not None:
                    return attention_policy.paged(*operands(), scale=scores["scale"], policy=policy)[0]
                return attention.paged(*operands(), **scores, impl=impl).out_THD

            out_THD = switch.run(
                "attention",
                native=native_op,
                pinned=pinned,
                exact=lambda: attention_fp64.paged(*operands(), **scores, out_dtype=torch.float64)[0],
                parts=lambda out: {boundary: out},
                split="columns",
            )
            output[:tokens].view_as(q_THD).copy_(out_THD)
            return output

        return forward

    patch = Patch(target=layer.impl, name="forward", make=make, pins=("attention",), label=boundary)
    return (patch, *cache.write_hook(layer, pins=("attention",), label=boundary))


def _is_packed(layer: Any) -> bool:
    return hasattr(layer, "isa") and layer.isa not in _PLAIN_ISAS
