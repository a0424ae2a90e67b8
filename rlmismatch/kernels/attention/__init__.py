"""Causal attention over packed sequences (`causal`) and over a paged KV cache (`paged`): output and log-sum-exp.

One fold serves both: KV tiles of `KV_TILE` tokens at absolute positions (multiples of the width), in ascending order, with an
online softmax in float32. Where a token's K and V lie, how many query rows are computed at once and what else is in the batch
never enters, so a row has the same bits in full prefill, chunked prefill, paged prefill and decode.

A later split of the KV axis (flash-decoding, context parallelism) fits this way: fix a split width, a multiple of `KV_TILE`, again at
absolute positions; fold each split's tiles from a fresh state; merge the (out, lse) of the splits in ascending order. That is
another order of additions, so it replaces this one everywhere at once, or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["KV_TILE", "AttentionOut", "Impl", "causal", "paged"]

KV_TILE: Final = 64  # tokens; the order of additions, not a tuning parameter


class AttentionOut(NamedTuple):
    """out_THD: contiguous [T, Hq, D] in q's dtype. lse_HT: float32 [Hq, T], natural log of the sum of exp(scaled score)."""

    out_THD: torch.Tensor
    lse_HT: torch.Tensor


def causal(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, cu_seqlens: Sequence[int], *, scale: float, impl: Impl
) -> AttentionOut:
    """Causal self-attention of each of the packed sequences ``[cu_seqlens[s], cu_seqlens[s + 1])``.

    q_THD: [T, Hq, D]; k_THD, v_THD: [T, Hkv, D], same dtype, any strides. Query head h reads KV head ``h // (Hq // Hkv)``.
    cu_seqlens: 0 = first <= ... <= last = T. scale multiplies ``q @ k`` in the accumulator. One rounding, at the end.
    """
    _check_heads(q_THD, k_THD, v_THD)
    tokens = q_THD.shape[0]
    bounds = [int(x) for x in cu_seqlens]
    _check_bounds("cu_seqlens", bounds)
    if bounds[-1] != tokens or k_THD.shape[0] != tokens:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are {tokens} query and {k_THD.shape[0]} key tokens")
    module = implementation("attention", impl, q_THD, k_THD, v_THD)
    return AttentionOut(*module.causal(q_THD, k_THD, v_THD, bounds, scale=scale))


def paged(
    q_THD: torch.Tensor,
    k_cache_NBHD: torch.Tensor,
    v_cache_NBHD: torch.Tensor,
    block_table_SN: torch.Tensor,
    query_start_loc: Sequence[int] | torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    *,
    scale: float,
    impl: Impl,
) -> AttentionOut:
    """Causal attention of the *last* tokens of each sequence over its K and V in a paged cache.

    q_THD: [T, Hq, D]. k_cache_NBHD, v_cache_NBHD: [blocks, B, Hkv, D], any strides; position p of sequence s lies at
    ``[block_table_SN[s, p // B], p % B]``. query_start_loc: S + 1 row bounds in q; seq_lens: S token counts, cached ones and the
    queries together: sequence s's rows are the last ``query_start_loc[s + 1] - query_start_loc[s]`` of its ``seq_lens[s]`` tokens.
    Host sequences or CPU tensors spare a device synchronisation. Rows from ``query_start_loc[-1]`` on (padding) attend to nothing:
    out 0, lse -inf. Cache slots that no sequence owns are never read. Raises ValueError for a table that points outside the cache or
    more queries than tokens.
    """
    _check_heads(q_THD, k_cache_NBHD, v_cache_NBHD)
    bounds, lengths = _host_ints(query_start_loc), _host_ints(seq_lens)
    _check_bounds("query_start_loc", bounds)
    padding = q_THD.shape[0] - bounds[-1]
    if padding < 0:
        raise ValueError(f"query_start_loc ends at {bounds[-1]}, but there are {q_THD.shape[0]} query rows")
    _check_pages(k_cache_NBHD, v_cache_NBHD, block_table_SN, bounds, lengths)
    module = implementation("attention", impl, q_THD, k_cache_NBHD, v_cache_NBHD)
    out, lse = module.paged(q_THD[: bounds[-1]], k_cache_NBHD, v_cache_NBHD, block_table_SN, bounds, lengths, scale=scale)
    if padding:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
        lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf)
    return AttentionOut(out_THD=out, lse_HT=lse)


def _host_ints(values: Sequence[int] | torch.Tensor) -> list[int]:
    return [int(x) for x in (values.tolist() if isinstance(values, torch.Tensor) else values)]


def _check_heads(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q_heads, head_dim = q_THD.shape[-2:]
    if k.shape != v.shape or k.shape[-1] != head_dim or k.shape[-2] < 1 or q_heads % k.shape[-2]:
        raise ValueError(f"q {tuple(q_THD.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if not q_THD.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q_THD.dtype}, k is {k.dtype}, v is {v.dtype}")


def _check_bounds(name: str, bounds: list[int]) -> None:
    if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name} must start at 0 and not descend, got {bounds}")


def _check_pages(k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, bounds: list[int], lengths: list[int]) -> None:
    blocks, block_size = k_cache.shape[:2]
    if len(lengths) != len(bounds) - 1 or table.dim() != 2 or table.shape[0] < len(lengths):
        raise ValueError(f"{len(bounds) - 1} sequences, {len(lengths)} lengths and a block table of {tuple(table.shape)} do not fit")
    for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True)):
        if end - start > length:
            raise ValueError(f"sequence {s} has {end - start} query rows but only {length} tokens")
        if length > table.shape[1] * block_size:
            raise ValueError(f"sequence {s} has {length} tokens, its block table reaches only to {table.shape[1] * block_size}")
    used = torch.tensor([-(-n // block_size) for n in lengths], device=table.device)
    columns = torch.arange(table.shape[1], device=table.device)
    outside = (table[: len(lengths)] < 0) | (table[: len(lengths)] >= blocks)
    if bool((outside & (columns < used[:, None])).any()):
        raise ValueError(f"a block table entry in use lies outside the cache of {blocks} blocks")
