"""The kernels that vLLM's attention implementations call, hooked where they are called from: what ran, and with what."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch

from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_live import LiveModel

# Entry points as attributes of an implementation's module, or of the module `ops` that it imports.
_KERNELS: Final = ("flash_attn_varlen_func", "unified_attention", "cpu_attention_with_kv_cache")


_EXPORTS_LSE: Final = "flash_attn_varlen_func"
Called = Callable[[str, dict[str, Any], Callable[..., Any]], None]


def hooks(impl: Any, called: Called) -> list[Patch]:
    """Hooks that tell `called` name, keyword arguments and function of every kernel call of `impl`'s module; they change nothing."""
    module = importlib.import_module(type(impl).__module__)
    places = [module, *(x for x in (getattr(module, "ops", None),) if x is not None)]

    def hook(place: Any, name: str) -> Patch:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                called(name, kwargs, native)
                return native(*args, **kwargs)

            return kernel

        return Patch(target=place, name=name, make=make, pins=(), label=f"kernel {name}")

    return [hook(place, name) for place in places for name in _KERNELS if name in vars(place)]


def exported_lse(name: str, kwargs: dict[str, Any], native: Callable[..., Any]) -> torch.Tensor | None:
    """The LSE of one kernel call, [head, token] as FlashAttention has it; the call is made again. None where the kernel exports none."""
    if name != _EXPORTS_LSE:
        return None
    _, lse = native(**{**kwargs, "out": torch.empty_like(kwargs["out"]), "return_softmax_lse": True})
    return lse  # type: ignore[no-any-return]


def fixed_splits(live: LiveModel, splits: int) -> list[Patch]:
    """Hooks under which FlashAttention cuts the keys of every row into `splits`, where it would choose by load."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if metadata is not None:
                metadata = copy.copy(metadata)
                metadata.max_num_splits = splits
                metadata.scheduler_metadata = None  # it was made for another number of splits; without it the kernel plans for itself
            return native(layer, query, key, value, kv_cache, metadata, *args, **kwargs)

        return forward

    impls = [layer.self_attn.attn.impl for layer in live.layers]
    return [Patch(target=impl, name="forward", make=make, pins=(), label="fixed KV splits") for impl in impls]
