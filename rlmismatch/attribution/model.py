"""What attribution takes and gives: drift tables in, one typed answer out. Plain data in nats, float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from rlmismatch.drift.model import Interval
from rlmismatch.errors import InconclusiveError

Pins = frozenset[str]
# zero set: released last it brings back exactly nothing, and its op is locally equal. local error: the same, but its op differs on equal
# inputs. interchangeable: it can stand in for a member of the fix set. not needed: it brings something back, but the gap closes without it.
Role = Literal["fix set", "zero set", "interchangeable", "local error", "not needed"]

# A mean at the floor scatters, and two noisy sides differ by more than one of them from its repeat (sqrt 2 on average); a remainder is
# rounded differently in every arm. Up to twice its size it is taken for the same floor or remainder.
SLACK: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class ArmDrift:
    """Drift of one arm, one entry per sequence. Sums over scored tokens of delta = trainer - rollout, nats."""

    tokens: tuple[int, ...]
    unequal: tuple[int, ...]  # tokens with delta other than exactly 0
    sum_abs: tuple[float, ...]
    sum_squared: tuple[float, ...]
    sum_signed: tuple[float, ...]
    max_abs: tuple[float, ...]

    def __post_init__(self) -> None:
        columns = (self.unequal, self.sum_abs, self.sum_squared, self.sum_signed, self.max_abs)
        if any(len(c) != len(self.tokens) for c in columns):
            raise ValueError("every column needs one entry per sequence")
        if sum(self.tokens) < 1:
            raise InconclusiveError("nothing-compared", "an arm compared no token")
        if not all(math.isfinite(x) for c in columns for x in c):
            raise InconclusiveError("drift-not-finite", "an arm's drift holds a NaN or an infinity")

    @classmethod
    def of(cls, deltas: Iterable[Sequence[float] | npt.NDArray[np.float64]]) -> ArmDrift:
        """Of one array of deltas per sequence. Raises InconclusiveError for a NaN, an infinity or no token at all."""
        rows = [np.asarray(d, dtype=np.float64) for d in deltas]
        return cls(
            tokens=tuple(r.size for r in rows),
            unequal=tuple(int(np.count_nonzero(r)) for r in rows),
            sum_abs=tuple(float(np.abs(r).sum()) for r in rows),
            sum_squared=tuple(float(np.square(r).sum()) for r in rows),
            sum_signed=tuple(float(r.sum()) for r in rows),
            max_abs=tuple(float(np.abs(r).max(initial=0.0)) for r in rows),
        )

    def summary(self) -> Summary:
        tokens = sum(self.tokens)
        return Summary(
            tokens=tokens,
            unequal=sum(self.unequal),
            mean_abs=math.fsum(self.sum_abs) / tokens,
            mean_squared=math.fsum(self.sum_squared) / tokens,
            signed_mean=math.fsum(self.sum_signed) / tokens,
            max_abs=max(self.max_abs),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One arm over all its tokens; nats, and nats squared."""

    tokens: int
    unequal: int
    mean_abs: float
    mean_squared: float
    signed_mean: float
    max_abs: float

    @property
    def bit_equal(self) -> bool:
        return self.unequal == 0


def within(drift: Summary, target: float) -> bool:
    """Whether an arm counts as closed: bit for bit at a target of 0, else by its mean |delta|, nats."""
    return drift.bit_equal if target == 0.0 else drift.mean_abs <= target


DriftTable = Mapping[Pins, ArmDrift]


@dataclass(frozen=True, kw_only=True)
class Player:
    """One pin. `alone`: drift left when only it is pinned; `last`: drift there is when only it is released. Mean |delta|, nats.

    share: of the mean squared drift about the signed mean that the fix set removes, as a fraction; negative if pinning it adds drift.
    systematic: its part of the signed mean that the fix set removes, nats. Both are None outside the fix set.
    """

    pin: str
    role: Role
    alone: float
    last: float
    local: float | None = None  # largest error between the engines on equal inputs, in the op's unit; None: not measured
    share: float | None = None
    share_interval: Interval | None = None  # over sequences; None where there are too few to say
    share_error: float | None = None  # standard error of a sampled share
    systematic: float | None = None
    stands_in_for: tuple[str, ...] = ()  # fix-set members that it could replace


@dataclass(frozen=True, kw_only=True)
class Drop:
    """The fix set without one member."""

    pin: str
    drift: Summary


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The whole answer. Tuples of pins are in the players' order.

    status: "attributed"; "no drift": the native arm is at the floor already; "unexplained": all pins together leave about as much as none.
    closed: with every player pinned the sides agree (bit for bit, or at the floor). If not, `remainder` is a finding about a missing axis,
    and the fix set is one that reaches the remainder, not zero: `target` says down to what.
    """

    status: Literal["attributed", "no drift", "unexplained"]
    closed: bool
    native: Summary
    remainder: Summary  # every player pinned
    floor: float  # mean |delta|, nats, of sides that agree
    target: float  # mean |delta|, nats, up to which an arm counts as closed; 0: bit for bit
    players: tuple[Player, ...]
    zero_set: tuple[str, ...]
    fix_set: tuple[str, ...]
    fix_drift: Summary | None  # of the run with exactly the fix set pinned
    drops: tuple[Drop, ...]
    widened: bool  # what comes back when released last did not suffice, so all players were searched
    systematic_fraction: float  # signed mean squared over mean square, of the native arm
    share_orders: int | None  # sampled orders behind the shares; 0: exact; None: no shares
    arms: int  # arms that this answer stands on

    @property
    def proved(self) -> bool:
        """The fix set was run and closes the gap down to `target`, and no member can be dropped."""
        return (
            self.fix_drift is not None and within(self.fix_drift, self.target) and not any(within(d.drift, self.target) for d in self.drops)
        )
