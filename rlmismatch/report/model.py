"""The one report: plain, frozen data with a JSON form. Renderers read nothing else, and nothing here is computed.

Log-prob numbers are nats in float64. `None` means "not measured" and always has a word of why beside it; it never stands for zero.
All of it is data, and one file, so that the JSON form can be read from top to bottom (a little over 400 lines). That form is documented
key by key in docs/report-schema.md; `SCHEMA_VERSION` goes up when a key changes its meaning or goes away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlmismatch.attribution.model import Role
from rlmismatch.contract import FieldComparison, Outcome, Tier
from rlmismatch.drift.model import BudgetLine, Drift, Hint, Interval
from rlmismatch.errors import UsageError
from rlmismatch.report import codec
from rlmismatch.verdict.model import Verdict

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class SideInfo:
    """One side as it ran."""

    side: str  # trainer | rollout | oracle
    engine: str  # megatron-core, vllm, transformers
    version: str
    tp: int = 1
    sp: bool = False
    cp: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    impl: str = ""  # of the pins: reference | triton
    detail: str = ""  # whether ranks share a GPU, the layer spec, the attention backend that ran


@dataclass(frozen=True, kw_only=True)
class Header:
    """What was run, when, on what."""

    command: str  # the command line, as typed
    run_id: str
    date: str  # ISO 8601, UTC
    checkpoint: str
    checkpoint_digest: str = ""
    architecture: str = ""
    sides: tuple[SideInfo, ...] = ()
    sequences: int = 0
    tokens: int = 0  # scored tokens
    tool_version: str = ""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlantInForce:
    """A known fault put in on purpose: this run proves the tool, not the engines."""

    id: str
    side: str
    what: str
    expected: str = ""  # the verdict it must get


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A condition that must hold before any number: weights, tokens, mode. `equal` is None when it could not be established."""

    name: str
    equal: bool | None
    compared: int = 0  # how many were compared; a gate that compared nothing did not hold
    unit: str = "tensor"  # of what, in the singular: tensor | sequence | setting
    differing: tuple[str, ...] = ()  # the names of those that differ
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.equal is True and self.compared > 0


@dataclass(frozen=True, kw_only=True)
class KnobRow:
    """A knob on one side: asked for and what came of it."""

    knob: str
    side: str
    requested: Any
    actual: Any
    status: str  # applied | fell_back | unsupported | unobservable
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class AxisRow:
    """One axis. Numbers are mean |delta| in nats over the tokens of `ratio`, but for `local`, which is in the op's own unit; where `ratio`
    is ``gradient`` they are relative L2 of the trainer's gradient.

    local: largest |native - pin| on equal inputs. alone: drift left when only this axis is pinned.
    last: drift brought back when only this axis is released.
    status: measured | pinned | equal | differs | unknown | structural zero | not run | not built | contract only.
    why: why there are no numbers.
    """

    axis: str
    status: str
    contract: str = ""  # equal | differs | unknown | waived | recorded | "": no field
    local: float | None = None
    alone: float | None = None
    last: float | None = None
    ratio: str = ""
    evidence: str = ""  # how its contract fields are known, weakest first
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasureRow:
    """A number of one axis that is no drift between two score sets. One over its limit is a defect of the axis."""

    axis: str
    what: str
    value: float | None  # None: not measured, and `note` says why
    unit: str = "nats"
    side: str = ""  # "": of both sides together
    limit: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Within its limit; NaN is within none, and what was not measured broke none."""
        return self.value is None or self.limit is None or abs(self.value) <= self.limit


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """One parameter's native gradient against its pinned one, as the checkpoint names it."""

    parameter: str
    elements: int
    unequal: int
    norm: float  # L2, of the pinned one
    relative_l2: float
    cosine: float | None  # None: one of them is zero
    max_abs: float
    digest: str = ""  # SHA-256 of the pinned one, whole and un-fused, float32: the same at every TP


