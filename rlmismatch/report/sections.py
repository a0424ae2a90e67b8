"""From a Report to a Page: what is shown, in which order and in which words. Every renderer shows the same page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from rlmismatch.contract import Evidence, FieldComparison, Outcome, Reading, Tier
from rlmismatch.report import measures
from rlmismatch.report.blocks import Block, Cell, Column, Headline, Item, Items, Lines, Page, Pairs, Section, Style, Table, cell
from rlmismatch.report.model import Gate, KnobRow, Report, SideInfo
from rlmismatch.report.numbers import NOT_MEASURED, plural, shorten, value
from rlmismatch.verdict.model import Reason

SHOWN_NAMES: Final = 8  # names listed before "and N more"
KNOWN: Final = {
    Evidence.READ: "read",
    Evidence.DOCUMENTED: "doc",
    Evidence.DECLARED: "declared",
    Evidence.NOT_APPLICABLE: "n/a",
    Evidence.UNKNOWN: "?",
}
OUTCOME_STYLES: Final[dict[Outcome, Style]] = {
    Outcome.EQUAL: "good",
    Outcome.DIFFERS: "bad",
    Outcome.UNKNOWN: "bad",
    Outcome.CONTRADICTION: "bad",
    Outcome.WAIVED: "warn",
}
VOID: Final = "The two sides are not comparable: numbers are void and not shown."


def page(report: Report, *, verbose: bool = False, provenance: bool = False) -> Page:
    """The report as a page. verbose adds contract fields that hold, knobs and controls that behaved, and all `provenance`."""
    sections = [
        _run(report),
        _gates(report),
        _contract(report, verbose),
        _knobs(report, verbose),
        *([] if report.verdict.numbers_void else measures.sections(report, verbose=verbose)),
        _controls(report, verbose),
        _provenance(report) if verbose or provenance else None,
        _files(report, verbose),
    ]
    return Page(
        title=f"rlmismatch {report.header.tool_version}".strip(),
        banner=tuple(_plant_line(p.id, p.side, p.what, p.expected) for p in report.plants),
        headline=_headline(report),
        sections=tuple(s for s in sections if s is not None),
    )


def verdict_style(exit_code: int) -> Style:
    return "good" if exit_code == 0 else "warn" if exit_code in (5, 7) else "bad"


def _plant_line(plant: str, side: str, what: str, expected: str) -> str:
    return f"PLANT IN FORCE  {plant}@{side}: {what}" + (f" (must get: {expected})" if expected else "")


def _headline(report: Report) -> Headline:
    verdict = report.verdict
    hints = [r.hint for r in verdict.reasons]
    why = [_reason(r, verdict_style(verdict.exit_code), new=r.hint not in hints[:i]) for i, r in enumerate(verdict.reasons)]
    if verdict.exit_code == 0:
        why.insert(0, Item(mark="good", head=_all_well(report)))
    if verdict.numbers_void:
        why.append(Item(mark="dim", head=VOID))
    return Headline(word=verdict.word, exit_code=verdict.exit_code, style=verdict_style(verdict.exit_code), why=tuple(why))


def _reason(reason: Reason, style: Style, *, new: bool) -> Item:
    """One reason; its hint unless another reason has given it already."""
    where = " ".join(filter(None, (reason.axis, f"({reason.tier})" if reason.tier else "")))
    return Item(
        mark="bad" if style == "bad" and reason.kind != "warning" else "warn",
        lead=where,
        head=reason.text,
        details=(("→", reason.hint),) if reason.hint and new else (),
    )


def _all_well(report: Report) -> str:
    held = sum(c.outcome is Outcome.EQUAL for c in report.contract)
    parts = [f"{plural(held, 'contract field')} equal", f"{plural(report.header.tokens, 'token')} compared"]
    if report.budget:
        parts.append(f"{sum(line.ok for line in report.budget)} of {plural(len(report.budget), 'limit')} held")
    if report.controls:
        parts.append(f"{sum(c.ok for c in report.controls)} of {plural(len(report.controls), 'control')} behaved")
    return ", ".join(parts)


def _run(report: Report) -> Section:
    h = report.header
    model = " ".join(filter(None, (h.checkpoint, h.architecture, f"sha256 {h.checkpoint_digest[:12]}" if h.checkpoint_digest else "")))
    size = f"{plural(h.tokens, 'token')} of {plural(h.sequences, 'sequence')}"
    pairs = [("checkpoint", cell(model)), ("scored", cell(size))]
    pairs += [(side.side, cell(_side(side))) for side in h.sides]
    taken = f", {h.seconds:.0f} s" if h.seconds is not None else ""
    pairs.append(("run", cell(f"{h.run_id}, {h.date}{taken}")))
    return Section(title="Run", blocks=(Pairs(pairs=tuple(pairs)),))


def _side(side: SideInfo) -> str:
    layout = f"TP{side.tp}" + ("+SP" if side.sp else "") + (f" CP{side.cp}" if side.cp > 1 else "")
    pins = f"pins {side.impl}" if side.impl else ""
    return ", ".join(filter(None, (f"{side.engine} {side.version}", layout, side.dtype, side.device, side.detail, pins)))


def _gates(report: Report) -> Section | None:
    if not report.gates:
        return None
    return Section(title="Gates", blocks=(Items(items=tuple(_gate(g) for g in report.gates)),))


def _gate(gate: Gate) -> Item:
    if gate.equal is None:
        return Item(mark="warn", head=gate.name, tail=f"not established: {gate.note or 'no evidence'}")
    note = f"; {gate.note}" if gate.note else ""
    compared = plural(gate.compared, gate.unit)
    if gate.differing or not gate.equal:
        details = (("", listed(gate.differing)),) if gate.differing else ()
        return Item(mark="bad", head=gate.name, tail=f"{len(gate.differing) or 'some'} differ, {compared} compared{note}", details=details)
    if not gate.compared:
        return Item(mark="warn", head=gate.name, tail=f"nothing was compared{note}")
    if note:  # what was waived is not equal
        return Item(mark="warn", head=gate.name, tail=f"{compared} compared{note}")
    return Item(mark="good", head=gate.name, tail=f"{compared} equal")


def listed(names: Iterable[str], limit: int = SHOWN_NAMES) -> str:
    """``a, b, c and 4 more``."""
    every = tuple(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def _contract(report: Report, verbose: bool) -> Section | None:
    if not report.contract:
        return None
    outcomes = Counter(c.outcome for c in report.contract)
    note = ", ".join(f"{outcomes[o]} {outcome_text(o)}" for o in Outcome if outcomes[o])
    failing = report.failing_fields
    blocks: list[Block] = []
    if failing:
        blocks.append(Items(items=tuple(_field(c) for c in failing)))
    else:
        blocks.append(Lines(lines=(cell("every field that must agree does", "good"),)))
    if verbose:
        blocks.append(_contract_table(report.contract))
    return Section(title="Contract", note=note, blocks=tuple(blocks))


def _field(c: FieldComparison) -> Item:
    details = tuple((side, f"{reading_text(r)}  {_source(r)}".rstrip()) for side, r in (("trainer", c.trainer), ("rollout", c.rollout)))
    return Item(mark="warn" if c.fails is None else "bad", head=c.key, tail=f"{c.tier.value}, {c.outcome.value}", details=details)


def reading_text(r: Reading) -> str:
    """The value, or the word for having none."""
    if r.evidence is Evidence.UNKNOWN:
        return "unknown"
    return "n/a" if r.evidence is Evidence.NOT_APPLICABLE else value(r.value)


def _source(r: Reading) -> str:
    known = "" if r.evidence in (Evidence.UNKNOWN, Evidence.NOT_APPLICABLE) else r.evidence.value
    source = shorten(r.source, 160)
    return f"({': '.join(filter(None, (known, source)))})" if known or source else ""


def _contract_table(contract: tuple[FieldComparison, ...]) -> Table:
    columns = (
        Column(header="field"),
        Column(header="tier"),
        Column(header="trainer", flexible=True),
        Column(header="rollout", flexible=True),
        Column(header="known"),
        Column(header="outcome"),
    )
    rows: list[tuple[Cell, ...]] = []
    for axis in dict.fromkeys(c.axis for c in contract):
        rows.append((cell(axis, "strong"), *(cell("") for _ in columns[1:])))
        rows += [_contract_row(c) for c in contract if c.axis == axis]
    return Table(columns=columns, rows=tuple(rows))


def _contract_row(c: FieldComparison) -> tuple[Cell, ...]:
    known = dict.fromkeys(KNOWN[r.evidence] for r in (c.trainer, c.rollout))
    return (
        cell(f"  {c.field}"),
        cell(c.tier.value, "dim" if c.tier is Tier.RECORDED else ""),
        cell(reading_text(c.trainer)),
        cell(reading_text(c.rollout)),
        cell("/".join(known), "dim"),
        cell(outcome_text(c.outcome), OUTCOME_STYLES.get(c.outcome, "dim")),
    )


def outcome_text(outcome: Outcome) -> str:
    return "n/a" if outcome is Outcome.NOT_APPLICABLE else outcome.value


def _knobs(report: Report, verbose: bool) -> Section | None:
    shown = [k for k in report.knobs if verbose or k.status != "applied"]
    if not shown:
        return None
    applied = sum(k.status == "applied" for k in report.knobs)
    return Section(
        title="Knobs",
        note=f"{applied} of {len(report.knobs)} took effect",
        blocks=(Items(items=tuple(_knob(k) for k in shown)),),
    )


def _knob(k: KnobRow) -> Item:
    asked, got = value(k.requested), value(k.actual)
    change = asked if asked == got else f"{asked} → {got}"
    return Item(
        mark="good" if k.status == "applied" else "warn" if k.status == "unobservable" else "bad",
        head=f"{k.knob} @{k.side}",
        tail=f"{change}, {k.status.replace('_', ' ')}",
        details=(("", k.reason),) if k.reason else (),
    )


def _controls(report: Report, verbose: bool) -> Section | None:
    if not report.controls:
        return None
    shown = [c for c in report.controls if verbose or not c.ok]
    items = tuple(Item(mark="good" if c.ok else "bad", head=c.name, tail=f"expected {c.expected}, got {c.got}") for c in shown)
    behaved = sum(c.ok for c in report.controls)
    return Section(title="Controls", note=f"{behaved} of {len(report.controls)} behaved", blocks=(Items(items=items),) if items else ())


def _provenance(report: Report) -> Section | None:
    if not report.provenance:
        return None
    pairs = tuple((f"{group}.{name}", Cell(text=value(v))) for group, values in report.provenance.items() for name, v in values.items())
    return Section(title="Provenance", blocks=(Pairs(pairs=pairs),))


def _files(report: Report, verbose: bool) -> Section | None:
    pairs = [("reproduce", cell(report.reproduce or report.header.command, "strong"))]
    pairs += [(a.path, cell(" ".join(filter(None, (a.what, a.digest[:19]))) or NOT_MEASURED)) for a in report.artifacts if verbose]
    blocks: list[Block] = [Pairs(pairs=tuple(pairs))]
    if report.notes:
        blocks.insert(0, Items(items=tuple(Item(mark="dim", head=note) for note in report.notes)))
    return Section(title="Run it again", blocks=tuple(blocks))
