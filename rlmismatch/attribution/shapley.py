"""Shapley values: how much of a quantity each member of a set removes, on average over the orders in which members can join.

Shapley, "A value for n-person games", 1953; sampled orders as in Castro, Gomez and Tejada, "Polynomial calculation of the Shapley value
based on sampling", 2009. A *curve* maps a set of members to what is left of the quantity: an array of any shape, the same for every set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Curve = Callable[[frozenset[str]], Array]


@dataclass(frozen=True, kw_only=True)
class Values:
    """`value[i]` belongs to `members[i]`; over the members they add to ``curve({}) - curve(all)``, up to rounding.

    error: standard error of a value over the sampled orders; zero where all orders were used.
    """

    members: tuple[str, ...]
    value: Array  # [members, *curve]
    error: Array  # [members, *curve]
    orders: int  # sampled orders; 0 = all of them, exactly


def subsets(members: Sequence[str]) -> tuple[frozenset[str], ...]:
    """All 2^n subsets, smallest first."""
    return tuple(frozenset(c) for size in range(len(members) + 1) for c in itertools.combinations(members, size))


def orders(members: Sequence[str], count: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """`count` random orders; a larger count begins with the same ones."""
    rng = np.random.default_rng(seed)
    return tuple(tuple(members[i] for i in rng.permutation(len(members))) for _ in range(count))


def prefixes(order: Sequence[str]) -> tuple[frozenset[str], ...]:
    """The sets that arise as an order's members join one by one, from the empty set to all."""
    return tuple(frozenset(order[:n]) for n in range(len(order) + 1))


def exact(members: Sequence[str], curve: Curve) -> Values:
    """The values over all orders; asks the curve for all 2^n subsets."""
    left = {s: curve(s) for s in subsets(members)}
    n = len(members)
    value = np.zeros((n, *left[frozenset()].shape))
    for i, member in enumerate(members):
        for s in subsets([m for m in members if m != member]):
            weight = 1 / (n * math.comb(n - 1, len(s)))
            value[i] += weight * (left[s] - left[s | {member}])
    return Values(members=tuple(members), value=value, error=np.zeros_like(value), orders=0)


def sampled(members: Sequence[str], curve: Curve, joinings: Sequence[Sequence[str]]) -> Values:
    """The values as means over the given orders (at least two, so that there is an error)."""
    if len(joinings) < 2:
        raise ValueError(f"a sampled value needs at least 2 orders, got {len(joinings)}")
    index = {m: i for i, m in enumerate(members)}
    removed = np.zeros((len(joinings), len(members), *curve(frozenset()).shape))
    for row, order in enumerate(joinings):
        left = [curve(s) for s in prefixes(order)]
        for member, before, after in zip(order, left, left[1:], strict=False):
            removed[row, index[member]] = before - after
    error = removed.std(axis=0, ddof=1) / math.sqrt(len(joinings))
    return Values(members=tuple(members), value=removed.mean(axis=0), error=error, orders=len(joinings))
