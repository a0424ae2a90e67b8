"""The largest of several numbers, where one that is no number must not be lost: Python's own max keeps whichever came first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def worst_of(items: Iterable[Item], value: Callable[[Item], float]) -> Item:
    """The item of the largest value; the first with NaN, if any has. Raises ValueError for no item."""
    return max(items, key=lambda item: (math.isnan(value(item)), value(item)))


def worst(values: Iterable[float]) -> float:
    """The largest value; NaN if any is. Raises ValueError for no value."""
    return worst_of(values, float)
