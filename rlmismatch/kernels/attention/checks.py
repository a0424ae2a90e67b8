"""What attention refuses: each in one clear error, before any kernel starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlmismatch.kernels.attention.order import MAX_HEAD_DIM


def require_heads(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Heads, head dims and dtypes of q, k and v fit together. Raises ValueError."""
    q_heads, head_dim = q_THD.shape[-2:]
    if k.shape != v.shape or k.shape[-1] != head_dim or k.shape[-2] < 1:
        raise ValueError(f"q {tuple(q_THD.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if q_heads % k.shape[-2]:
        raise ValueError(f"{q_heads} query heads over {k.shape[-2]} KV heads do not fit: one must be a multiple of the other")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {head_dim} is not supported: 1 to {MAX_HEAD_DIM}")
    if not q_THD.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q_THD.dtype}, k is {k.dtype}, v is {v.dtype}")


def require_sinks(q_THD: torch.Tensor, sinks_H: torch.Tensor | None) -> None:
    """One sink a query head. Raises ValueError."""
    if sinks_H is not None and sinks_H.shape != (q_THD.shape[-2],):
        raise ValueError(f"{q_THD.shape[-2]} query heads need as many sinks, got {tuple(sinks_H.shape)}")


def require_bounds(name: str, bounds: Sequence[int]) -> None:
    """Row bounds start at 0 and do not descend. Raises ValueError."""
    if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name} must start at 0 and not descend, got {list(bounds)}")


def require_lengths(table_SN: torch.Tensor, block_size: int, bounds: Sequence[int], lengths: Sequence[int]) -> None:
    """Every sequence has as many tokens as queries, and a row of the table that reaches as far. Raises ValueError."""
    if len(lengths) != len(bounds) - 1 or table_SN.dim() != 2 or table_SN.shape[0] < len(lengths):
        raise ValueError(f"{len(bounds) - 1} sequences, {len(lengths)} lengths and a block table of {tuple(table_SN.shape)} do not fit")
    for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True)):
        if end - start > length:
            raise ValueError(f"sequence {s} has {end - start} query rows but only {length} tokens")
        if length > table_SN.shape[1] * block_size:
            raise ValueError(f"sequence {s} has {length} tokens, its block table reaches only to {table_SN.shape[1] * block_size}")


def check_block_table(table_SN: torch.Tensor, lengths: Sequence[int], *, blocks: int, block_size: int) -> None:
    """Every entry that a sequence of `lengths[s]` tokens uses lies inside a cache of `blocks` blocks. Raises ValueError.

    Waits for the GPU where the table lies on one.
    """
    used = torch.tensor([-(-n // block_size) for n in lengths], device=table_SN.device)
    columns = torch.arange(table_SN.shape[1], device=table_SN.device)
    outside = (table_SN[: len(lengths)] < 0) | (table_SN[: len(lengths)] >= blocks)
    if bool((outside & (columns < used[:, None])).any()):
        raise ValueError(f"a block table entry in use lies outside the cache of {blocks} blocks")
