"""The shape of an axis: what can differ between a trainer and a rollout, as data.

`Axis.id` is the one key everywhere: settings, captures, reports, test ids, file names. Adding an axis is a recipe in
CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlmismatch.contract import FieldSpec, fields_of

Family = Literal["gemm", "attention", "logprob", "model"]
# complete: readings and knobs work in both engines, and numbers come from a pin or from measures. pin_only: the pin and its numbers
# are there, the family's own knobs are not yet. contract_only: fields are read and compared, nothing gives numbers. not_built: listed.
Built = Literal["complete", "pin_only", "contract_only", "not_built"]
# Which pair of scores an axis' numbers speak of.
Ratio = Literal["trainer/prefill", "prefill/decode", "decode/recorded"]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A known fault and the verdict it must get. `sides` are those where the fault can exist."""

    id: str
    verdict: Literal["void", "contract", "defect", "recorded"]
    what: str  # what is broken, in one sentence
    sides: tuple[Literal["trainer", "rollout"], ...] = ("trainer", "rollout")
    built: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What `Axis.structural_zero` and `Axis.cannot_run` look at: the shape of one run."""

    trainer_tp: int = 1
    rollout_tp: int = 1
    sp: bool = False
    cp: int = 1
    device: str = "cpu"
    num_heads: int = 1
    num_kv_heads: int = 1
    has_qk_norm: bool = True
    pad_rows: int = 0
    trainer_spec: str = "local"
    equal_payload: bool = False  # the two sums over ranks that are compared take operands of one dtype and add in one dtype
    rollout_kv_splits: int | None = None  # KV splits per query row in the rollout's attention; None = not known


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One thing that can differ."""

    id: str
    family: Family
    asks: str  # the question it answers
    spec: type[Any]  # the contract dataclass
    field_names: tuple[str, ...] = ()  # the fields of `spec` that are this axis' own; () = all
    # field -> "axis:field" keys whose fact it states again: it fails after its originals, and a waiver of one covers it
    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # (what was asked for, what ran, why not): fields; another one that ran than was asked for is a contradiction unless its reason was read
    fallback: tuple[str, str, str] | None = None
    only_with_tp: tuple[str, ...] = ()  # fields that are not applicable on a side with TP1
    only_with_cp: tuple[str, ...] = ()  # fields that are not applicable on a side with CP1
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> the values it can take, where they are a list
    knobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # knob -> values; () = free value
    pin: str = ""  # what the deterministic path is, in words; "" = none
    pins: tuple[str, ...] = ()  # ids of the pins that hold it (pins/spec.py)
    measure: str = ""
    measured: bool = False  # its family's command makes rows of measures of it, whether or not it has a pin
    trap: str = ""
    hint: str = ""  # what to change when a field of this axis fails, in the words of the command line
    zero: Mapping[str, str] = field(default_factory=dict)  # rule name (ZERO_RULES) -> words of the report
    plants: tuple[Plant, ...] = ()
    side: Literal["both", "trainer", "rollout"] = "both"
    ratio: Ratio = "trainer/prefill"
    built: Built = "not_built"

    def __post_init__(self) -> None:
        if not self.id.count(".") == 1:
            raise ValueError(f"axis id must be family.name: {self.id!r}")
        unknown = set(self.zero) - set(ZERO_RULES)
        if unknown:
            raise ValueError(f"{self.id}: unknown zero rules {sorted(unknown)}")
        if bool(self.pins or self.measured) != (self.built in ("complete", "pin_only")) or (self.built == "pin_only" and not self.pins):
            raise ValueError(f"{self.id}: {self.built}, with pins {list(self.pins)} and measured={self.measured}")
        named = {*self.field_names, *(self.fallback or ()), *self.mirrors, *self.only_with_tp, *self.only_with_cp, *self.values}
        strangers = named - {f.name for f in fields_of(self.spec)}
        if strangers:
            raise ValueError(f"{self.id}: {self.spec.__name__} has no field {sorted(strangers)}")

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """The contract fields of this axis, in order."""
        every = fields_of(self.spec)
        return tuple(f for f in every if not self.field_names or f.name in self.field_names)

    def structural_zero(self, setup: Setup) -> str | None:
        """Why this axis cannot produce a difference in `setup`, or None."""
        return next((words for rule, words in self.zero.items() if ZERO_RULES[rule](setup)), None)


# Predicates over a Setup, by name, so that an axis stays data.
ZERO_RULES: Mapping[str, Callable[[Setup], bool]] = {
    "tp1": lambda s: s.trainer_tp == 1 and s.rollout_tp == 1,
    "trainer_tp1": lambda s: s.trainer_tp == 1,
    "trainer_tp2_equal_payload": lambda s: s.trainer_tp == 2 and s.equal_payload,
    "rollout_tp1": lambda s: s.rollout_tp == 1,
    "tp_le_2": lambda s: s.trainer_tp <= 2 and s.rollout_tp <= 2,
    "no_merge": lambda s: s.cp == 1 and s.rollout_kv_splits == 1,
    "no_pad_rows": lambda s: s.pad_rows == 0,
    "no_qk_norm": lambda s: not s.has_qk_norm,
    "gqa_trivial": lambda s: s.num_kv_heads in (1, s.num_heads),
}
