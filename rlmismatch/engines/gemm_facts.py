"""The facts of the GEMM probe, as they lie in an arm's tensors: float64 vectors by name, a dataclass's fields in order.

replay/NAME/M            `ReplayFacts`: NAME a logical column (layers.0.q_proj), M the rows of one product, or ``full``
sum/WAY/PAYLOAD/ROWS     `SumFacts`: the partials of all row-parallel layers through one way to sum, in one dtype
backend/NAME/ROWS        `SumFacts`: the same through one all-reduce backend, in the model's dtype (rollout)
flag/FLAG/FROM/TO/PRODUCT/M   `FlagFacts`: one product of this process with a flag at FROM, and flipped to TO
alone/WHAT               `AloneFacts`: the same tokens scored among fewer rows, by the whole live engine
collective/PHASE/OP/BACKEND/DTYPE/BYTES    [calls, steps of that phase]: what ran in this arm (rollout)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

NOT_FLIPPED: Final = "flag not flipped: "  # how the note of an arm begins that names a flag of the process, and says why


@dataclass(frozen=True, kw_only=True)
class ReplayFacts:
    """One product at M rows: how many elements are not the pin's, and not what the native product gives at full M; and errors.

    At ``full`` the latter compares a second run. Errors are sums over the elements, against float64 on the same inputs.
    """

    count: float
    unequal_pin: float
    unequal_full: float
    native_error: float
    pin_error: float
    scale: float
    largest_full: float  # largest |native at M - native at full|
    largest_pin: float


@dataclass(frozen=True, kw_only=True)
class SumFacts:
    """Partials through one way to sum. `unequal` is against rank order on the same payload, `unequal_rounded` after rounding to the
    model's dtype. sum_error: against the exact sum of what was sent; error: against the exact product."""

    count: float
    unequal: float
    unequal_rounded: float
    sum_error: float
    error: float
    scale: float
    largest: float  # largest |sum - exact sum of what was sent|


@dataclass(frozen=True, kw_only=True)
class AloneFacts:
    """Log-probs of the same tokens scored among other rows."""

    tokens: float
    unequal: float
    largest: float  # nats


@dataclass(frozen=True, kw_only=True)
class FlagFacts:
    """One product at M rows with a flag of the process as it was, flipped, and put back; each several times.

    unequal_floor, unequal, unequal_after: elements unlike the first product's in any repeat, in any flipped one, and once the flag is
    back. Errors are sums over the elements, against float64 on the same inputs; of flipped ones, the largest.
    """

    count: float
    unequal_floor: float
    unequal: float
    unequal_after: float
    native_error: float
    flipped_error: float
    difference: float  # sum of |flipped - native|
    scale: float
    largest: float  # largest |flipped - native|


Facts = ReplayFacts | SumFacts | AloneFacts | FlagFacts
Kind = TypeVar("Kind", ReplayFacts, SumFacts, AloneFacts, FlagFacts)


def packed(facts: Facts) -> torch.Tensor:
    """float64, one element a field."""
    return torch.tensor([float(v) for v in dataclasses.asdict(facts).values()], dtype=torch.float64)


def joined(parts: Sequence[torch.Tensor], kind: type[Facts]) -> torch.Tensor:
    """Packed facts of several parts as those of the whole: the largest of what is the largest (a NaN wins), the sum of the rest."""
    stacked = torch.stack(list(parts))
    largest = torch.tensor([f.name.startswith("largest") for f in dataclasses.fields(kind)])
    return torch.where(largest, stacked.max(dim=0).values, stacked.sum(dim=0))


def unpacked(tensors: Mapping[str, torch.Tensor], prefix: str, kind: type[Kind]) -> dict[tuple[str, ...], Kind]:
    """The facts under ``prefix/``, by what stands behind it, split at the slashes."""
    found = {tuple(name.split("/")[1:]): t.tolist() for name, t in tensors.items() if name.startswith(f"{prefix}/")}
    names = [f.name for f in dataclasses.fields(kind)]
    return {key: kind(**dict(zip(names, values, strict=True))) for key, values in found.items()}
