"""The tables of a report, each from captures: gates, knobs, axes, ratios, floors, closure, first divergence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.arms import ALL, BASE_PINS, BOUNDARY, COMPILE, LOCAL, NATIVE, arm_id, compiled, repeat_id, rollout_paths
from rlmismatch.assemble import gradients
from rlmismatch.assemble.compilation import inert_pins
from rlmismatch.assemble.scores import RATIOS, ScoreBook
from rlmismatch.axes.base import Axis
from rlmismatch.contract import Evidence as Known
from rlmismatch.contract import FieldComparison, Outcome
from rlmismatch.drift import Drift, bit_equal
from rlmismatch.engines.protocol import LocalError, SideName
from rlmismatch.evidence import Evidence, axis_of
from rlmismatch.pins.spec import boundary_names, pin_of_boundary
from rlmismatch.report.model import AxisRow, ClosureRow, DivergenceRow, FloorRow, Gate, KnobRow, MeasureRow, RatioRow

SIDES: Final[tuple[SideName, ...]] = ("trainer", "rollout")
GRADIENT_AXES: Final = ("gemm.dgrad_reduce", "gemm.wgrad_accumulate")


def gates(evidence: Evidence) -> tuple[Gate, ...]:
    """Weights, tokens and mode: what must be equal before any number counts."""
    by_axis = {c.axis: axis_of(evidence.comparisons, c.axis) for c in evidence.comparisons}
    weights = evidence.weight_differences
    names = tuple(f"{name}: {why}" for name, why in weights.items())
    out = [
        _gate("model.tokens", by_axis, unit="sequence", compared=len(evidence.sequences)),
        _gate("model.weights", by_axis, unit="tensor", compared=len(evidence.run["checkpoint"]["digests"]), differing=names),
        _gate("model.mode", by_axis, unit="setting", compared=None),
    ]
    return tuple(out)


def _gate(
    axis: str, by_axis: dict[str, tuple[FieldComparison, ...]], *, unit: str, compared: int | None, differing: tuple[str, ...] = ()
) -> Gate:
    fields = by_axis.get(axis, ())
    failed = [c for c in fields if c.fails]
    unknown = any(c.outcome is Outcome.UNKNOWN for c in failed)
    equal = None if unknown or not fields else not failed and not differing
    waived = [c.field for c in fields if c.outcome is Outcome.WAIVED]
    notes = [f"{c.field}: {c.trainer.source or c.rollout.source}" for c in failed if c.outcome is Outcome.UNKNOWN]
    if waived:
        notes.append(f"not equal, and waived by name: {', '.join(waived)}")
    return Gate(
        name=axis,
        equal=equal,
        compared=compared if compared is not None else sum(c.outcome is Outcome.EQUAL for c in fields),
        unit=unit,
        differing=differing or tuple(c.field for c in failed),
        note="; ".join(notes),
    )


def knobs(evidence: Evidence, book: ScoreBook) -> tuple[KnobRow, ...]:
    """Every knob that was asked for, on each side: requested, actual, status."""
    rows = []
    for side in SIDES:
        native = book.arms[side].get(NATIVE)
        for knob, row in (native.knobs if native else {}).items():
            rows.append(
                KnobRow(
                    knob=knob,
                    side=side,
                    requested=row["requested"],
                    actual=row["actual"],
                    status=row["status"],
                    reason=row.get("reason", ""),
                )
            )
        for knob, value in evidence.settings.knobs_of(side).items():
            if native is None or knob in native.knobs:
                continue
            missing = sorted(p for p in evidence.base_pins if not native.calls.get(p)) if native.arm.pins else []
            held = _held_anyway(knob, str(value), side, evidence)
            rows.append(
                KnobRow(
                    knob=knob,
                    side=side,
                    requested=value,
                    actual="native" if missing else "pinned" if held else value,
                    status="fell_back" if missing or held else "applied",
                    reason=_never_ran(missing) or held,
                )
            )
    return tuple(rows)


def _held_anyway(knob: str, value: str, side: SideName, evidence: Evidence) -> str:
    """Why an operation that a knob wants to be the engine's own is the pin in every arm; "" where it is not, or the knob wants the pin."""
    wants = {pin for (name, other), pins in BASE_PINS.items() if name == knob and other != value for pin in pins}
    if (knob, value) in BASE_PINS or not wants:
        return ""
    held = sorted(wants & evidence.base_pins)
    if held:
        return f"another knob holds the pin {', '.join(held)} in every arm"
    local_cp = side == "trainer" and evidence.settings.cp > 1 and evidence.settings.trainer_spec == "local"
    return "under context parallelism the local layer spec has no attention but the pin" if local_cp and "attention" in wants else ""


