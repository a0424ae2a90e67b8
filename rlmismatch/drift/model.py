"""What a drift measurement holds. Plain data in nats, float64; `None` is "not measured" and never stands for zero.

Everywhere *a* is the trainer's and *b* the rollout's log-prob of one token (for other ratios: the first and the second name),
and ``delta = a - b``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

InvalidKind = Literal["id_mismatch", "shape_mismatch", "not_finite", "no_active_tokens"]


@dataclass(frozen=True, kw_only=True)
class Invalid:
    """A reason why two score sets can not be compared. One is enough: a drift with a reason has no numbers and never passes."""

    kind: InvalidKind
    text: str
    sequence: str = ""  # the sequence id, where the reason speaks of one


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A bootstrap percentile interval over sequences."""

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True, kw_only=True)
class TokenDrift:
    """One token of one response, with what stands before it."""

    sequence: str
    position: int  # in the response, from 0
    context_length: int  # tokens before it, prompt included
    token: int  # its id
    a: float  # nats
    b: float  # nats
    delta: float  # nats
    context_ids: tuple[int, ...] = ()  # the last few ids before it
    text: str = ""  # decoded for people, where a tokenizer was there
    context_text: str = ""


@dataclass(frozen=True, kw_only=True)
class UlpBin:
    """Tokens whose float32 log-probs lie `low` to `high` representable numbers apart, both included."""

    low: int
    high: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PositionBucket:
    """Tokens at response positions `start` <= position < `stop`."""

    start: int
    stop: int
    tokens: int
    mean_abs: float | None  # nats; None where the bucket is empty


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Does the drift grow along the response?"""

    buckets: tuple[PositionBucket, ...]
    slope: float | None  # nats per 1000 tokens, least squares of |delta| on position; None where all positions are one
    slope_interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class SequenceDrift:
    """One sequence. `robust_z` = (mean_abs - median) / (1.4826 MAD) over sequences; None where there are too few to say."""

    sequence: str
    tokens: int
    signed_mean: float
    mean_abs: float
    max_abs: float
    bit_equal: int
    robust_z: float | None = None
    outlier: bool = False


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The drift of one pair of score sets. Every number is None when `invalid` is not empty."""

    tokens: int
    sequences: int
    invalid: tuple[Invalid, ...] = ()
    signed_mean: float | None = None  # nats, the bias
    signed_mean_interval: Interval | None = None
    mean_abs: float | None = None  # nats
    mean_abs_interval: Interval | None = None
    p50: float | None = None  # nats, of |delta|
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    token_mult_prob_error: float | None = None  # mean of exp|delta|; 1 is none
    k1: float | None = None  # nats; estimators of KL(b || a), i.e. of the rollout from the trainer
    k2: float | None = None
    k3: float | None = None
    bit_equal: int | None = None  # tokens whose float64 bits are the same
    clip_share: float | None = None  # share of tokens with |delta| > ln 1.2
    ess: float | None = None  # effective sample size of the weights exp(delta), as a share of the tokens
    tis_mean_weight: float | None = None  # mean of min(exp(delta), 2)
    ulp_histogram: tuple[UlpBin, ...] = ()
    growth: Growth | None = None
    worst: tuple[TokenDrift, ...] = ()  # largest |delta| first
    per_sequence: tuple[SequenceDrift, ...] = ()

    @property
    def valid(self) -> bool:
        """At least one token was compared and nothing forbids the comparison."""
        return not self.invalid and self.tokens > 0

    @property
    def unequal(self) -> int | None:
        """Tokens whose bits differ."""
        return None if self.bit_equal is None else self.tokens - self.bit_equal

    @property
    def bit_equal_share(self) -> float | None:
        return None if self.bit_equal is None or not self.tokens else self.bit_equal / self.tokens

    def decoded(self, decode: Callable[[Sequence[int]], str]) -> Drift:
        """The same drift with `text` and `context_text` of the worst tokens filled in by a tokenizer's decode."""
        worst = tuple(dataclasses.replace(t, text=decode([t.token]), context_text=decode(t.context_ids)) for t in self.worst)
        return dataclasses.replace(self, worst=worst)


@dataclass(frozen=True, kw_only=True)
class OracleError:
    """How far one side is from the float64 oracle, in units of what a plain forward in the model's dtype is off by."""

    drift: Drift  # side against oracle
    plain_mean_abs: float | None = None  # nats, plain forward against the oracle
    ratio: float | None = None  # mean_abs / plain_mean_abs
    why_no_ratio: str = ""


HintName = Literal[
    "constant_offset_log_k",
    "non_positive_offset",
    "shifted_by_one",
    "logprob_zero",
    "logprob_above_zero",
    "zero_before_position",
    "one_signed_bias",
    "backend_fell_back",
    "positions_shifted_alike",
    "window_not_reached",
]


@dataclass(frozen=True, kw_only=True)
class Hint:
    """A signature seen in the numbers: what it says and the axis to look at first. It is a hint and decides nothing."""

    name: HintName
    says: str
    axis: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BudgetLine:
    """One limit of the budget against what was measured.

    smallest_limit_that_passes: what the limit would have to be for this value to pass (the value itself); None when not measured.
    required: False only for a default oracle limit of a run that has no oracle.
    """

    limit: str
    sense: Literal["at most", "at least"]
    allowed: float
    value: float | None
    status: Literal["within", "over", "not measured"]
    required: bool = True
    smallest_limit_that_passes: float | None = None
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "within" or (self.status == "not measured" and not self.required)
