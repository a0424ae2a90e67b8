"""The constants of the fold, and what a call asks of every score: shared by the API and its implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

KV_TILE: Final = 128  # tokens a step of the online softmax; half precision, head dim up to 128
_KV_TILE_WIDE: Final = 64  # float32 operands, or a larger head dim: what registers hold
SPLIT: Final = 512  # tokens a split: folded from a fresh state, then merged in ascending order
MAX_HEAD_DIM: Final = 256
LOG2_E: Final = math.log2(math.e)


def kv_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of one step. It is part of the order of additions, so nothing but the kind of the operands may choose it."""
    return KV_TILE if dtype.itemsize == 2 and head_dim <= 128 else _KV_TILE_WIDE


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What stands between ``q @ k`` and the softmax.

    scale: factor on ``q @ k``, in the accumulator. window: keys that a query sees, itself counted: position p sees (p - window, p].
    soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``. None: none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a positive number, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window counts the query's own token: at least 1, got {self.window}")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise ValueError(f"soft_cap must be a positive number, got {self.soft_cap}")


class Segment(NamedTuple):
    """Consecutive query rows of one sequence and the keys that there are for them.

    Rows [first_row, first_row + rows) of q stand at positions first_position, first_position + 1, ... Keys stand at positions
    [kv_start, kv_end); position p lies in row ``kv_row + p`` of dense K and V (kv_row may be negative), or where the block table says.
    """

    first_row: int
    rows: int
    first_position: int
    kv_row: int
    kv_start: int
    kv_end: int
