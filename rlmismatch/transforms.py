"""What is done to a row of logits before its log-softmax: an ordered list of steps, as data, and what it does to a tensor.

Two sides that apply other steps, or the same steps in another order, compute other distributions: that is no rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rlmismatch.errors import UsageError

if TYPE_CHECKING:
    import torch

# Step -> the value that does nothing, in the order in which an engine applies them unless it is told another one.
NEUTRAL: Final[dict[str, float]] = {"soft_cap": 0.0, "logit_scale": 1.0, "temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
# Steps that see one column at a time; the others need the whole row.
ELEMENTWISE: Final = frozenset({"soft_cap", "logit_scale", "temperature"})


@dataclass(frozen=True, kw_only=True)
class Step:
    """One transform of a row of logits."""

    name: str
    value: float

    def __post_init__(self) -> None:
        if self.name not in NEUTRAL:
            raise UsageError(
                "transform-unknown", f"there is no transform {self.name!r} of logits", hint=f"known: {', '.join(NEUTRAL)}, in any order"
            )
        allowed = {
            "soft_cap": self.value > 0,
            "logit_scale": self.value > 0,
            "temperature": self.value > 0,
            "min_p": 0 < self.value <= 1,
            "top_k": self.value >= 1 and float(self.value).is_integer(),
            "top_p": 0 < self.value <= 1,
        }
        if not (math.isfinite(self.value) and allowed[self.name]):
            raise UsageError("transform-value", f"{self.name} cannot be {self.value:g}")

    def __str__(self) -> str:
        return f"{self.name}({self.value:g})"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The steps in the order in which they are applied. Steps that do nothing are not part of it."""

    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        names = [s.name for s in self.steps]
        if len(set(names)) != len(names):
            raise ValueError(f"a transform stands twice in {names}")

    @classmethod
    def of(cls, values: dict[str, float], order: Sequence[str] = tuple(NEUTRAL)) -> Chain:
        """The chain of the `values` that do something, in `order`. Raises UsageError for a value whose step `order` leaves out."""
        active = {name: value for name, value in values.items() if value != NEUTRAL.get(name)}
        missing = sorted(active.keys() - set(order))
        if missing:
            raise UsageError(
                "transform-chain-incomplete",
                f"--transform-chain {','.join(order)} leaves out {', '.join(missing)}, which has a value",
                hint=f"e.g. --transform-chain {','.join(n for n in NEUTRAL if n in active)}",
            )
        return cls(steps=tuple(Step(name=name, value=active[name]) for name in order if name in active))

    @property
    def texts(self) -> list[str]:
        """``["soft_cap(30)", "temperature(0.6)"]``: the chain as a contract value."""
        return [str(s) for s in self.steps]

    @property
    def elementwise(self) -> bool:
        """Whether a rank that holds some columns of a row can apply the chain to them alone."""
        return all(s.name in ELEMENTWISE for s in self.steps)

    @property
    def only_temperature(self) -> float | None:
        """The temperature, if nothing else is done to the logits; 1.0 for an empty chain."""
        if not self.steps:
            return 1.0
        return self.steps[0].value if len(self.steps) == 1 and self.steps[0].name == "temperature" else None

    def value(self, name: str) -> float:
        """The value of a step, or the one that does nothing."""
        return next((s.value for s in self.steps if s.name == name), NEUTRAL[name])

    def without(self, name: str) -> Chain:
        return Chain(steps=tuple(s for s in self.steps if s.name != name))

    def apply(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """[T, V] in the dtype of `logits_TV`, which is left as it is; columns that a step cuts off are -inf."""
        for step in self.steps:
            logits_TV = _APPLY[step.name](logits_TV, step.value)
        return logits_TV

    def __str__(self) -> str:
        return " then ".join(self.texts) or "raw"


def parse_order(text: str) -> tuple[str, ...]:
    """``soft_cap,temperature`` -> names in order. Raises UsageError for an unknown or repeated one."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [n for n in names if n not in NEUTRAL]
    if unknown or len(set(names)) != len(names):
        raise UsageError(
            "transform-chain-malformed",
            f"--transform-chain {text}: " + (f"unknown {unknown[0]!r}" if unknown else "a step stands twice"),
            hint=f"a comma list of: {', '.join(NEUTRAL)}",
        )
    return names


def parse_texts(texts: Iterable[str]) -> Chain:
    """The inverse of `Chain.texts`. Raises UsageError for a text that is no step."""
    steps = []
    for text in texts:
        name, opened, rest = text.partition("(")
        try:
            value = float(rest.removesuffix(")"))
        except ValueError:
            opened = ""
            value = math.nan
        if not opened:
            raise UsageError("transform-malformed", f"{text!r} is no transform", hint="NAME(VALUE), e.g. temperature(0.6)")
        steps.append(Step(name=name, value=value))
    return Chain(steps=tuple(steps))


_MOST_PERMUTED: Final = 4


def candidates(*chains: Chain) -> tuple[Chain, ...]:
    """Every chain that a side may have applied instead: all orders of all subsets of the steps of `chains`, the given ones first.

    Steps of one name and different values exclude each other. Chains that are equal as functions (a temperature and a scale
    commute) are all kept: which of them is meant cannot be told from values, and the first stands for them.
    """
    steps = tuple(dict.fromkeys(step for chain in chains for step in chain.steps))
    every: dict[Chain, None] = dict.fromkeys(chains)
    # Orders of many steps are too many to try, and a chain that long is rarely out of order.
    ways = itertools.permutations if len(steps) <= _MOST_PERMUTED else itertools.combinations
    for size in range(len(steps) + 1):
        for chosen in ways(steps, size):
            if len({s.name for s in chosen}) == size:
                every.setdefault(Chain(steps=chosen))
    return tuple(every)


def _soft_cap(x_TV: torch.Tensor, cap: float) -> torch.Tensor:
    import torch

    return torch.tanh(x_TV / cap) * cap


def _scale(x_TV: torch.Tensor, scale: float) -> torch.Tensor:
    return x_TV * scale


def _temperature(x_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    return x_TV / temperature


def _min_p(x_TV: torch.Tensor, least: float) -> torch.Tensor:
    """Keep columns of at least `least` times the probability of the likeliest."""
    return x_TV.masked_fill(x_TV < x_TV.amax(dim=-1, keepdim=True) + math.log(least), -math.inf)


def _top_k(x_TV: torch.Tensor, k: float) -> torch.Tensor:
    """Keep the k likeliest columns, and those equal to the last of them."""
    least_T1 = x_TV.topk(min(int(k), x_TV.shape[-1]), dim=-1).values[..., -1:]
    return x_TV.masked_fill(x_TV < least_T1, -math.inf)


def _top_p(x_TV: torch.Tensor, mass: float) -> torch.Tensor:
    """Keep the fewest likeliest columns whose probability reaches `mass`."""
    probability_TV, order_TV = x_TV.softmax(dim=-1).sort(dim=-1, descending=True)
    before_TV = probability_TV.cumsum(dim=-1) - probability_TV
    cut_TV = (before_TV >= mass).scatter(-1, order_TV, before_TV >= mass)
    return x_TV.masked_fill(cut_TV, -math.inf)


_APPLY: Final = {
    "soft_cap": _soft_cap,
    "logit_scale": _scale,
    "temperature": _temperature,
    "min_p": _min_p,
    "top_k": _top_k,
    "top_p": _top_p,
}
