"""The gradients of the pinned operations: each rounded once, each the same at every tensor-parallel size.

A rounding inside a pinned forward (behind the norm, in front of its weight) is passed through: its derivative is taken as 1. What has no
kernel of its own is float64 inside. T tokens, V rows of a vocabulary, H hidden, I ffn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlmismatch.kernels import reduce
from rlmismatch.kernels.common.dispatch import Impl
from rlmismatch.kernels.common.rounding import round_once


class Replaced(torch.autograd.Function):
    """An operation whose forward and backward are both given: ``Replaced.apply(forward, backward, *inputs)``.

    forward(*inputs) -> output. backward(grad of the output, *inputs) -> one gradient or None an input. Both run without autograd.
    """

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., torch.Tensor], backward: Callable[..., Any], *inputs: torch.Tensor | None) -> torch.Tensor:
        ctx.given = backward
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *ctx.given(*grads, *ctx.saved_tensors)


def replaced(forward: Callable[..., torch.Tensor], backward: Callable[..., Any], *inputs: torch.Tensor | None) -> torch.Tensor:
    """`Replaced.apply` with its types."""
    out: torch.Tensor = Replaced.apply(forward, backward, *inputs)  # type: ignore[no-untyped-call]
    return out


def rms_norm_input(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """dX of ``x / sqrt(mean(x^2) + eps) * weight``: [..., N] in x's dtype. With u the normalised x and g = dy * weight it is
    ``(g - u * mean(g * u)) / sqrt(mean(x^2) + eps)``."""
    unit, inverse = _unit(x, eps)
    g = dy.double() * weight.double()
    return round_once((g - unit * (g * unit).mean(dim=-1, keepdim=True)) * inverse, x.dtype)


def rms_norm_weight(dy: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    """float64 [N]: ``sum(dy * u)`` over all leading dims."""
    unit, _ = _unit(x, eps)
    return (dy.double() * unit).flatten(0, -2).sum(dim=0)


def _unit(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.double()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * inverse, inverse


def swiglu_packed(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of ``silu(gate) * up`` by both halves of `gate_up` [..., 2 I], in its dtype."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    dy, sigmoid = dy.double(), torch.sigmoid(gate)
    silu = gate * sigmoid
    return round_once(torch.cat([dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu], dim=-1), gate_up.dtype)


def add_rows(total_VH: torch.Tensor, ids_T: torch.Tensor, rows_TH: torch.Tensor) -> None:
    """Add row t of `rows_TH` to row ``ids_T[t]`` of `total_VH` in place, ids outside it skipped: in ascending t, one addition at a time.

    A scatter with atomics would add in another order every time; here the k-th occurrence of every id is added in the k-th pass.
    """
    inside_T = (ids_T >= 0) & (ids_T < total_VH.shape[0])
    ids_T, rows_TH = ids_T[inside_T], rows_TH[inside_T].to(total_VH.dtype)
    occurrence_T = (ids_T[:, None] == ids_T[None, :]).tril(-1).sum(dim=1)
    for k in range(int(occurrence_T.max()) + 1 if len(ids_T) else 0):
        now = occurrence_T == k
        total_VH[ids_T[now]] += rows_TH[now]


def folded(shares: Sequence[Sequence[torch.Tensor]], *, impl: Impl, out_dtype: torch.dtype) -> torch.Tensor:
    """The sum of several sums over ranks, rounded once: each share's ranks first, rank 0 first, then the shares."""
    wide = torch.float64 if impl == "reference" else torch.float32
    return reduce.fold([reduce.fold(ranks, impl=impl, out_dtype=wide) for ranks in shares], impl=impl, out_dtype=out_dtype)
