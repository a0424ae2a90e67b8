"""Captures to report: a pure function of a run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from rlmismatch import attribution, axes, verdict
from rlmismatch.arms import COMPILE, NATIVE
from rlmismatch.assemble import (
    attention,
    attention_backends,
    attention_lse,
    attention_ran,
    attention_trainer,
    compilation,
    controls,
    flips,
    gemm,
    gradients,
    head,
    logprob,
    notes,
    rows,
)
from rlmismatch.assemble.defects import defects, over_limit
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst
from rlmismatch.axes.base import Axis
from rlmismatch.checkpoint import combine_digests
from rlmismatch.contract import Reading
from rlmismatch.drift import Budget, OracleError, against_oracle, signatures
from rlmismatch.drift.budget import RECORDED
from rlmismatch.evidence import Evidence, SideEvidence, wanted_axes
from rlmismatch.report.model import (
    Artifact,
    AttributionInfo,
    Header,
    MeasureRow,
    OracleRow,
    PlantInForce,
    Player,
    ProofRow,
    RatioRow,
    Report,
    SideInfo,
)
from rlmismatch.settings import split_plant

# What each family makes of its probes' captures.
_MEASURES: Final = (
    flips.measures,
    gemm.measures,
    gradients.measures,
    attention.measures,
    attention_backends.measures,
    attention_lse.measures,
    attention_trainer.measures,
    logprob.measures,
    compilation.measures,
)
_NAMES: Final[Mapping[str, str]] = {"megatron": "megatron-core", "vllm": "vllm", "oracle": "transformers"}


def report(folder: Path, *, budget: Sequence[str] = (), fail_on: str | None = None, waive: Sequence[str] = ()) -> Report:
    """The report of the run in `folder`. The keyword arguments replace (or, for waivers, join) what the run was started with."""
    with _one_thread():
        return _report(folder, budget=budget, fail_on=fail_on, waive=waive)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small tensors are slower on many threads: seconds became a minute where 32 shared their cores with the engines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(folder: Path, *, budget: Sequence[str], fail_on: str | None, waive: Sequence[str]) -> Report:
    evidence = Evidence(folder)
    overrides = {"budget": tuple(budget), "fail_on": fail_on, "waive": (*evidence.settings.waive, *waive) if waive else ()}
    evidence = Evidence(folder, overrides=overrides)
    book = ScoreBook(evidence)
    void = bool(evidence.void)
    wanted = wanted_axes(evidence.settings)
    floors = () if void else rows.floors(evidence, book)
    closed = () if void else rows.closure(evidence, book)
    behaved = (
        ()
        if void
        else (
            *controls.controls(evidence, book, floors, closed),
            *gradients.controls(evidence, book),
            *gemm.controls(evidence, book),
            *flips.controls(book),
        )
    )
    ratios = rows.ratios(evidence, book, void=void)
    errors = {} if void else oracle_errors(evidence, book)
    limits = Budget.parse(*evidence.settings.budget)
    drifts = {r.name: r.drift for r in ratios}
    lines = () if void else limits.check(drifts.get("trainer/prefill"), oracle=errors, recorded=drifts.get(RECORDED))
    knobs = rows.knobs(evidence, book)
    gates = rows.gates(evidence)
    measured = (
        () if void else _spoken_of((*head.measures(evidence), *(row for family in _MEASURES for row in family(evidence, book))), wanted)
    )
    # An all-reduce that is wrong is the cause of every wrong sum and product behind it.
    summed = over_limit(m for m in measured if m.axis == gemm.BACKEND)
    other = over_limit(m for m in measured if m.axis != gemm.BACKEND)
    found: tuple[verdict.Defect, ...] = () if void else (*summed, *defects(evidence, book), *other)
    plants = _plants(evidence)
    aligned = None if void else book.ratio("trainer/prefill")
    hints = (
        ()
        if aligned is None or aligned.invalid
        else signatures(aligned, tp=max(evidence.settings.trainer_tp, evidence.settings.rollout_tp))
    )
    hints = (*hints, *attention.notices(evidence))
    judged = verdict.judge(
        verdict.Facts(
            comparisons=evidence.comparisons,
            gates=gates,
            knobs=knobs,
            controls=behaved,
            budget=lines,
            drift=None if void else book.drift("trainer/prefill"),
            defects=found,
            promises=() if void else gemm.broken_promises(evidence, book),
            signatures=hints,
            plants=plants,
            fail_on=evidence.settings.fail_on,
        )
    )
    return Report(
        header=_header(evidence),
        verdict=judged,
        plants=plants,
        gates=gates,
        contract=evidence.comparisons,
        knobs=knobs,
        axes=rows.axis_rows(evidence, book, wanted, measured, void=void),
        measures=measured,
        gradients=None if void else gradients.info(evidence, book),
        replay=() if void else gemm.replay(book),
        collectives=() if void else gemm.collectives(book),
        attention_ran=attention_ran.rows(evidence) if any(axis.id == "attention.provenance" for axis in _asked(evidence, wanted)) else (),
        ratios=(*ratios, *_oracle_ratios(errors, evidence, book, void=void)),
        floors=floors,
        oracle=tuple(_oracle_row(side, error) for side, error in errors.items()),
        attribution=_attribution(evidence, book, void=void),
        first_divergence=rows.first_divergence(evidence, book),
        closure=closed,
        controls=behaved,
        hints=hints,
        budget=lines,
        provenance=_provenance(evidence),
        artifacts=(Artifact(path=str(folder), what="captures, logs and report"),),
        reproduce=evidence.run["command_line"],
        notes=notes.notes(evidence, book),
    )


def _asked(evidence: Evidence, wanted: Sequence[Axis]) -> Sequence[Axis]:
    """The axes that a person asked for: those of a family's command, or by name."""
    return wanted if evidence.settings.command != "probe" or evidence.settings.axis else ()


