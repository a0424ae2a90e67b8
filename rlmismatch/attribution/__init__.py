"""Which ops carry the drift: the zero set, a proved smallest fix set, and shares. Pure functions of drift tables; no engine, no I/O.

An arm is a set of pins in force on both sides. Rounding drift saturates: the first op that rounds differently makes everything after it
differ, so neither "pinned alone" nor "released last" is a share. Hence: clear what brings back exactly nothing when released last; find a
set of pins that alone closes the gap, by delta debugging; prove it by running that set and every drop-one; only then divide its drift by
Shapley values. `next_arms` asks for the arms that this needs, `attribute` reads the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlmismatch.attribution import search, shapley
from rlmismatch.attribution.model import ArmDrift, Attribution, DriftTable, Drop, Pins, Player, Role, Summary
from rlmismatch.drift.model import Interval
from rlmismatch.errors import InconclusiveError

__all__ = [
    "ArmDrift",
    "Attribution",
    "DriftTable",
    "Drop",
    "Pins",
    "Player",
    "Role",
    "Summary",
    "attribute",
    "expected_arms",
    "next_arms",
]


def next_arms(table: DriftTable, players: Sequence[str], *, floor: float = 0.0, seed: int = 0) -> tuple[Pins, ...]:
    """The arms to run next; none when `attribute` can answer. Call again with the answers added to the table.

    floor: mean |delta|, nats, that sides which agree still show because they do not repeat bit for bit.
    The first round is: nothing pinned, all pinned, each alone, each released last.
    """
    try:
        search.solve(search.Runs(table, players), floor, seed)
    except search.MissingArms as missing:
        return missing.arms
    return ()


def expected_arms(table: DriftTable, players: Sequence[str], *, floor: float = 0.0, seed: int = 0) -> int:
    """An upper bound on the number of arms in all, those in the table included; it comes down as the table fills."""
    n = len(players)
    try:
        search.solve(search.Runs(table, players), floor, seed)
    except search.MissingArms as missing:
        bound = len(set(table) | set(missing.arms))
        members = n
        if missing.fix_set is None:
            bound += n * n + 5 * n + n * n // 4  # delta debugging at its worst, and every possible stand-in
        else:
            members = len(missing.fix_set)
        bound += 1 << members if members <= search.EXACT_UP_TO else search.MAX_ORDERS * (members - 1)
        return min(1 << n, bound)
    return len(table)


def attribute(
    table: DriftTable,
    players: Sequence[str],
    *,
    floor: float = 0.0,
    seed: int = 0,
    bootstrap: int = 1000,
    local: Mapping[str, float | None] | None = None,
) -> Attribution:
    """The attribution of a complete table (`next_arms` with the same floor and seed returns nothing).

    local: pin -> largest error between the two engines' native ops on equal inputs; a pin whose op differs is never cleared.
    bootstrap: resamples of the sequences behind the intervals. Raises InconclusiveError if an arm is missing.
    """
    runs = search.Runs(table, players)
    try:
        found = search.solve(runs, floor, seed)
    except search.MissingArms as missing:
        names = ", ".join("+".join(p for p in runs.players if p in arm) or "native" for arm in missing.arms)
        raise InconclusiveError("attribution-incomplete", f"{len(missing.arms)} arms were not run: {names}") from None
    shares = _shares(runs, found, search.curve_of(runs, seed, bootstrap)) if found.fix_set else None
    native = runs[frozenset()].summary()
    rows = tuple(_player(p, runs, found, shares, (local or {}).get(p)) for p in runs.players)
    return Attribution(
        status=found.status,
        closed=found.closed,
        native=native,
        remainder=runs[runs.every].summary(),
        floor=floor,
        target=found.target,
        players=rows,
        zero_set=tuple(r.pin for r in rows if r.role == "zero set"),
        fix_set=found.fix_set,
        fix_drift=runs[frozenset(found.fix_set)].summary() if found.fix_set else None,
        drops=tuple(Drop(pin=p, drift=runs[frozenset(found.fix_set) - {p}].summary()) for p in found.fix_set),
        widened=found.widened,
        systematic_fraction=native.signed_mean**2 / native.mean_squared if native.mean_squared else 0.0,
        share_orders=None if shares is None else shares.orders,
        arms=len(runs.used),
    )


def _shares(runs: search.Runs, found: search.Solution, curve: shapley.Curve) -> shapley.Values:
    return shapley.sampled(found.fix_set, curve, found.orders) if found.orders else shapley.exact(found.fix_set, curve)


def _player(pin: str, runs: search.Runs, found: search.Solution, values: shapley.Values | None, local: float | None) -> Player:
    last = runs[runs.every - {pin}]
    silent = last == runs[runs.every]
    role: Role
    if pin in found.fix_set:
        role = "fix set"
    elif pin in found.swaps:
        role = "interchangeable"
    elif silent:
        role = "zero set" if local is None or local == 0.0 else "local error"
    else:
        role = "not needed"
    share = error = systematic = interval = None
    if values is not None and pin in found.fix_set:
        i = found.fix_set.index(pin)
        systematic = float(values.value[i, 1, 0])
        totals = values.value[:, 0].sum(axis=0)
        if totals[0] > 0:
            share = float(values.value[i, 0, 0] / totals[0])
            error = float(values.error[i, 0, 0] / totals[0]) if values.orders else None
            interval = _interval(values.value[i, 0, 1:], totals[1:]) if len(last.tokens) > 1 else None
    return Player(
        pin=pin,
        role=role,
        alone=runs[frozenset({pin})].summary().mean_abs,
        last=last.summary().mean_abs,
        local=local,
        share=share,
        share_interval=interval,
        share_error=error,
        systematic=systematic,
        stands_in_for=found.swaps.get(pin, ()),
    )


def _interval(values: shapley.Array, totals: shapley.Array) -> Interval | None:
    """The middle 95 % of the resampled shares; None if a resample leaves nothing to share, for then the interval has no meaning."""
    if not values.size or not bool(np.all(totals > 0)):
        return None
    low, high = np.quantile(values / totals, [0.025, 0.975])
    return Interval(low=float(low), high=float(high))
