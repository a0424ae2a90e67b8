"""Two runs: what changed from the first to the second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rlmismatch.drift.model import Drift
from rlmismatch.report import codec
from rlmismatch.report.blocks import Block, Column, Headline, Item, Items, Page, Section, Table, cell
from rlmismatch.report.model import Gate, Report
from rlmismatch.report.numbers import NOT_MEASURED, number, plural, probability_ratio, value
from rlmismatch.report.sections import reading_text, verdict_style

Group = Literal["setup", "gates", "contract", "knobs", "drift", "axes", "shares", "budget", "closure", "controls", "provenance"]
GROUPS: Final[tuple[Group, ...]] = (
    "setup",
    "gates",
    "contract",
    "knobs",
    "drift",
    "axes",
    "shares",
    "budget",
    "closure",
    "controls",
    "provenance",
)
METRICS: Final = ("tokens", "unequal", "signed_mean", "mean_abs", "p99", "max", "token_mult_prob_error", "k3")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One fact that is not the same in both runs. Numbers are in the unit of the report; `None` is "not there, or not measured"."""

    group: Group
    name: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class RunRef:
    """Which run a comparison speaks of, and how it ended."""

    run_id: str
    date: str
    command: str
    word: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What changed from `before` to `after`; `same` counts the facts that did not, by group."""

    before: RunRef
    after: RunRef
    reasons_gone: tuple[str, ...] = ()
    reasons_new: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    same: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # why numbers of the two runs may not be set against each other

    @property
    def identical(self) -> bool:
        return not self.changes and self.before.exit_code == self.after.exit_code and not (self.reasons_gone or self.reasons_new)

    def to_json(self) -> dict[str, Any]:
        return {"identical": self.identical, **codec.encode(self)}


def compare(a: Report, b: Report) -> Comparison:
    """Every fact of the two reports that differs, `a` being the earlier. Numbers are compared exactly: a pinned run repeats its bits.

    A number of a run whose numbers are void counts as not measured.
    """
    before, after = _facts(a), _facts(b)
    changes, same = [], dict.fromkeys(GROUPS, 0)
    for group in GROUPS:
        for name in dict.fromkeys((*before[group], *after[group])):
            x, y = before[group].get(name), after[group].get(name)
            if _equal(x, y):
                same[group] += 1
            else:
                changes.append(Change(group=group, name=name, before=x, after=y))
    old, new = ([" ".join(filter(None, (r.axis, r.text))) for r in report.verdict.reasons] for report in (a, b))
    return Comparison(
        before=_ref(a),
        after=_ref(b),
        reasons_gone=tuple(r for r in old if r not in new),
        reasons_new=tuple(r for r in new if r not in old),
        changes=tuple(changes),
        same={group: n for group, n in same.items() if n},
        warnings=tuple(_warnings(a, b)),
    )


def page(comparison: Comparison) -> Page:
    """The comparison as a page for any renderer."""
    old, new = comparison.before, comparison.after
    word = "SAME" if comparison.identical else new.word if old.word == new.word else f"{old.word} → {new.word}"
    why = [Item(mark="warn", head=text) for text in comparison.warnings]
    why += [Item(mark="good", lead="gone", head=text) for text in comparison.reasons_gone]
    why += [Item(mark="bad", lead="new", head=text) for text in comparison.reasons_new]
    why.append(Item(mark="dim", head=f"{plural(len(comparison.changes), 'change')}, {sum(comparison.same.values()):,} facts the same"))
    runs = tuple(
        Item(mark="dim", head=f"{label} {run.run_id}", tail=f"{run.word}, exit {run.exit_code}, {run.date}", details=(("", run.command),))
        for label, run in (("before", old), ("after", new))
    )
    groups = [g for g in GROUPS if any(c.group == g for c in comparison.changes)]
    return Page(
        title="rlmismatch report: two runs",
        banner=(),
        headline=Headline(word=word, exit_code=None, style=verdict_style(new.exit_code), why=tuple(why)),
        sections=(Section(title="Runs", blocks=(Items(items=runs),)), *(_section(g, comparison) for g in groups)),
    )


def _section(group: Group, comparison: Comparison) -> Section:
    columns = (
        Column(header="what", flexible=True),
        Column(header="before", flexible=True),
        Column(header="after", flexible=True),
        Column(header="change", right=True),
    )
    rows = tuple(
        (cell(c.name), cell(_shown(c, c.before)), cell(_shown(c, c.after), "strong"), cell(_delta(c.before, c.after), "dim"))
        for c in comparison.changes
        if c.group == group
    )
    block: Block = Table(columns=columns, rows=rows)
    return Section(title=group.capitalize(), note=f"{comparison.same.get(group, 0)} more the same", blocks=(block,))


def _shown(change: Change, x: Any) -> str:
    if x is None:
        return NOT_MEASURED
    if isinstance(x, float):
        return probability_ratio(x) if change.name.endswith("token_mult_prob_error") else number(x)
    return value(x)


def _delta(before: Any, after: Any) -> str:
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (before, after)):
        return ""
    if isinstance(before, float) and before * after > 0:
        return f"×{number(after / before)}"
    return number(after - before, signed=True) if isinstance(before, float) else f"{after - before:+,}"


def _equal(x: Any, y: Any) -> bool:
    both_nan = isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)
    return both_nan or (type(x) is type(y) and bool(x == y))


def _ref(report: Report) -> RunRef:
    h, v = report.header, report.verdict
    return RunRef(run_id=h.run_id, date=h.date, command=h.command, word=v.word, exit_code=v.exit_code)


def _warnings(a: Report, b: Report) -> Iterable[str]:
    for label, report in (("first", a), ("second", b)):
        if report.verdict.numbers_void:
            yield f"the numbers of the {label} run are void"
        if report.plants:
            yield f"the {label} run has a plant in force: {', '.join(f'{p.id}@{p.side}' for p in report.plants)}"
    if a.header.checkpoint_digest != b.header.checkpoint_digest:
        yield "the two runs did not score the same checkpoint"
    if (a.header.tokens, a.header.sequences) != (b.header.tokens, b.header.sequences):
        yield "the two runs did not score the same number of tokens"
    elif _tokens(a) != _tokens(b):
        yield "the two runs did not score the same tokens"


def _tokens(report: Report) -> dict[str, tuple[Any, Any]]:
    """What both sides say of the tokens they were given; their own differences are the gate's."""
    return {c.field: (c.trainer.value, c.rollout.value) for c in report.contract if c.axis == "model.tokens"}


