"""Specification of `attention`: float64 softmax, one rounding."""

from __future__ import annotations

import itertools

import torch

from rlmismatch.kernels.common.rounding import round_once

_QUERY_ROWS = 512  # bounds the memory of the scores; a row's result does not depend on it


def causal(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, bounds: list[int], *, scale: float, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, D] in `out_dtype` or q's, lse float32 [Hq, T]); with float64 both are unrounded."""
    out_THD, lse_HT = _empty(q_THD)
    for start, end in itertools.pairwise(bounds):
        rows = slice(start, end)
        out_THD[rows], lse_HT[:, rows] = _last_rows(q_THD[rows], k_THD[rows], v_THD[rows], scale)
    return _rounded(out_THD, lse_HT, out_dtype or q_THD.dtype)


def paged(
    q_THD: torch.Tensor,
    k_cache_NBHD: torch.Tensor,
    v_cache_NBHD: torch.Tensor,
    block_table_SN: torch.Tensor,
    bounds: list[int],
    lengths: list[int],
    *,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal`, with K and V read through the block table in logical order."""
    out_THD, lse_HT = _empty(q_THD)
    block_size = k_cache_NBHD.shape[1]
    for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True)):
        position = torch.arange(length, device=q_THD.device)
        page, slot = block_table_SN[s, position // block_size].long(), position % block_size
        rows = slice(start, end)
        out_THD[rows], lse_HT[:, rows] = _last_rows(q_THD[rows], k_cache_NBHD[page, slot], v_cache_NBHD[page, slot], scale)
    return _rounded(out_THD, lse_HT, out_dtype or q_THD.dtype)


def _last_rows(q_QHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Unrounded (out [Q, Hq, D], lse [Hq, Q]) of one sequence's last Q of N tokens."""
    queries, q_heads, _ = q_QHD.shape
    tokens, kv_heads, head_dim = k_NHD.shape
    group = q_heads // kv_heads
    out_QHD, lse_HQ = _empty(q_QHD)
    k_HDN, v_HND = k_NHD.double().permute(1, 2, 0), v_NHD.double().transpose(0, 1)
    for start in range(0, queries, _QUERY_ROWS):
        end = min(start + _QUERY_ROWS, queries)
        seen = tokens - queries + end  # later keys are behind the mask of every row of this block
        # [Hkv, group * rows, D]: the query heads of one KV head share its K and V.
        q = q_QHD[start:end].double().view(end - start, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        score = (q @ k_HDN[:, :, :seen] * scale).view(q_heads, end - start, seen)
        position = torch.arange(tokens - queries + start, seen, device=q_QHD.device)
        score.masked_fill_(torch.arange(seen, device=q_QHD.device) > position[:, None], -torch.inf)
        lse = torch.logsumexp(score, dim=-1)
        weight = torch.exp(score - lse[..., None]).view(kv_heads, group * (end - start), seen)
        out = (weight @ v_HND[:, :seen]).view(q_heads, end - start, head_dim)
        out_QHD[start:end], lse_HQ[:, start:end] = out.transpose(0, 1), lse
    return out_QHD, lse_HQ


def _empty(q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64, device=q_THD.device)
    return out_THD, torch.empty((q_THD.shape[1], q_THD.shape[0]), dtype=torch.float64, device=q_THD.device)


def _rounded(out_THD: torch.Tensor, lse_HT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return round_once(out_THD, dtype), round_once(lse_HT, torch.float64 if dtype == torch.float64 else torch.float32)
