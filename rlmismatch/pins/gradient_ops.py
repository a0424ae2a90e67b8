"""The gradients of the pinned operations: each rounded once, each the same at every tensor-parallel size.

A rounding inside a pinned forward (behind the norm, in front of its weight) is passed through: its derivative is taken as 1. What has no
kernel of its own is float64 inside. Shapes, per rank: S sequence, B = 1 batch, T tokens, N and K the sides of a GEMM, H heads, D head
dim, I ffn.
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


def causal_attention(
    dout_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq [T, Hq, D], dk, dv [T, Hkv, D]) of causal attention over one sequence, in the operands' dtype.

    A KV head's gradient adds the query heads that share it in ascending order of its float64 product; query heads are walked one KV head at
    a time, so that memory is that of one head's scores. Softmax backward: ds = p * (dp - sum(dp * p)), as in FlashAttention (Dao, 2022).
    """
    tokens, q_heads, _ = q_THD.shape
    kv_heads = k_THD.shape[1]
    group = q_heads // kv_heads
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q_THD.device).triu(1)
    grads: tuple[list[torch.Tensor], ...] = ([], [], [])
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        q, dout = (x_THD[:, own].double().transpose(0, 1) for x_THD in (q_THD, dout_THD))  # [group, T, D]
        k, v = k_THD[:, head].double(), v_THD[:, head].double()  # [T, D]
        p = (q @ k.T * scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        dp = dout @ v.T
        ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale
        grads[0].append((ds @ k).transpose(0, 1))
        grads[1].append((ds.flatten(0, 1).T @ q.flatten(0, 1))[:, None])
        grads[2].append((p.flatten(0, 1).T @ dout.flatten(0, 1))[:, None])
    dq, dk, dv = (round_once(torch.cat(parts, dim=1), q_THD.dtype) for parts in grads)
    return dq, dk, dv


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