@dataclass(frozen=True, kw_only=True)
class GradientPlayer:
    """One part of the backward that can be pinned apart. Drifts are relative L2; `share` is of the squared drift (0..1)."""

    player: str  # ops | dgrad_reduce | wgrad_accumulate
    axis: str = ""  # "": the operations are many axes'
    alone: float | None = None
    last: float | None = None
    share: float | None = None
    why: str = ""  # why there are no numbers


@dataclass(frozen=True, kw_only=True)
class GradientInfo:
    """The trainer's gradient of one real loss: how far the native one is from the pinned one, and whose that is."""

    loss: str
    tokens: int
    microbatches: int
    elements: int = 0
    unequal: int | None = None
    norm_native: float | None = None
    norm_pinned: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    players: tuple[GradientPlayer, ...] = ()
    rows: tuple[GradientRow, ...] = ()  # the worst first
    composition: tuple[str, ...] = ()  # what the pinned backward consists of
    digest: str = ""  # over the digests of all parameters: the same at every TP up to 8, with SP or without
    why: str = ""  # why there is no pinned gradient


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """One logical column of one GEMM on its own captured inputs, `rows` of them in one product. Errors are means, of the result's size.

    unequal_pin: elements that are not the pin's (another kernel). unequal_full: elements that are not what the native product gives at all
    rows (the same kernel at another M); at ``full`` itself, what a second run gives.
    """

    side: str
    product: str  # layers.0.q_proj
    rows: str  # a number, or full
    count: int
    unequal_pin: int
    unequal_full: int
    native_error: float | None
    pin_error: float | None
    largest_pin: float
    largest_full: float


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """A collective of the rollout's TP group that ran in the arm ``gemm``, by phase, backend and payload."""

    phase: str  # prefill | decode | mixed
    op: str  # all_reduce | all_gather | reduce_scatter | gather
    backend: str
    dtype: str
    size_bytes: int
    calls: int
    per_step: float


@dataclass(frozen=True, kw_only=True)
class AttentionRanRow:
    """Which attention ran in one layer and phase of a side, and what a trial found that it computes (None: nothing that is known)."""

    side: str
    layer: int
    phase: str  # prefill | decode; the trainer has a forward only
    requested: str
    backend: str
    kernel: str  # the function that was called, where it has a name of its own
    calls: int
    mask: str | None
    window: int | None  # tokens, the current one included; 0: none
    scale: float | None
    soft_cap: float | None  # 0: none
    sink: float | None  # the largest logit; None: no sink
    kv_dtype: str
    fallback_reason: str  # why another backend ran than was asked for; "" where none did


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """The drift of one pair of score sets: ``trainer/prefill``, ``prefill/decode``, ``decode/recorded``, ``trainer/oracle``..."""

    name: str
    drift: Drift | None = None
    why: str = ""  # why it was not measured
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class FloorRow:
    """A side against its own repeat; a floor other than zero limits what any axis can be blamed for."""

    side: str
    path: str
    drift: Drift | None = None
    repeats: int = 2
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class OracleRow:
    """A side's error against the float64 oracle; `ratio` is in units of the plain forward's own error."""

    side: str
    mean_abs: float | None = None  # nats
    plain_mean_abs: float | None = None  # nats
    ratio: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Player:
    """One pin in the attribution. Drifts are mean |delta| in nats; `share` is of the mean squared drift (0..1)."""

    pin: str
    axis: str
    role: Role
    alone: float | None = None
    last: float | None = None
    share: float | None = None
    share_interval: Interval | None = None
    share_error: float | None = None  # standard error of a sampled share
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """One run that proves the fix set: the set itself, or the set without one member."""

    pins: tuple[str, ...]
    dropped: str = ""  # "" for the set itself
    tokens: int = 0
    unequal: int | None = None
    mean_abs: float | None = None  # nats
    max: float | None = None  # nats


