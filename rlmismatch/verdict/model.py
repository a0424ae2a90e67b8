"""What a verdict is made of, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from rlmismatch.contract import FieldComparison
from rlmismatch.drift import BudgetLine, Drift
from rlmismatch.errors import RlmismatchError

Kind = Literal["void", "contract", "defect", "warning", "drift", "environment", "engine", "inconclusive"]
Word = Literal["OK", "DRIFT", "CONTRACT", "NOT COMPARABLE", "DEFECT", "INCONCLUSIVE", "ENGINE FAILED", "CANNOT RUN"]

DEFAULT_FAIL_ON: Final = "contract,defect,drift"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the verdict is what it is. The first reason is the one to act on."""

    kind: Kind
    text: str
    axis: str = ""
    tier: str = ""
    hint: str = ""  # what to change, in the user's words


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run ended as. With `numbers_void` no number of the run counts, and no reason speaks of one.

    With exit code 0 the reasons, if any, are remarks: warnings, and drift over budget that `--fail-on` asked only to report.
    """

    word: Word
    exit_code: int
    reasons: tuple[Reason, ...] = ()
    numbers_void: bool = False


# The rows of a report fit these; so do any others of the same shape.
class Gate(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def equal(self) -> bool | None: ...
    @property
    def compared(self) -> int: ...
    @property
    def differing(self) -> tuple[str, ...]: ...
    @property
    def note(self) -> str: ...


class Knob(Protocol):
    @property
    def knob(self) -> str: ...
    @property
    def side(self) -> str: ...
    @property
    def requested(self) -> Any: ...
    @property
    def actual(self) -> Any: ...
    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Control(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def got(self) -> str: ...
    @property
    def ok(self) -> bool: ...


class Defect(Protocol):
    @property
    def axis(self) -> str: ...
    @property
    def text(self) -> str: ...


class BrokenPromise(Protocol):
    """What a side says of itself, and was seen not to keep."""

    @property
    def axis(self) -> str: ...
    @property
    def text(self) -> str: ...


class PlantInForce(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def side(self) -> str: ...
    @property
    def expected(self) -> str: ...


class Signature(Protocol):
    """A signature in the numbers: it points at an axis and decides nothing by itself."""

    @property
    def axis(self) -> str: ...
    @property
    def says(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a verdict is made of.

    drift: of the headline ratio; None when it was not measured. defects: ops over their error budget against float64, most important
    first. promises: those that a side gave and broke. failures: errors that ended a side or the run; what is missing because of them is
    not held against the contract. plants: known faults in force on purpose; a run that does not name them has shown nothing.
    """

    comparisons: Sequence[FieldComparison] = ()
    gates: Sequence[Gate] = ()
    knobs: Sequence[Knob] = ()
    controls: Sequence[Control] = ()
    budget: Sequence[BudgetLine] = ()
    drift: Drift | None = None
    defects: Sequence[Defect] = ()
    promises: Sequence[BrokenPromise] = ()
    signatures: Sequence[Signature] = ()
    plants: Sequence[PlantInForce] = ()
    failures: Sequence[RlmismatchError] = ()
    fail_on: str = DEFAULT_FAIL_ON
