"""The search for a fix set: which arms it needs, and what they say. Nothing here runs an arm.

`solve` walks through a table of finished arms and stops with `MissingArms` at the first that are not there; walking again with a fuller
table takes the same path further. So planning and answering can not disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from rlmismatch.attribution import shapley
from rlmismatch.attribution.model import SLACK, ArmDrift, DriftTable, Pins, within

EXACT_UP_TO: Final = 6  # members; above, Shapley values are sampled
ORDERS_PER_ROUND: Final = 8
MAX_ORDERS: Final = 64
SHARE_ERROR: Final = 0.01  # sampling stops when every share's standard error is at most one per cent


class MissingArms(Exception):  # noqa: N818 - a request, not an error
    def __init__(self, arms: tuple[Pins, ...], fix_set: tuple[str, ...] | None) -> None:
        super().__init__(arms)
        self.arms = arms
        self.fix_set = fix_set  # once it is known


class Runs:
    """The table, as the search sees it: asking for an arm that was not run ends the search with the list of what is missing."""

    def __init__(self, table: DriftTable, players: Sequence[str]) -> None:
        if not players or len(set(players)) != len(players):
            raise ValueError(f"players must be different pins, at least one: {list(players)}")
        if len({drift.tokens for drift in table.values()}) > 1:
            raise ValueError("every arm must score the same tokens of the same sequences")
        self.table, self.players, self.every = table, tuple(players), frozenset(players)
        self.used: set[Pins] = set()
        self.fix_set: tuple[str, ...] | None = None

    def need(self, arms: Iterable[Pins]) -> None:
        wanted = tuple(dict.fromkeys(arms))
        missing = tuple(a for a in wanted if a not in self.table)
        if missing:
            raise MissingArms(missing, self.fix_set)
        self.used.update(wanted)

    def __getitem__(self, arm: Pins) -> ArmDrift:
        self.need([arm])
        return self.table[arm]


@dataclass(frozen=True, kw_only=True)
class Solution:
    status: Literal["attributed", "no drift", "unexplained"]
    closed: bool
    target: float
    fix_set: tuple[str, ...] = ()
    widened: bool = False
    swaps: Mapping[str, tuple[str, ...]]  # pin outside the fix set -> members that it could replace
    orders: tuple[tuple[str, ...], ...] = ()  # behind sampled shares


def solve(runs: Runs, floor: float, seed: int) -> Solution:
    """The search: base arms, fix set, stand-ins, the subsets behind the shares."""
    every, players = runs.every, runs.players
    runs.need([frozenset(), every, *(frozenset({p}) for p in players), *(every - {p} for p in players)])
    native, rest = runs[frozenset()].summary(), runs[every].summary()
    closed = within(rest, SLACK * floor)
    target = SLACK * (floor if closed else max(floor, rest.mean_abs))
    if within(native, SLACK * floor):
        return Solution(status="no drift", closed=closed, target=target, swaps={})
    if within(native, target):
        return Solution(status="unexplained", closed=closed, target=target, swaps={})

    def closes(pins: Pins) -> bool:
        return within(runs[pins].summary(), target)

    came_back = tuple(p for p in players if not closes(every - {p}))
    runs.need([frozenset(came_back), *_drops(came_back)])
    widened = not closes(frozenset(came_back))
    fix_set = _minimise(players if widened else came_back, closes, runs.need)
    swaps = _swaps(runs, fix_set, came_back, closes)
    runs.fix_set = fix_set
    joinings: tuple[tuple[str, ...], ...] = ()
    if len(fix_set) <= EXACT_UP_TO:
        runs.need(shapley.subsets(fix_set))
    else:
        joinings = _enough_orders(runs, fix_set, seed)
    return Solution(status="attributed", closed=closed, target=target, fix_set=fix_set, widened=widened, swaps=swaps, orders=joinings)


def _drops(pins: Sequence[str]) -> list[Pins]:
    return [frozenset(pins) - {p} for p in pins]


def _minimise(pins: tuple[str, ...], closes: Callable[[Pins], bool], need: Callable[[Iterable[Pins]], None]) -> tuple[str, ...]:
    """A 1-minimal subset that still closes: ddmin of Zeller and Hildebrandt (2002), in a fixed order, one round of arms per granularity.

    `pins` closes and the empty set does not. On return every drop-one was run and does not close.
    """
    need(_drops(pins))
    if not any(closes(d) for d in _drops(pins)):
        return pins
    parts = 2
    while len(pins) > 1:
        chunks = [pins[i * len(pins) // parts : (i + 1) * len(pins) // parts] for i in range(parts)]
        rests = [tuple(p for p in pins if p not in chunk) for chunk in chunks]
        need(map(frozenset, chunks + rests))
        if chunk := next((c for c in chunks if closes(frozenset(c))), None):
            pins, parts = chunk, 2
        elif rest := next((r for r in rests if closes(frozenset(r))), None):
            pins, parts = rest, max(parts - 1, 2)
        elif parts == len(pins):
            break
        else:
            parts = min(2 * parts, len(pins))
    return pins


def _swaps(runs: Runs, fix_set: tuple[str, ...], came_back: tuple[str, ...], closes: Callable[[Pins], bool]) -> dict[str, tuple[str, ...]]:
    """Pins that nobody misses only because another does their work: each one that can take a member's place, with those members.

    Only a member that brought nothing back when it was released last can have a stand-in.
    """
    covered = [m for m in fix_set if m not in came_back]
    others = [p for p in runs.players if p not in fix_set]
    runs.need(frozenset(fix_set) - {m} | {p} for m in covered for p in others)
    found = {p: tuple(m for m in covered if closes(frozenset(fix_set) - {m} | {p})) for p in others}
    return {p: members for p, members in found.items() if members}


def _enough_orders(runs: Runs, fix_set: tuple[str, ...], seed: int) -> tuple[tuple[str, ...], ...]:
    """As many random orders as the shares need for their standard error, at most MAX_ORDERS."""
    curve = curve_of(runs, seed, bootstrap=0)
    count = 0
    while True:
        count = min(count + ORDERS_PER_ROUND, MAX_ORDERS)
        joinings = shapley.orders(fix_set, count, seed)
        runs.need(arm for order in joinings for arm in shapley.prefixes(order))
        values = shapley.sampled(fix_set, curve, joinings)
        total = values.value[:, 0, 0].sum()
        if count == MAX_ORDERS or values.error[:, 0, 0].max() <= SHARE_ERROR * abs(total):
            return joinings


def curve_of(runs: Runs, seed: int, bootstrap: int) -> shapley.Curve:
    """What an arm leaves: [0] mean square about the signed mean, nats squared; [1] signed mean, nats. Columns: all, then resamples."""
    tokens = np.asarray(runs[frozenset()].tokens, dtype=np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(tokens), size=(bootstrap, len(tokens)))
    counts = np.stack([np.bincount(row, minlength=len(tokens)) for row in picks]) if bootstrap else np.zeros((0, len(tokens)))
    weights = np.concatenate([np.ones((1, len(tokens))), counts])
    total = weights @ tokens

    def curve(pins: Pins) -> shapley.Array:
        drift = runs[pins]
        with np.errstate(invalid="ignore"):  # a resample of sequences without a token has no mean; its interval is then not given
            square, signed = (weights @ np.asarray(column) / total for column in (drift.sum_squared, drift.sum_signed))
        return np.stack([square - np.square(signed), signed])

    return curve