@dataclass(frozen=True, kw_only=True)
class DivergenceRow:
    """An op boundary where the two engines part on equal inputs. Errors are absolute, in the op's unit."""

    boundary: str  # layers.0.input_norm
    pin: str
    count: int  # elements compared
    unequal: int
    max_abs: float | None = None  # between the engines
    trainer_error: float | None = None  # mean, against float64
    rollout_error: float | None = None
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class AttributionInfo:
    """Which ops carry the drift of `ratio`: the zero set, the proved fix set, its shares, and what remains."""

    ratio: str = "trainer/prefill"
    native_mean_abs: float | None = None
    native_tokens: int = 0
    signed_mean: float | None = None  # nats; the systematic part, split off first
    players: tuple[Player, ...] = ()
    fix_set: tuple[str, ...] = ()
    zero_set: tuple[str, ...] = ()
    proved: bool = False  # the fix set was run and is bit-equal (or at the floor), and no member can be dropped
    proof: tuple[ProofRow, ...] = ()
    remainder_mean_abs: float | None = None  # nats left with every axis pinned
    shares_method: str = ""  # "exact", or "sampled, 200 permutations"
    arms: int = 0
    note: str = ""  # e.g. why there is nothing to attribute


@dataclass(frozen=True, kw_only=True)
class ClosureRow:
    """With every axis pinned: two score sets that must be equal bit for bit. `unequal` is None when it was not run."""

    name: str  # "trainer forward = rollout prefill"
    tokens: int = 0
    unequal: int | None = None
    mean_abs: float | None = None
    max: float | None = None
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.unequal == 0 and self.tokens > 0


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """A check of the measurement itself: the floor, the return of native bits, pins that ran, plants that were seen."""

    name: str
    expected: str
    got: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file of the run folder."""

    path: str
    what: str = ""
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a run has to say."""

    header: Header
    verdict: Verdict
    plants: tuple[PlantInForce, ...] = ()
    gates: tuple[Gate, ...] = ()
    contract: tuple[FieldComparison, ...] = ()
    knobs: tuple[KnobRow, ...] = ()
    axes: tuple[AxisRow, ...] = ()
    measures: tuple[MeasureRow, ...] = ()
    gradients: GradientInfo | None = None
    replay: tuple[ReplayRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    attention_ran: tuple[AttentionRanRow, ...] = ()
    ratios: tuple[RatioRow, ...] = ()
    floors: tuple[FloorRow, ...] = ()
    oracle: tuple[OracleRow, ...] = ()
    attribution: AttributionInfo | None = None
    first_divergence: tuple[DivergenceRow, ...] = ()
    closure: tuple[ClosureRow, ...] = ()
    controls: tuple[ControlRow, ...] = ()
    hints: tuple[Hint, ...] = ()
    budget: tuple[BudgetLine, ...] = ()
    provenance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # trainer | rollout | host -> name -> value
    artifacts: tuple[Artifact, ...] = ()
    reproduce: str = ""  # the command that runs this again
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data, key by key as in docs/report-schema.md."""
        encoded: dict[str, Any] = codec.encode(self)
        return {"schema_version": encoded.pop("schema_version"), **encoded}

    @classmethod
    def from_json(cls, data: Any, *, where: str = "") -> Report:
        """The inverse of `to_json`. Raises UsageError for another schema version and for anything that does not fit."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise UsageError(
                "report-schema-version",
                f"this report has schema version {version}; this program reads {SCHEMA_VERSION}",
                where=where,
                hint="render it with the version of rlmismatch that wrote it",
            )
        try:
            return codec.decode(cls, data)
        except codec.DecodeError as error:
            raise UsageError("report-malformed", str(error), where=where) from None

    @classmethod
    def loads(cls, text: str, *, where: str = "") -> Report:
        """A report from the text of a report.json."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError("report-malformed", f"not JSON: {error.msg} at line {error.lineno}", where=where) from None
        return cls.from_json(data, where=where)

    @property
    def failing_fields(self) -> tuple[FieldComparison, ...]:
        """Contract fields that failed and those that were waived, in contract order. A RECORDED field never stands here."""
        return tuple(c for c in self.contract if c.fails in (Tier.IDENTICAL, Tier.SEMANTIC) or c.outcome is Outcome.WAIVED)

    @property
    def headline(self) -> RatioRow | None:
        """The first ratio that was measured: its worst tokens and per-sequence table are the ones shown."""
        return next((r for r in self.ratios if r.drift is not None), None)
