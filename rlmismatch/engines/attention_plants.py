"""What the attention faults of both sides share: their sizes, and orders of query heads that feign a wrong head map."""

from __future__ import annotations

import torch

# What a YaRN factor on cos and sin does to the scores is its square: the two faults are alike in every number.
YARN_FACTOR = 1.4159
SCALE_FACTOR = YARN_FACTOR**2
JUMP_AT = 8  # token at which the planted positions skip ahead
JUMP_BY = 5
SHIFT_BY = 7  # of all positions alike


def tiled(heads: int, kv_heads: int) -> list[int]:
    """Which query head goes into each slot, so that an operation which maps slots to key/value heads in blocks maps heads in turn."""
    return [h for kv in range(kv_heads) for h in range(heads) if h % kv_heads == kv]


def inverse(order: list[int]) -> list[int]:
    """The slot that each head went into."""
    return sorted(range(len(order)), key=order.__getitem__)


def swapped(heads: int) -> list[int]:
    """The first and the last query head in each other's place."""
    return [heads - 1, *range(1, heads - 1), 0]


def why_not_tiled(num_heads: int, num_kv_heads: int, tp: int) -> str | None:
    """Why a head map in turn is the head map in blocks on every rank, or None."""
    kv_heads = max(1, num_kv_heads // tp)
    if kv_heads == 1 or num_heads == num_kv_heads:
        return f"with {kv_heads} key/value heads a rank and {num_heads // tp} query heads both maps are one"
    return None


def jumping(positions: torch.Tensor) -> torch.Tensor:
    """Positions that skip ahead in the middle of a sequence."""
    return positions + JUMP_BY * (positions >= JUMP_AT)


def shifted(positions: torch.Tensor) -> torch.Tensor:
    """Positions that are all shifted alike, which RoPE, being relative, does not notice."""
    return positions + SHIFT_BY