def _facts(report: Report) -> dict[Group, dict[str, Any]]:
    """Group -> name -> value of everything that is there and was measured."""
    h = report.header
    numbers = not report.verdict.numbers_void
    setup: dict[str, Any] = {
        "checkpoint": h.checkpoint,
        "checkpoint digest": h.checkpoint_digest,
        "tokens": h.tokens,
        "sequences": h.sequences,
    }
    for s in h.sides:
        setup |= {f"{s.side} {name}": fact for name, fact in codec.encode(s).items() if name != "side"}
    setup |= {f"plant {p.id}@{p.side}": "in force" for p in report.plants}
    contract = {c.key: c.outcome.value for c in report.contract}
    for c in report.contract:
        contract |= {f"{c.key} @trainer": reading_text(c.trainer), f"{c.key} @rollout": reading_text(c.rollout)}
    players = report.attribution.players if report.attribution else ()
    facts: dict[Group, dict[str, Any]] = {
        "setup": setup,
        "gates": {g.name: _gate(g) for g in report.gates},
        "contract": contract,
        "knobs": {f"{k.knob} @{k.side}": f"{value(k.actual)}, {k.status}" for k in report.knobs},
        "drift": {f"{r.name} {m}": _metric(r.drift, m) for r in report.ratios for m in METRICS if numbers},
        "axes": {
            f"{a.axis} {m}": getattr(a, m) for a in report.axes for m in ("status", "local", "alone", "last") if numbers or m == "status"
        },
        "shares": {p.pin: p.share for p in players if numbers},
        "budget": {line.limit: line.status for line in report.budget},
        "closure": {c.name: c.unequal for c in report.closure},
        "controls": {c.name: c.got for c in report.controls},
        "provenance": {f"{group}.{name}": fact for group, values in report.provenance.items() for name, fact in values.items()},
    }
    return {group: {name: fact for name, fact in named.items() if fact is not None} for group, named in facts.items()}


def _gate(gate: Gate) -> str:
    if gate.ok:
        return "equal"
    return ", ".join(gate.differing) or ("unequal" if gate.equal is False else "not established")


def _metric(drift: Drift | None, name: str) -> Any:
    return getattr(drift, name) if drift is not None and drift.valid else None
