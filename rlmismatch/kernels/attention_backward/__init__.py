"""The gradient of attention (kernels/attention) with respect to q, k, v and sinks, and the differentiable form of `causal`.

With S the scores (after scale and soft cap), P = exp(S - lse) and delta = sum_d dout * out of a row:

    dv = P^T dout     dS = P * (dout v^T - delta)     dq = scale * dS k     dk = scale * dS^T q     dsink = -sum_t exp(sink - lse) * delta

(with a soft cap dS is multiplied by 1 - (S / cap)^2 first). P is computed anew from the saved lse, so any kernel's (out, lse) will do.

dk and dv of a key are folded over the query tiles that see it, the last tile first, a tile's rows being the query heads of one KV head,
token by token. dq of a row is the sum of its key tiles' parts, in ascending order, each part summed by itself. The two directions are what
lets one pass over the scores yield all three: programs of a head that hand dq on in ascending order of their keys never wait for each other
if all begin at the last query. Tiles lie at absolute positions and their size depends on nothing but head dim and dtype (and the group,
where it is above 64), so a sequence's gradient does not depend on what else is in the batch, nor on the kernel that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rlmismatch.kernels.attention import AttentionOut, Impl, causal
from rlmismatch.kernels.attention.checks import require_bounds, require_heads, require_sinks
from rlmismatch.kernels.attention.order import Scores
from rlmismatch.kernels.common.dispatch import implementation

__all__ = ["AttentionGrads", "AttentionOut", "Impl", "causal_autograd", "causal_backward"]


class AttentionGrads(NamedTuple):
    """dq_THD [T, Hq, D], dk_THD and dv_THD [T, Hkv, D] in q's dtype; dsinks_H float32 [Hq], None without sinks."""

    dq_THD: torch.Tensor
    dk_THD: torch.Tensor
    dv_THD: torch.Tensor
    dsinks_H: torch.Tensor | None


def causal_backward(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    dout_THD: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> AttentionGrads:
    """Gradients of ``sum(out * dout)`` for `attention.causal` with the same arguments.

    out_THD, lse_HT: what a forward returned, this one or another kernel's: [T, Hq, D] in q's dtype, float32 [Hq, T], natural log with
    the sink in it. dout_THD: [T, Hq, D] in q's dtype. Raises ValueError for what does not fit.
    """
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    require_heads(q_THD, k_THD, v_THD)
    require_sinks(q_THD, sinks_H)
    require_bounds("cu_seqlens", cu_seqlens)
    tokens, heads, _ = q_THD.shape
    if cu_seqlens[-1] != tokens or k_THD.shape[0] != tokens:
        raise ValueError(f"cu_seqlens ends at {cu_seqlens[-1]}, but there are {tokens} query and {k_THD.shape[0]} key tokens")
    if out_THD.shape != q_THD.shape or dout_THD.shape != q_THD.shape or lse_HT.shape != (heads, tokens):
        raise ValueError(
            f"out {tuple(out_THD.shape)}, dout {tuple(dout_THD.shape)}, lse {tuple(lse_HT.shape)} and q {tuple(q_THD.shape)} do not fit"
        )
    if not out_THD.dtype == dout_THD.dtype == q_THD.dtype or lse_HT.dtype != torch.float32:
        raise ValueError(f"q is {q_THD.dtype}, out is {out_THD.dtype}, dout is {dout_THD.dtype}, lse is {lse_HT.dtype}")
    module = implementation("attention_backward", impl, q_THD, k_THD, v_THD, out_THD, lse_HT, dout_THD, sinks_H)
    return AttentionGrads(
        *module.causal_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, dout_THD, tuple(cu_seqlens), scores=scores, sinks_H=sinks_H)
    )


def causal_autograd(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    impl: Impl,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> AttentionOut:
    """`attention.causal` whose out can be differentiated, once, with respect to q, k, v and sinks; the lse cannot."""
    return AttentionOut(*_Causal.apply(q_THD, k_THD, v_THD, sinks_H, tuple(cu_seqlens), scale, window, soft_cap, impl))  # type: ignore[no-untyped-call]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        cu_seqlens: tuple[int, ...],
        scale: float,
        window: int | None,
        soft_cap: float | None,
        impl: Impl,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.form = {"scale": scale, "window": window, "soft_cap": soft_cap, "impl": impl}
        ctx.cu_seqlens = cu_seqlens
        out_THD, lse_HT = causal(q_THD, k_THD, v_THD, cu_seqlens, sinks_H=sinks_H, **ctx.form)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, sinks_H)
        ctx.mark_non_differentiable(lse_HT)
        return out_THD, lse_HT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_THD: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_HT, sinks_H = ctx.saved_tensors
        grads = causal_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, dout_THD, ctx.cu_seqlens, sinks_H=sinks_H, **ctx.form)
        dsinks_H = None if grads.dsinks_H is None else grads.dsinks_H.to(sinks_H.dtype)
        return grads.dq_THD, grads.dk_THD, grads.dv_THD, dsinks_H, None, None, None, None, None