def _spoken_of(measured: Iterable[MeasureRow], wanted: Sequence[Axis]) -> tuple[MeasureRow, ...]:
    """The rows of the axes that this command speaks of, and any other one that is over its limit."""
    names = {axis.id for axis in wanted}
    return tuple(row for row in measured if row.axis in names or row.axis == COMPILE or not row.ok)


def oracle_errors(evidence: Evidence, book: ScoreBook) -> dict[str, OracleError]:
    """Each side's native error against the oracle; empty without one."""
    truth, plain = book.oracle("oracle"), book.oracle("plain")
    if truth is None:
        return {}
    sides = {"trainer": book.get("trainer", NATIVE, "forward"), "rollout": book.get("rollout", NATIVE, "prefill")}
    return {
        side: against_oracle(scores, truth, plain, evidence.sequences, seed=evidence.settings.seed)
        for side, scores in sides.items()
        if scores is not None
    }


def _oracle_ratios(errors: Mapping[str, OracleError], evidence: Evidence, book: ScoreBook, *, void: bool) -> tuple[RatioRow, ...]:
    why = "not comparable: numbers are void" if void else "no oracle was run"
    out = [
        RatioRow(name=f"{side}/oracle", drift=errors[side].drift) if side in errors else RatioRow(name=f"{side}/oracle", why=why)
        for side in ("trainer", "rollout")
    ]
    plain = None if void else book.aligned(book.oracle("plain"), book.oracle("oracle"))
    out.append(RatioRow(name="plain/oracle", drift=book.summary(plain) if plain else None, why="" if plain else why))
    return tuple(out)


def _oracle_row(side: str, error: OracleError) -> OracleRow:
    return OracleRow(
        side=side, mean_abs=error.drift.mean_abs, plain_mean_abs=error.plain_mean_abs, ratio=error.ratio, why=error.why_no_ratio
    )


def _plants(evidence: Evidence) -> tuple[PlantInForce, ...]:
    out = []
    for text in evidence.settings.plant:
        name, side = split_plant(text)
        _, plant = axes.plant(name, side)
        out.append(PlantInForce(id=name, side=side, what=plant.what, expected=plant.verdict))
    return tuple(out)


def _header(evidence: Evidence) -> Header:
    run, checkpoint = evidence.run, evidence.run["checkpoint"]
    sides = []
    for name in ("trainer", "rollout", "oracle"):
        side = evidence.side(name)
        if side is None:
            continue
        c = side.config
        sides.append(
            SideInfo(
                side=name,
                engine=_NAMES[c.engine],
                version=str(side.provenance.get("versions", {}).get(_NAMES[c.engine]) or ""),
                tp=c.tp,
                sp=c.sp,
                cp=c.cp,
                dtype=c.oracle_dtype if name == "oracle" else c.dtype,
                device=c.device,
                impl="" if name == "oracle" else c.impl,
                detail=_detail(name, side),
            )
        )
    return Header(
        command=run["command_line"],
        run_id=evidence.folder.name,
        date=run["started"],
        checkpoint=checkpoint["path"],
        checkpoint_digest=combine_digests(checkpoint["digests"]),
        architecture=checkpoint["architecture"],
        sides=tuple(sides),
        sequences=len(evidence.sequences),
        tokens=sum(len(s.response_ids) for s in evidence.sequences),
        tool_version=run["tool_version"],
        seconds=run["seconds"],
    )


