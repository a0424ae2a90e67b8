"""The one tree that joins partial sums, within a rank and across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pairwise_tree(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Neighbours are added level by level, left operand first; an odd last part moves up unchanged.

    For 2^n parts, any aligned run of 2^m of them is a subtree: joining the runs' results by the same function gives the same bits as
    joining all parts. That is what makes a row-parallel sum independent of the tensor-parallel size. Raises ValueError for no parts.
    """
    if not parts:
        raise ValueError("a sum needs at least one part")
    level = list(parts)
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]