def _never_ran(pins: Sequence[str]) -> str:
    return f"pin never ran: {', '.join(pins)}" if pins else ""


@dataclass(frozen=True, kw_only=True)
class Local:
    """The local errors of one axis on both sides."""

    errors: tuple[tuple[SideName, LocalError], ...]

    @property
    def largest(self) -> float | None:
        return max((e.native_vs_pin_max for _, e in self.errors), default=None)


def local(axis: Axis, book: ScoreBook) -> Local:
    """Native against pin on the same captured inputs, for the pins of one axis, every layer, both sides."""
    found = [(side, e) for side in SIDES for e in (book.arms[side][LOCAL].local if LOCAL in book.arms[side] else []) if e.pin in axis.pins]
    return Local(errors=tuple(found))


def axis_rows(
    evidence: Evidence, book: ScoreBook, wanted: Iterable[Axis], measures: Iterable[MeasureRow], *, void: bool
) -> tuple[AxisRow, ...]:
    """One row an axis. `measures`: what was measured beside the arms, which is all the numbers that an axis without a pin has, but for
    the gradient's axes."""
    measured = frozenset(m.axis for m in measures if m.value is not None)
    return tuple(_axis_row(axis, evidence, book, measured, void=void) for axis in wanted)


def _axis_row(axis: Axis, evidence: Evidence, book: ScoreBook, measured: frozenset[str], *, void: bool) -> AxisRow:
    fields = axis_of(evidence.comparisons, axis.id)
    contract = _contract_word(fields)
    evidence_word = _weakest(fields)
    zero = axis.structural_zero(evidence.setup)

    def row(status: str, why: str = "", **numbers: float | None) -> AxisRow:
        ratio = axis.ratio if numbers else ""
        return AxisRow(axis=axis.id, status=status, contract=contract, evidence=evidence_word, why=why, ratio=ratio, **numbers)

    if axis.built == "not_built":
        return row("not built", "not built yet")
    if zero:
        return row("structural zero", zero)
    if axis.built == "contract_only":
        return row("contract only")
    if void:
        return row("not run", "the sides are not comparable")
    if axis.id in GRADIENT_AXES:
        return _gradient_row(axis, evidence, book, row("measured"))
    if not axis.pins:
        return row("measured", "see Measures, all with --verbose") if axis.id in measured else row("not run", _measured_by(axis))
    base, pins = evidence.base_pins, frozenset(axis.pins)
    if pins <= base:
        return row("pinned", "held by a knob in every arm", local=local(axis, book).largest)
    everything = book.pinned(axis.ratio, ALL)
    alone = book.pinned(axis.ratio, base | pins)
    last = book.pinned(axis.ratio, ALL - pins)
    if alone is None and last is None:
        return row("not run", _why_not_run(axis, evidence), local=local(axis, book).largest)
    rest = everything.mean_abs if everything and everything.mean_abs is not None else 0.0
    brought = None if last is None or last.mean_abs is None else last.mean_abs - rest
    return row("measured", local=local(axis, book).largest, alone=alone.mean_abs if alone else None, last=brought)


