"""Known faults of the trainer's backward. All of them leave every log-prob as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.hooks import Patch


def _columns(gpt: Any) -> list[Any]:
    layers = gpt.decoder.layers
    return [m for layer in layers for m in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1)] + [gpt.output_layer]


class _Done:
    """What an asynchronous collective returns, for one that is over."""

    def wait(self) -> None: ...


def _instead_of_the_sum(gpt: Any, tp: TpGroup, label: str, total: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[Patch]:
    """Every column-parallel layer's partial dX [S, B, H] is turned into `total` of it instead of being summed over ranks."""
    from megatron.core.tensor_parallel import layers

    def scattered(out: torch.Tensor, partial: torch.Tensor, **_: Any) -> _Done:
        out.copy_(total(partial).chunk(tp.size)[tp.rank])
        return _Done()

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward_impl(input: torch.Tensor, **rest: Any) -> torch.Tensor:
            if rest["sequence_parallel"] or not input.requires_grad:
                return native(input=input, **rest)  # type: ignore[no-any-return]
            x = input.view_as(input)
            x.register_hook(total)  # type: ignore[no-untyped-call]
            return native(input=x, **{**rest, "allreduce_dgrad": False})  # type: ignore[no-any-return]

        return forward_impl

    plain = [Patch(target=module, name="_forward_impl", make=make, pins=(), label=f"plant {label}") for module in _columns(gpt)]
    return [*plain, Patch(target=layers, name="dist_reduce_scatter_func", make=lambda _: scattered, pins=(), label=f"plant {label}")]


def dgrad_not_reduced(gpt: Any, tp: TpGroup) -> Sequence[Patch]:
    """dX stays what this rank's columns give."""
    return _instead_of_the_sum(gpt, tp, "dgrad_not_reduced", lambda partial: partial)


def dgrad_bf16_accumulate(gpt: Any, tp: TpGroup) -> Sequence[Patch]:
    """dX is added rank by rank in bfloat16."""

    def total(partial: torch.Tensor) -> torch.Tensor:
        first, *rest = tp.gathered(partial.bfloat16())
        for part in rest:
            first = first + part
        return first.to(partial.dtype)

    return _instead_of_the_sum(gpt, tp, "dgrad_bf16_accumulate", total)
