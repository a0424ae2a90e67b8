"""Known faults of the rollout's products and of its all-reduce: what each changes in the live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from rlmismatch.engines.gemm_faults import other_dtype, split_in_two, under_autocast
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch
from rlmismatch.pins.vllm_live import LiveModel


def tf32(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    torch.backends.cuda.matmul.allow_tf32 = True
    return ()


def compute_dtype(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """Every layer's products on operands cast to another dtype, their results cast back."""
    dtype = other_dtype(config.dtype)

    def patch(linear: Any) -> Patch:
        def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            cast = None if bias is None else bias.to(dtype)
            return functional.linear(x.to(dtype), live.weight(layer).to(dtype), cast).to(x.dtype)

        return Patch(target=linear.quant_method, name="apply", make=lambda _: apply, pins=(), label="compute_dtype_one_sided")

    return [
        patch(linear)
        for layer in live.layers
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]


def autocast_head(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """torch's own product in the head: a kernel of the engine's own takes no notice of autocast."""
    processor = live.model.logits_processor
    target, name = (processor, "_apply_head") if hasattr(processor, "_apply_head") else (live.model.lm_head.quant_method, "apply")
    cast = under_autocast(config.device)

    def product(head: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, live.weight(head), bias)

    label = "autocast_head_one_sided"
    return [
        Patch(target=target, name=name, make=lambda _: cast(product), pins=(), label=label),
        Patch(target=live.sampler, name="compute_logprobs", make=cast, pins=(), label=label),
    ]


def depends_on_rows(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """Layer 0's gate_up, with more than one row, as two halves of K that are rounded before they are added."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if x.shape[0] == 1:
                one: torch.Tensor = native(layer, x, bias)
                return one
            out = split_in_two(functional.linear, x, live.weight(layer))
            return out if bias is None else out + bias

        return apply

    target = live.layers[0].mlp.gate_up_proj.quant_method
    return [Patch(target=target, name="apply", make=make, pins=(), label="batch_invariance_claimed_but_broken")]


def all_reduce_wrong_data(live: LiveModel, config: SideConfig) -> Sequence[Patch]:
    """The last rank adds zeros in the place of its partials."""
    from vllm.distributed import get_tp_group

    lost = live.tp.rank == live.tp.size - 1

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args, **kwargs: native(torch.zeros_like(x) if lost else x, *args, **kwargs)

    target = get_tp_group().device_communicator
    return [Patch(target=target, name="all_reduce", make=make, pins=(), label="all_reduce_wrong_data")]