def _measured_by(axis: Axis) -> str:
    return "needs --compile" if axis.id == COMPILE else f"needs `rlmismatch {axis.family}`"


def _gradient_row(axis: Axis, evidence: Evidence, book: ScoreBook, plain: AxisRow) -> AxisRow:
    """The row of an axis of the backward, whose numbers are of gradients and whose pin is no pin of the forward."""
    found = gradients.numbers(book).get(axis.id)
    if found is None:
        needs = "not measured: --grads" if evidence.settings.command == "gemm" else "needs `rlmismatch gemm --grads`"
        why = "no gradient was taken" if evidence.settings.grads else needs
        return dataclasses.replace(plain, status="not run", why=why)
    held = any(evidence.settings.knobs_of("trainer").get(knob) == values[-1] for knob, values in axis.knobs.items())
    return dataclasses.replace(
        plain,
        status="pinned" if held else "measured",
        why="held by a knob in every pass" if held else "",
        ratio="gradient",
        local=found.local,
        alone=found.alone,
        last=found.last,
    )


def _why_not_run(axis: Axis, evidence: Evidence) -> str:
    if compiled(evidence.settings):
        return "pins are inert under --compile"
    if evidence.settings.command != "probe":
        return "no arm was run"
    return "needs --attribute" if axis.ratio == "trainer/prefill" else f"needs `rlmismatch {axis.family}`"


def _contract_word(fields: Sequence[FieldComparison]) -> str:
    if not fields:
        return ""
    order = (
        (Outcome.CONTRADICTION, "differs"),
        (Outcome.DIFFERS, "differs"),
        (Outcome.UNKNOWN, "unknown"),
        (Outcome.WAIVED, "waived"),
        (Outcome.EQUAL, "equal"),
    )
    said = next((word for outcome, word in order if any(c.outcome is outcome for c in fields)), "")
    # A recorded field that applies to neither side records nothing.
    recorded = any(c.outcome is Outcome.RECORDED and {c.trainer.evidence, c.rollout.evidence} != {Known.NOT_APPLICABLE} for c in fields)
    return said or ("recorded" if recorded else "not applicable")


def _weakest(fields: Sequence[FieldComparison]) -> str:
    """The weakest evidence behind the fields that are compared."""
    order = (Known.UNKNOWN, Known.DECLARED, Known.DOCUMENTED, Known.READ)
    compared = [c for c in fields if c.outcome not in (Outcome.RECORDED, Outcome.NOT_APPLICABLE)]
    seen = {reading.evidence for c in compared or fields for reading in (c.trainer, c.rollout)}
    return next((e.value for e in order if e in seen), "")


def ratios(evidence: Evidence, book: ScoreBook, *, void: bool) -> tuple[RatioRow, ...]:
    rows = []
    for name, _, (_, second) in RATIOS:
        if second == "paged" and second not in rollout_paths(evidence.settings):
            continue  # a form of one family's command
        drift = None if void else book.drift(name)
        why = ""
        if void:
            why = "not comparable: numbers are void"
        elif drift is None:
            why = "no log-probs were recorded" if second == "recorded" else "not taken"
        rows.append(RatioRow(name=name, drift=_decoded(drift, evidence), why=why, note=_benign(evidence, book, second, drift)))
    return tuple(rows)


def _benign(evidence: Evidence, book: ScoreBook, path: str, drift: Drift | None) -> str:
    """Why two forms of one rollout that differ break nothing: pinned they are equal, so what differs is kernels and row counts."""
    if drift is None or not drift.unequal or path not in ("chunked", "paged", "decode") or evidence.broken:
        return ""
    arm = arm_id(ALL, evidence.base_pins)
    pinned = book.aligned(book.get("rollout", arm, "prefill"), book.get("rollout", arm, path))
    if pinned is None or pinned.invalid or bool((pinned.delta_N != 0).any()):
        return ""
    return "no breach of the contract: with every axis pinned the two forms are bit-equal, so other kernels or row counts differ"


