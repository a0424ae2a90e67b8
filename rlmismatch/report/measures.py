"""The sections of a page that hold numbers: budget, ratios, floors, oracle, worst tokens, and those of isolation.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rlmismatch.drift.model import BudgetLine, Drift, Interval, TokenDrift
from rlmismatch.report import attention, gradients, isolation, replay
from rlmismatch.report.blocks import Block, Cell, Column, Item, Items, Lines, Pairs, Section, Table, cell
from rlmismatch.report.cells import NATS, nats, numeric, unequal
from rlmismatch.report.model import MeasureRow, Report
from rlmismatch.report.numbers import NOT_MEASURED, count, number, of, passing_limit, percent, plural, printable, probability_ratio

WORST_SHOWN: Final = 5
SPARKS: Final = "▁▂▃▄▅▆▇█"


def sections(report: Report, *, verbose: bool) -> list[Section]:
    """The sections of `report` that have anything to show, in order of interest."""
    every = [
        _budget(report),
        _ratios(report),
        _headline_detail(report, verbose),
        _hints(report),
        isolation.attribution(report.attribution, verbose) if report.attribution else None,
        isolation.closure(report),
        isolation.divergence(report, verbose),
        isolation.axes(report),
        gradients.section(report.gradients, verbose) if report.gradients else None,
        _measures(report, verbose),
        replay.products(report.replay, ascending={s.side for s in report.header.sides if s.impl == "triton"}, verbose=verbose),
        replay.collectives(report.collectives, verbose=verbose),
        attention.ran(report.attention_ran, verbose=verbose),
        _oracle(report),
        _floors(report),
        _worst(report, verbose),
        _per_sequence(report, verbose),
    ]
    return [s for s in every if s is not None]


def _measures(report: Report, verbose: bool) -> Section | None:
    """A table of the rows over their limit and of those of both sides; or all of them with their notes, axis by axis, when verbose."""
    shown = [m for m in report.measures if verbose or not m.ok or (m.limit is None and not m.side)]
    if not report.measures:
        return None
    limited = [m for m in report.measures if m.limit is not None and m.value is not None]
    blocks: tuple[Block, ...] = ()
    if shown:
        blocks = _all_measures(shown, [a.axis for a in report.axes]) if verbose else (_measure_table(shown),)
    if hidden := len(report.measures) - len(shown):
        text = f"--verbose shows {plural(hidden, 'row')}{' more' if shown else ''}, each with its note"
        blocks += (Lines(lines=(cell(text, "dim"),)),)
    note = f"{sum(m.ok for m in limited)} of {plural(len(limited), 'limit')} held" if limited else "none has a limit"
    return Section(title="Measures", note=note, blocks=blocks)


def _measure_table(shown: Sequence[MeasureRow]) -> Table:
    columns = (Column(header="axis"), Column(header="side"), Column(header="what", flexible=True), numeric("measured"), numeric("limit"))
    rows = tuple(
        (
            cell(m.axis),
            cell(m.side),
            cell(f"{m.what}; {m.note}" if m.note and not m.ok else m.what),
            Cell(text=f"{number(m.value)} {m.unit}".strip(), style="" if m.ok else "bad"),
            cell(number(m.limit)),
        )
        for m in shown
    )
    return Table(columns=columns, rows=rows)


def _all_measures(shown: Sequence[MeasureRow], order: Sequence[str]) -> tuple[Block, ...]:
    """Words and notes are longer than a column: they are wrapped, not cut."""
    blocks: list[Block] = []
    named = {m.axis for m in shown}
    for axis in dict.fromkeys((*(a for a in order if a in named), *(m.axis for m in shown))):
        blocks.append(Lines(lines=(Cell(text=axis, style="strong"),)))
        blocks.append(Items(items=tuple(_measure(m) for m in shown if m.axis == axis)))
    return tuple(blocks)


def _measure(m: MeasureRow) -> Item:
    found = "not measured" if m.value is None else f"{number(m.value)} {m.unit}".strip()
    limit = "" if m.limit is None else f", at most {number(m.limit)}"
    return Item(
        mark="bad" if not m.ok else "dim" if m.limit is None else "good",
        head=f"{m.side or 'both'}: {m.what}: {found}{limit}",
        details=(("", m.note),) if m.note else (),
    )


def _budget(report: Report) -> Section | None:
    if not report.budget:
        return None
    columns = (
        Column(header="limit"),
        numeric("allowed"),
        numeric("measured"),
        Column(header="outcome"),
        Column(header="would pass with", flexible=True),
    )
    rows = tuple(
        (
            cell(line.limit),
            cell(f"{'≤' if line.sense == 'at most' else '≥'} {_limit(line, line.allowed)}"),
            cell(_limit(line, line.value)),
            Cell(text=line.status, style="dim" if line.ok and line.status != "within" else "good" if line.ok else "bad"),
            cell(_would_pass(line)),
        )
        for line in report.budget
    )
    return Section(title="Budget", blocks=(Table(columns=columns, rows=rows),))


def _limit(line: BudgetLine, x: float | None) -> str:
    return probability_ratio(x) if line.limit.startswith("token_mult_prob_error") else number(x)


def _would_pass(line: BudgetLine) -> str:
    if line.status == "not measured":
        return line.why
    least = line.smallest_limit_that_passes
    if line.status == "within" or least is None or not math.isfinite(least):  # no limit is infinite
        return ""
    return f"{line.limit.split(' ')[0]}={passing_limit(least, at_least=line.sense == 'at least')}"


def _ratios(report: Report) -> Section | None:
    if not report.ratios:
        return None
    columns = (
        Column(header="pair"),
        numeric("unequal", "tokens"),
        numeric("bias", NATS),
        numeric("mean abs", NATS),
        numeric("p99", NATS),
        numeric("max", NATS),
        numeric("mean e^|d|"),
        numeric("k3", NATS),
    )
    rows, missing = [], []
    for r in report.ratios:
        d = r.drift
        if d is None or d.invalid:
            missing.append(Item(mark="dim" if d is None else "bad", head=r.name, tail=r.why if d is None else d.invalid[0].text))
            continue
        rows.append(
            (
                cell(r.name),
                unequal(d.unequal, d.tokens),
                nats(d.signed_mean, signed=True),
                nats(d.mean_abs),
                nats(d.p99),
                nats(d.max),
                cell(probability_ratio(d.token_mult_prob_error)),
                nats(d.k3),
            )
        )
    blocks: list[Block] = [Table(columns=columns, rows=tuple(rows))] if rows else []
    if missing:
        blocks.append(Items(items=tuple(missing)))
    notes = tuple(Item(mark="dim", head=r.name, tail=r.note) for r in report.ratios if r.note)
    if notes:
        blocks.append(Items(items=notes))
    return Section(title="Drift", blocks=tuple(blocks), note="d = first - second, per selected token")


def _between(interval: Interval | None) -> str:
    return f", {100 * interval.level:.0f} % interval {number(interval.low)} to {number(interval.high)}" if interval else ""


def _headline_detail(report: Report, verbose: bool) -> Section | None:
    row = report.headline
    if row is None or row.drift is None or not row.drift.valid or (row.drift.mean_abs == 0 and not verbose):
        return None
    d = row.drift
    a, b = row.name.split("/")
    pairs = [
        ("mean abs", f"{number(d.mean_abs)} nats{_between(d.mean_abs_interval)}"),
        ("bias", f"{number(d.signed_mean, signed=True)} nats{_between(d.signed_mean_interval)}"),
        ("quantiles of |d|", f"p50 {number(d.p50)}, p95 {number(d.p95)}, p99 {number(d.p99)} nats"),
        (f"KL({b}‖{a})", f"k1 {number(d.k1)}, k2 {number(d.k2)}, k3 {number(d.k3)} nats"),
        (
            "importance weights",
            f"ESS {percent(d.ess)}, mean weight {number(d.tis_mean_weight)} (cut at 2), {percent(d.clip_share)} of tokens beyond ln 1.2",
        ),
    ]
    if d.worst:
        t = d.worst[0]
        pairs.append(("largest", f"{number(t.delta, signed=True)} nats at {t.sequence!r}, position {t.position}, token {t.token}"))
    pairs += _shape(d)
    outliers = [
        f"{printable(s.sequence)} (mean abs {number(s.mean_abs)}, robust z {number(s.robust_z)})" for s in d.per_sequence if s.outlier
    ]
    if outliers:
        pairs.append(("outlier sequences", ", ".join(outliers)))
    return Section(title=f"{row.name} in detail", blocks=(Pairs(pairs=tuple((label, cell(text)) for label, text in pairs)),))


def _shape(d: Drift) -> list[tuple[str, str]]:
    out = []
    if d.growth is not None and d.growth.slope is not None:
        spark = _spark([b.mean_abs or 0.0 for b in d.growth.buckets])
        slope = f"{number(d.growth.slope, signed=True)} nats per 1000 tokens{_between(d.growth.slope_interval)}"
        out.append(("along the response", f"{spark}  {slope}"))
    if d.ulp_histogram:
        spark = _spark([float(b.tokens) for b in d.ulp_histogram])
        out.append(("float32 ULPs apart", f"0 {spark} 2^{len(d.ulp_histogram) - 1}  ({count(d.ulp_histogram[0].tokens)} tokens at 0)"))
    return out


def _spark(values: Sequence[float]) -> str:
    top = max(values)
    return "".join("·" if v == 0 else SPARKS[min(7, int(8 * v / top))] for v in values)


def _hints(report: Report) -> Section | None:
    said = {reason.text for reason in report.verdict.reasons}
    items = tuple(Item(mark="warn", head=h.says, details=(("→", f"look at {h.axis} first"),)) for h in report.hints if h.says not in said)
    return Section(title="Hints", note="signatures in the numbers; they decide nothing", blocks=(Items(items=items),)) if items else None


def _oracle(report: Report) -> Section | None:
    if not report.oracle:
        return None
    columns = (
        Column(header="side"),
        numeric("mean abs", NATS),
        numeric("plain forward", NATS),
        numeric("ratio"),
        Column(header="", flexible=True),
    )
    rows = tuple((cell(o.side), nats(o.mean_abs), nats(o.plain_mean_abs), cell(number(o.ratio)), cell(o.why, "dim")) for o in report.oracle)
    return Section(title="Error against the float64 oracle", blocks=(Table(columns=columns, rows=rows),))


def _floors(report: Report) -> Section | None:
    if not report.floors:
        return None
    items = []
    for f in report.floors:
        d = f.drift
        if d is None or not d.valid:
            items.append(
                Item(mark="dim", head=f"{f.side} {f.path}", tail=f.why or (d.invalid[0].text if d and d.invalid else NOT_MEASURED))
            )
        elif d.unequal == 0:
            items.append(Item(mark="good", head=f"{f.side} {f.path}", tail=f"{f.repeats} runs, {plural(d.tokens, 'token')}, bit-equal"))
        else:
            tail = f"{f.repeats} runs, {of(d.unequal, d.tokens)} tokens unequal, mean abs {number(d.mean_abs)}, max {number(d.max)} nats"
            items.append(Item(mark="warn", head=f"{f.side} {f.path}", tail=tail))
    return Section(title="Floor", note="each side against its own repeat", blocks=(Items(items=tuple(items)),))


def _worst(report: Report, verbose: bool) -> Section | None:
    row = report.headline
    if row is None or row.drift is None or not row.drift.worst:
        return None
    names = row.name.split("/")
    columns = (
        numeric("d", NATS),
        *(numeric(name, NATS) for name in names),
        Column(header="sequence", flexible=True),
        numeric("pos"),
        numeric("token"),
        Column(header="in context", flexible=True),
    )
    shown = row.drift.worst if verbose else row.drift.worst[:WORST_SHOWN]
    rows = tuple(
        (
            Cell(text=number(t.delta, signed=True), style="strong"),
            cell(number(t.a)),
            cell(number(t.b)),
            cell(printable(t.sequence)),
            cell(str(t.position)),
            cell(str(t.token)),
            cell(_context(t)),
        )
        for t in shown
    )
    return Section(title="Worst tokens", note=row.name, blocks=(Table(columns=columns, rows=rows),))


def _context(t: TokenDrift) -> str:
    if t.text or t.context_text:
        before = printable(t.context_text)
        return f"{'…' + before[-24:] if len(before) > 24 else before}[{printable(t.text)}]"
    return " ".join(map(str, (*t.context_ids, f"[{t.token}]")))


def _per_sequence(report: Report, verbose: bool) -> Section | None:
    row = report.headline
    if not verbose or row is None or row.drift is None or not row.drift.per_sequence:
        return None
    columns = (
        Column(header="sequence", flexible=True),
        numeric("unequal", "tokens"),
        numeric("bias", NATS),
        numeric("mean abs", NATS),
        numeric("max", NATS),
        numeric("robust z"),
    )
    rows = tuple(
        (
            Cell(text=printable(s.sequence), style="warn" if s.outlier else ""),
            unequal(s.tokens - s.bit_equal, s.tokens),
            nats(s.signed_mean, signed=True),
            nats(s.mean_abs),
            nats(s.max_abs),
            cell(number(s.robust_z)),
        )
        for s in row.drift.per_sequence
    )
    return Section(title="Sequences", note=row.name, blocks=(Table(columns=columns, rows=rows),))
