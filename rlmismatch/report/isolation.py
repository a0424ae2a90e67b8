"""The sections of a page that say which axis moved the number: attribution, closure, first divergence, the axes."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from rlmismatch.report.blocks import Block, Cell, Column, Item, Items, Lines, Pairs, Section, Style, Table, cell
from rlmismatch.report.cells import NATS, nats, numeric, unequal
from rlmismatch.report.model import AttributionInfo, AxisRow, Player, Report
from rlmismatch.report.numbers import NOT_MEASURED, number, percent, plural

DIVERGING_SHOWN: Final = 6
ALONE_LAST: Final = "alone: drift left when only this is pinned; last: drift that comes back when only this is released"
GRADIENT_UNIT: Final = "of a gradient: relative L2 of the native one against the pinned one, in the place of nats"
# How the groups of axes without numbers are headed, in order.
GROUPS: Final = ("differs", "unknown", "measured", "pinned", "equal", "contract only", "structural zero", "not run", "not built")


def attribution(a: AttributionInfo, verbose: bool) -> Section:
    note = f"{a.ratio}, {plural(a.arms, 'arm')}" + (f", shares {a.shares_method}" if a.shares_method else "")
    if a.native_mean_abs is None:
        return Section(title="Attribution", blocks=(Lines(lines=(cell(a.note or "not run"),)),))
    pairs: list[tuple[str, Cell]] = [
        ("native drift", cell(f"{number(a.native_mean_abs)} nats mean abs over {plural(a.native_tokens, 'token')}")),
        ("bias", cell(f"{number(a.signed_mean, signed=True)} nats, split off before the shares")),
    ]
    if a.fix_set:
        proof = "proved by its own run" if a.proved else "NOT PROVED"
        pairs.append(("fix set", Cell(text=f"{', '.join(a.fix_set)}   ({proof})", style="strong" if a.proved else "warn")))
    if a.zero_set:
        pairs.append(("zero set", cell(f"{', '.join(a.zero_set)}   (bring back exactly nothing)")))
    pairs.append(("remainder", Cell(text=_remainder(a), style="good" if a.remainder_mean_abs == 0 else "warn")))
    if a.note:
        pairs.append(("note", cell(a.note)))
    blocks: list[Block] = [Pairs(pairs=tuple(pairs))]
    shown = [p for p in a.players if verbose or p.role != "zero set"]
    if shown:
        blocks += [_players(shown), Lines(lines=(cell(ALONE_LAST, "dim"),))]
    if a.proof:
        blocks.append(_proof(a))
    return Section(title="Attribution", blocks=tuple(blocks), note=note)


def _remainder(a: AttributionInfo) -> str:
    if a.remainder_mean_abs is None:
        return NOT_MEASURED
    return (
        "0: with every axis pinned the engines agree to the bit"
        if a.remainder_mean_abs == 0
        else f"{number(a.remainder_mean_abs)} nats with every axis pinned"
    )


def _players(players: list[Player]) -> Table:
    columns = (
        Column(header="pin"),
        Column(header="axis", flexible=True),
        Column(header="share", unit="of mean d²"),
        numeric("alone", NATS),
        numeric("last", NATS),
        Column(header="role", flexible=True),
    )
    styles: dict[str, Style] = {"fix set": "strong", "zero set": "dim"}
    rows = tuple(
        (Cell(text=p.pin, style=styles.get(p.role, "")), cell(p.axis), _share(p), nats(p.alone), nats(p.last), cell(_role(p), "dim"))
        for p in sorted(players, key=lambda p: (p.role != "fix set", p.role == "zero set", -(p.share or 0.0), -(p.last or 0.0)))
    )
    return Table(columns=columns, rows=rows)


def _role(p: Player) -> str:
    return f"{p.role}: {p.why}" if p.why else p.role


def _share(p: Player) -> Cell:
    if p.share is None:
        return cell(NOT_MEASURED, "dim")
    spread = ""
    if p.share_interval is not None:
        spread = f" ({round(100 * p.share_interval.low)}–{round(100 * p.share_interval.high)})"
    elif p.share_error is not None:
        spread = f" ± {100 * p.share_error:.1f}"
    return Cell(text=f"{percent(p.share):>6}{spread}", bar=min(1.0, max(0.0, p.share)))


def _proof(a: AttributionInfo) -> Table:
    columns = (Column(header="pinned on both sides"), numeric("unequal", "tokens"), numeric("mean abs", NATS), numeric("max", NATS))
    rows = tuple(
        (
            Cell(text=f"fix set without {p.dropped}" if p.dropped else "fix set", style="" if p.dropped else "strong"),
            unequal(p.unequal, p.tokens),
            nats(p.mean_abs),
            nats(p.max),
        )
        for p in a.proof
    )
    return Table(columns=columns, rows=rows)


def closure(report: Report) -> Section | None:
    if not report.closure:
        return None
    columns = (Column(header="pair", flexible=True), numeric("unequal", "tokens"), numeric("mean abs", NATS), numeric("max", NATS))
    ran = tuple(
        (cell(c.name), unequal(c.unequal, c.tokens), nats(c.mean_abs), nats(c.max)) for c in report.closure if c.unequal is not None
    )
    skipped = tuple(Item(mark="dim", head=c.name, tail=c.why) for c in report.closure if c.unequal is None)
    blocks: list[Block] = [Table(columns=columns, rows=ran)] if ran else []
    if skipped:
        blocks.append(Items(items=skipped))
    closed = sum(c.ok for c in report.closure)
    return Section(title="Closure", note=f"every axis pinned; {closed} of {len(report.closure)} bit-equal", blocks=tuple(blocks))


def divergence(report: Report, verbose: bool) -> Section | None:
    if not report.first_divergence:
        return None
    columns = (
        Column(header="op boundary"),
        Column(header="pin"),
        numeric("unequal", "elements"),
        numeric("max", "between"),
        numeric("trainer", "to float64"),
        numeric("rollout", "to float64"),
    )
    diverging = [r for r in report.first_divergence if r.unequal]
    shown = report.first_divergence if verbose else diverging[:DIVERGING_SHOWN]
    rows = tuple(
        (
            Cell(text=r.boundary + ("  ← first" if r.first else ""), style="bad" if r.first else ""),
            cell(r.pin),
            unequal(r.unequal, r.count),
            nats(r.max_abs),
            nats(r.trainer_error),
            nats(r.rollout_error),
        )
        for r in shown
    )
    note = f"native ops on equal inputs, in the op's own unit; {len(diverging)} of {len(report.first_divergence)} diverge"
    return Section(title="First divergence", note=note, blocks=(Table(columns=columns, rows=rows),) if rows else ())


def axes(report: Report) -> Section | None:
    if not report.axes:
        return None
    if len({a.axis.partition(".")[0] for a in report.axes} - {"rollout"}) == 1:  # one family, and what of the rollout belongs to it
        return _every_axis(report)
    measured = [a for a in report.axes if (a.local, a.alone, a.last) != (None, None, None)]
    blocks: list[Block] = []
    if measured:
        columns = (
            Column(header="axis"),
            Column(header="contract"),
            numeric("local", "op unit"),
            numeric("alone", NATS),
            numeric("last", NATS),
            Column(header="speaks of"),
            Column(header="", flexible=True),
        )
        rows = tuple(
            (cell(a.axis), _contract_word(a), nats(a.local), nats(a.alone), nats(a.last), cell(a.ratio), cell(a.why, "dim"))
            for a in measured
        )
        notes = [ALONE_LAST, *([GRADIENT_UNIT] if any(a.ratio == "gradient" for a in measured) else [])]
        blocks += [Table(columns=columns, rows=rows), Lines(lines=tuple(cell(note, "dim") for note in notes))]
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for a in report.axes:
        if a not in measured:
            groups[a.status][a.why].append(a.axis)
    ordered = sorted(groups, key=lambda status: GROUPS.index(status) if status in GROUPS else -1)
    if ordered:
        blocks.append(Pairs(pairs=tuple((status, _group(status, groups[status])) for status in ordered)))
    return Section(title="Axes", note=f"{len(measured)} of {len(report.axes)} have numbers in this run", blocks=tuple(blocks))


def _every_axis(report: Report) -> Section:
    """A row for each axis of a family, with or without numbers, and below them why a row has none."""
    columns = (
        Column(header="axis"),
        Column(header="status"),
        Column(header="contract"),
        Column(header="known"),
        numeric("local", "op unit"),
        numeric("alone", NATS),
        numeric("last", NATS),
    )
    rows = tuple(
        (cell(a.axis), cell(a.status), _contract_word(a), cell(a.evidence, "dim"), nats(a.local), nats(a.alone), nats(a.last))
        for a in report.axes
    )
    ratios = sorted({a.ratio for a in report.axes if a.ratio})
    drifts = [ratio for ratio in ratios if ratio != "gradient"]
    notes = [f"{ALONE_LAST}; both speak of {', '.join(drifts)}" if drifts else ALONE_LAST]
    notes += [GRADIENT_UNIT] if "gradient" in ratios else []
    blocks: list[Block] = [Table(columns=columns, rows=rows), Lines(lines=tuple(cell(note, "dim") for note in notes))]
    if reasons := tuple((a.axis, cell(a.why, "dim")) for a in report.axes if a.why):
        blocks.append(Pairs(pairs=reasons))
    numbers = sum((a.local, a.alone, a.last) != (None, None, None) or a.status == "measured" for a in report.axes)
    return Section(title="Axes", note=f"{numbers} of {len(report.axes)} have numbers in this run", blocks=tuple(blocks))


def _group(status: str, reasons: dict[str, list[str]]) -> Cell:
    styles: dict[str, Style] = {"differs": "bad", "unknown": "bad", "equal": ""}
    text = "; ".join(", ".join(names) + (f" ({why})" if why else "") for why, names in reasons.items())
    return Cell(text=text, style=styles.get(status, "dim"))


def _contract_word(a: AxisRow) -> Cell:
    styles: dict[str, Style] = {"equal": "good", "differs": "bad", "unknown": "bad", "waived": "warn"}
    return Cell(text=a.contract or NOT_MEASURED, style=styles.get(a.contract, "dim"))