def _decoded(drift: Drift | None, evidence: Evidence) -> Drift | None:
    table = evidence.token_texts
    if drift is None or not table:
        return drift
    return drift.decoded(lambda ids: "".join(table.get(str(i), "�") for i in ids))


def floors(evidence: Evidence, book: ScoreBook) -> tuple[FloorRow, ...]:
    """Each side against its own repeats: the largest of them."""
    rows = []
    forms = [("rollout", path) for path in ("prefill", "decode") if path in rollout_paths(evidence.settings)]
    for side, path in (("trainer", "forward"), *forms):
        name: SideName = "trainer" if side == "trainer" else "rollout"
        repeats = [book.get(name, repeat_id(n), path) for n in range(1, evidence.settings.repeat)]
        native = book.get(name, NATIVE, path)
        aligned = [x for x in (book.aligned(native, r) for r in repeats) if x is not None]
        drifts = [book.summary(x) for x in aligned]
        worst = max(drifts, key=lambda d: d.mean_abs if d.mean_abs is not None else float("inf"), default=None)
        rows.append(FloorRow(side=name, path=path, drift=worst, repeats=len(drifts) + 1, why="" if drifts else "not repeated"))
    return tuple(rows)


def closure(evidence: Evidence, book: ScoreBook) -> tuple[ClosureRow, ...]:
    """With every pin in force: four score sets of two engines that must be one, bit for bit."""
    arm = arm_id(ALL, evidence.base_pins)
    forward = book.get("trainer", arm, "forward")
    rows = []
    inert = inert_pins(evidence, book)
    for path in rollout_paths(evidence.settings):
        aligned = book.aligned(forward, book.get("rollout", arm, path))
        name = f"trainer forward = rollout {path}"
        if inert:
            rows.append(ClosureRow(name=name, why=f"not claimed: compiled code never calls {', '.join(inert)}"))
            continue
        if aligned is None:
            rows.append(ClosureRow(name=name, why="not run"))
            continue
        drift = book.summary(aligned)
        unequal = int(aligned.tokens - bit_equal(aligned).sum()) if not aligned.invalid else None
        why = aligned.invalid[0].text if aligned.invalid else ""
        rows.append(ClosureRow(name=name, tokens=aligned.tokens, unequal=unequal, mean_abs=drift.mean_abs, max=drift.max, why=why))
    return tuple(rows)


def first_divergence(evidence: Evidence, book: ScoreBook) -> tuple[DivergenceRow, ...]:
    """Op boundaries in order of execution at which the two native ops part although their inputs are equal bit for bit."""
    arms = [book.arms[side].get(BOUNDARY) for side in SIDES]
    if arms[0] is None or arms[1] is None:
        return ()
    trainer, rollout = arms[0].boundaries, arms[1].boundaries
    errors = (
        {(side, e.boundary): e for side in SIDES for e in book.arms[side][LOCAL].local} if all(LOCAL in book.arms[s] for s in SIDES) else {}
    )
    rows: list[DivergenceRow] = []
    for name in boundary_names(evidence.run["checkpoint"]["num_layers"]):
        a, b = trainer.get(name), rollout.get(name)
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            raise ValueError(f"{name}: the trainer's output is {tuple(a.shape)}, the rollout's {tuple(b.shape)}")
        difference = (a.to(torch.float64) - b.to(torch.float64)).abs()
        unequal = int((a != b).sum())
        means = [errors[s, name].native_vs_fp64_mean if (s, name) in errors else None for s in SIDES]
        rows.append(
            DivergenceRow(
                boundary=name,
                pin=pin_of_boundary(name),
                count=a.numel(),
                unequal=unequal,
                max_abs=float(difference.max()) if a.numel() else None,
                trainer_error=means[0],
                rollout_error=means[1],
                first=unequal > 0 and not any(r.first for r in rows),
            )
        )
    return tuple(rows)
