"""Known faults of the trainer's products: what each changes in the live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.engines.gemm_faults import split_in_two, under_autocast
from rlmismatch.pins.hooks import Patch


def tf32() -> Sequence[Patch]:
    torch.backends.cuda.matmul.allow_tf32 = True
    return ()


def compute_dtype(gpt: Any, dtype: torch.dtype) -> Sequence[Patch]:
    """Every layer's products on operands cast to `dtype`, their results cast back."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward_impl(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
            cast = None if bias is None else bias.to(dtype)
            out: torch.Tensor = native(input=input.to(dtype), weight=weight.to(dtype), bias=cast, **rest)
            return out.to(input.dtype)

        return forward_impl

    linears = [m for layer in gpt.decoder.layers for m in _linears(layer)]
    return [Patch(target=m, name="_forward_impl", make=make, pins=(), label="plant compute_dtype_one_sided") for m in linears]


def autocast_head(gpt: Any, device: str) -> Sequence[Patch]:
    places = ((gpt.output_layer, "_forward_impl"), (gpt, "compute_language_model_loss"))
    label = "plant autocast_head_one_sided"
    return [Patch(target=target, name=name, make=under_autocast(device), pins=(), label=label) for target, name in places]


def depends_on_rows(gpt: Any) -> Sequence[Patch]:
    """Layer 0's gate_up, with more than one row, as two halves of K that are rounded before they are added."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward_impl(input: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
            def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = native(input=x.contiguous(), weight=w.contiguous(), **rest)
                return out

            return split_in_two(product, input, weight)

        return forward_impl

    target = gpt.decoder.layers[0].mlp.linear_fc1
    return [Patch(target=target, name="_forward_impl", make=make, pins=(), label="plant batch_invariance_claimed_but_broken")]


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1, layer.mlp.linear_fc2
