"""Specification of `attention_backward`: float64, one rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlmismatch import float64
from rlmismatch.kernels.attention.order import Scores
from rlmismatch.kernels.common.rounding import round_once

_QUERY_ROWS = 512  # bounds the memory of the scores


def causal_backward(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    dout_THD: torch.Tensor,
    bounds: Sequence[int],
    *,
    scores: Scores,
    sinks_H: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv in `out_dtype` or q's, dsinks float32 [Hq] or None); with float64 all are unrounded."""
    dtype = out_dtype or q_THD.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q_THD, k_THD, v_THD))
    delta_TH = (dout_THD.double() * out_THD.double()).sum(-1)
    for start, end in itertools.pairwise(bounds):
        for first in range(start, end, _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, end)
            rows, keys = slice(first, last), slice(start, last)  # later keys are behind the mask of every row of this block
            dq_block, dk_block, dv_block = _block(
                q_THD[rows], k_THD[keys], v_THD[keys], lse_HT[:, rows], dout_THD[rows], delta_TH[rows], scores
            )
            dq[rows] = dq_block
            dk[keys] += dk_block
            dv[keys] += dv_block
    dsinks_H = None
    if sinks_H is not None:
        share_HT = torch.exp(sinks_H.double()[:, None] - lse_HT.double())
        dsinks_H = round_once(-(share_HT * delta_TH.T).sum(-1), torch.float64 if dtype == torch.float64 else torch.float32)
    return round_once(dq, dtype), round_once(dk, dtype), round_once(dv, dtype), dsinks_H


def _block(
    q_QHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    lse_HQ: torch.Tensor,
    dout_QHD: torch.Tensor,
    delta_QH: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 (dq [Q, Hq, D], dk [N, Hkv, D], dv [N, Hkv, D]) of the last Q of N tokens."""
    queries, q_heads, head_dim = q_QHD.shape
    tokens, kv_heads, _ = k_NHD.shape
    group = q_heads // kv_heads

    def by_kv_head(x_QHD: torch.Tensor) -> torch.Tensor:
        """[Hkv, Q * group, D]"""
        return x_QHD.double().reshape(queries, kv_heads, group, -1).transpose(0, 1).reshape(kv_heads, queries * group, -1)

    q, dout, delta, lse = (by_kv_head(x) for x in (q_QHD, dout_QHD, delta_QH[..., None], lse_HQ.T[..., None]))
    k, v = (x.double().transpose(0, 1) for x in (k_NHD, v_NHD))
    score = float64.matmul(q, k.transpose(1, 2)) * scores.scale
    if scores.soft_cap is not None:
        score = scores.soft_cap * torch.tanh(score / scores.soft_cap)
    position = torch.arange(tokens - queries, tokens, device=q.device).repeat_interleave(group)[:, None]
    key = torch.arange(tokens, device=q.device)
    seen = key <= position
    if scores.window is not None:
        seen &= key > position - scores.window
    weight = torch.where(seen, torch.exp(score - lse), 0)
    dscore = weight * (float64.matmul(dout, v.transpose(1, 2)) - delta)
    if scores.soft_cap is not None:
        dscore *= 1 - (score / scores.soft_cap).square()
    dscore *= scores.scale
    dq = float64.matmul(dscore, k).view(kv_heads, queries, group, head_dim).transpose(0, 1).reshape(queries, q_heads, head_dim)
    return dq, float64.matmul(dscore.transpose(1, 2), q).transpose(0, 1), float64.matmul(weight.transpose(1, 2), dout).transpose(0, 1)