def _detail(name: str, side: SideEvidence) -> str:
    """Whether ranks share a GPU, the layer spec, and the attention that ran."""
    ran = side.readings.get("attention.provenance", {}).get("actual_backend", Reading()).value
    spec = f"{side.config.trainer_spec} spec" if name == "trainer" else ""
    return ", ".join(filter(None, (side.config.sharing, spec, str(ran) if ran else "")))


def _attribution(evidence: Evidence, book: ScoreBook, *, void: bool) -> AttributionInfo | None:
    if not evidence.settings.attribute:
        return None
    if void or evidence.broken:
        keys = ", ".join(c.key for c in evidence.broken[:3])
        return AttributionInfo(note=f"not run: the contract is broken ({keys}); a broken contract is no rounding to be shared out")
    floor, seed = book.floor(), evidence.settings.seed
    found = attribution.attribute(book.drift_table(), evidence.players(), floor=floor, seed=seed, local=_boundary_errors(evidence, book))
    players = tuple(
        Player(
            pin=p.pin,
            axis=axes.PLAYERS[p.pin],
            role=p.role,
            alone=p.alone,
            last=p.last,
            share=p.share,
            share_interval=p.share_interval,
            share_error=p.share_error,
            why=_role_words(p),
        )
        for p in found.players
    )
    proof = []
    if found.fix_drift is not None:
        proof.append(_proof(found.fix_set, "", found.fix_drift))
        proof += [_proof(tuple(p for p in found.fix_set if p != d.pin), d.pin, d.drift) for d in found.drops]
    method = "" if found.share_orders is None else "exact" if found.share_orders == 0 else f"sampled, {found.share_orders} orders"
    return AttributionInfo(
        native_mean_abs=found.native.mean_abs,
        native_tokens=found.native.tokens,
        signed_mean=found.native.signed_mean,
        players=players,
        fix_set=found.fix_set,
        zero_set=found.zero_set,
        proved=found.proved,
        proof=tuple(proof),
        remainder_mean_abs=found.remainder.mean_abs,
        shares_method=method,
        arms=found.arms,
        note=_attribution_note(found, evidence),
    )


_ROLES: Final[Mapping[str, str]] = {
    "fix set": "",
    "zero set": "",
    "interchangeable": "can stand in for",
    "local error": "brings nothing back, but its op differs on equal inputs",
    "not needed": "brings drift back, but the gap closes without it",
}


def _role_words(player: attribution.Player) -> str:
    return " ".join(filter(None, (_ROLES[player.role], ", ".join(player.stands_in_for))))


def _boundary_errors(evidence: Evidence, book: ScoreBook) -> dict[str, float | None]:
    """Pin -> largest difference between the two native ops on equal inputs, over all layers."""
    out: dict[str, float | None] = {}
    for row in rows.first_divergence(evidence, book):
        out[row.pin] = worst((out.get(row.pin) or 0.0, row.max_abs or 0.0))
    return out


def _proof(pins: tuple[str, ...], dropped: str, drift: attribution.Summary) -> ProofRow:
    return ProofRow(pins=pins, dropped=dropped, tokens=drift.tokens, unequal=drift.unequal, mean_abs=drift.mean_abs, max=drift.max_abs)


def _attribution_note(found: attribution.Attribution, evidence: Evidence) -> str:
    if found.status == "no drift":
        return "the engines agree as they are: nothing to attribute"
    if found.status == "unexplained":
        return "all pins together leave about as much as none: the cause is no axis that can be pinned here"
    notes = (
        []
        if found.closed
        else [f"all pins leave {found.remainder.mean_abs:.3g} nats: an axis is missing; the fix set reaches that remainder, not zero"]
    )
    silent = [f"{pin} ({reason})" for pin, reason in _silent_pins(evidence).items()]
    if silent:
        notes.append("structural zero: " + ", ".join(silent))
    return "; ".join(notes)


def _silent_pins(evidence: Evidence) -> dict[str, str]:
    """Pins that cannot make a difference in this set-up, and why."""
    out = {}
    for pin, axis in axes.PLAYERS.items():
        if pin not in evidence.players() and pin not in evidence.base_pins:
            out[pin] = axes.by_id(axis).structural_zero(evidence.setup) or "not built"
    return out


def _provenance(evidence: Evidence) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name in ("trainer", "rollout", "oracle"):
        side = evidence.side(name)
        if side is not None:
            out[name] = side.provenance
    out["host"] = evidence.run["host"]
    return out
