"""Specification of `attention`: float64 softmax over all visible keys at once, one rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlmismatch import float64
from rlmismatch.kernels.attention.order import Scores, Segment
from rlmismatch.kernels.common.rounding import round_once

_QUERY_ROWS = 512  # bounds the memory of the scores; a row's result does not depend on it


def causal(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    bounds: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in `out_dtype` or q's, lse float32 [Hq, T]); with float64 both are unrounded."""
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    out_THD, lse_HT = _empty(q_THD)
    for start, end in itertools.pairwise(bounds):
        rows = slice(start, end)
        out_THD[rows], lse_HT[:, rows] = _segment(q_THD[rows], k_THD[rows], v_THD[rows], 0, 0, scores)
    _join_sinks(out_THD, lse_HT, sinks_H)
    return _rounded(out_THD, lse_HT, out_dtype or q_THD.dtype)


def paged(
    q_THD: torch.Tensor,
    k_cache_NBHD: torch.Tensor,
    v_cache_NBHD: torch.Tensor,
    block_table_SN: torch.Tensor,
    bounds: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal`, with K and V read through the block table in logical order."""
    scores = Scores(scale=scale, window=window, soft_cap=soft_cap)
    out_THD, lse_HT = _empty(q_THD)
    block_size = k_cache_NBHD.shape[1]
    for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True)):
        position = torch.arange(length, device=q_THD.device)
        page, slot = block_table_SN[s, position // block_size].long(), position % block_size
        rows = slice(start, end)
        k, v = k_cache_NBHD[page, slot], v_cache_NBHD[page, slot]
        out_THD[rows], lse_HT[:, rows] = _segment(q_THD[rows], k, v, length - (end - start), 0, scores)
    _join_sinks(out_THD, lse_HT, sinks_H)
    return _rounded(out_THD, lse_HT, out_dtype or q_THD.dtype)


def partials(
    q_THD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    segment: Segment,
    *,
    scores: Scores,
    split: int,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [J, T, Hq, D], lse [J, Hq, T]) of every split of `split` tokens that holds a key, ascending."""
    first, last = segment.kv_start // split, -(-segment.kv_end // split)
    outs, lses = [], []
    for j in range(first, last):
        start, end = max(j * split, segment.kv_start), min((j + 1) * split, segment.kv_end)
        keys = slice(segment.kv_row + start, segment.kv_row + end)
        out_THD, lse_HT = _segment(q_THD, k_NHD[keys], v_NHD[keys], segment.first_position, start, scores)
        outs.append(out_THD)
        lses.append(lse_HT)
    return round_once(torch.stack(outs), out_dtype), round_once(torch.stack(lses), out_dtype)


def merge(
    out_JTHD: torch.Tensor, lse_JHT: torch.Tensor, sinks_H: torch.Tensor | None, *, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the partial outputs, weighted by exp(lse), and the log-sum-exp of their lse."""
    lse_JHT = lse_JHT.double()
    lse_HT = torch.logsumexp(lse_JHT, dim=0)
    weight_JTH = _exp_of_difference(lse_JHT, lse_HT).transpose(1, 2)
    out_THD = torch.where(weight_JTH[..., None] == 0, 0, weight_JTH[..., None] * out_JTHD.double()).sum(dim=0)
    _join_sinks(out_THD, lse_HT, sinks_H)
    return _rounded(out_THD, lse_HT, out_dtype)


def _segment(
    q_QHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, first_position: int, kv_start: int, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unrounded (out [Q, Hq, D], lse [Hq, Q]) of rows at `first_position` on over N keys at `kv_start` on."""
    queries, q_heads, _ = q_QHD.shape
    _, kv_heads, head_dim = k_NHD.shape
    group = q_heads // kv_heads
    out_QHD, lse_HQ = _empty(q_QHD)
    k_HDN, v_HND = k_NHD.double().permute(1, 2, 0), v_NHD.double().transpose(0, 1)
    for start in range(0, queries, _QUERY_ROWS):
        end = min(start + _QUERY_ROWS, queries)
        # Keys that no row of this block sees never enter, so that what they hold cannot matter.
        last = min(max(first_position + end - kv_start, 0), len(k_NHD))
        first = 0 if scores.window is None else min(max(first_position + start - scores.window + 1 - kv_start, 0), last)
        # [Hkv, group * rows, D]: the query heads of one KV head share its K and V.
        q = q_QHD[start:end].double().view(end - start, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        score = (float64.matmul(q, k_HDN[:, :, first:last]) * scores.scale).view(q_heads, end - start, last - first)
        if scores.soft_cap is not None:
            score = scores.soft_cap * torch.tanh(score / scores.soft_cap)
        position = torch.arange(first_position + start, first_position + end, device=q_QHD.device)[:, None]
        key = torch.arange(kv_start + first, kv_start + last, device=q_QHD.device)
        score.masked_fill_(~visible(position, key, scores.window), -torch.inf)
        lse = torch.logsumexp(score, dim=-1)
        weight = _exp_of_difference(score, lse[..., None]).view(kv_heads, group * (end - start), last - first)
        out = float64.matmul(weight, v_HND[:, first:last]).view(q_heads, end - start, head_dim)
        out_QHD[start:end], lse_HQ[:, start:end] = out.transpose(0, 1), lse
    return out_QHD, lse_HQ


def visible(position: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether a query at `position` sees the key at `key` (broadcast)."""
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _exp_of_difference(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """exp(x - largest), 0 where both are -inf: a row that sees nothing."""
    return torch.exp(torch.where(largest == -torch.inf, x, x - largest))


def _join_sinks(out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor | None) -> None:
    """A sink is one more score in the denominator, with a value of zero."""
    if sinks_H is not None:
        joined_HT = torch.logaddexp(lse_HT, sinks_H.double()[:, None])
        out_THD *= _exp_of_difference(lse_HT, joined_HT).transpose(0, 1)[..., None]
        lse_HT.copy_(joined_HT)


def _empty(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64, device=q_THD.device)
    return out_THD, torch.empty((q_THD.shape[1], q_THD.shape[0]), dtype=torch.float64, device=q_THD.device)


def _rounded(out_THD: torch.Tensor, lse_HT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return round_once(out_THD, dtype), round_once(lse_HT, torch.float64 if dtype == torch.float64 else torch.float32)
