"""The section of a page that holds the trainer's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlmismatch.report.blocks import Block, Cell, Column, Lines, Pairs, Section, Table, cell
from rlmismatch.report.cells import numeric, unequal
from rlmismatch.report.model import GradientInfo, GradientRow
from rlmismatch.report.numbers import number, of, percent

PARAMETERS_SHOWN: Final = 5
_WORDS: Final = {
    "ops": "operations",
    "dgrad_reduce": "sum of dX",
    "wgrad_accumulate": "dW into main_grad",
}


def section(info: GradientInfo, verbose: bool) -> Section:
    """Norms, shares, and the worst parameters; all of them when verbose."""
    blocks: list[Block] = [Pairs(pairs=tuple((label, cell(text)) for label, text in _pairs(info, verbose)))]
    if info.players:
        blocks.append(_players(info))
    shown = info.rows if verbose else info.rows[:PARAMETERS_SHOWN]
    if shown:
        blocks.append(_parameters(shown))
    if len(shown) < len(info.rows):
        text = f"n - p: native minus pinned; the worst {len(shown)} of {len(info.rows)} parameters, --verbose shows all"
        blocks.append(Lines(lines=(cell(text, "dim"),)))
    return Section(title="Gradients", note=info.loss, blocks=tuple(blocks))


def _pairs(info: GradientInfo, verbose: bool) -> list[tuple[str, str]]:
    if info.why:
        return [("norm", f"{number(info.norm_native)} native"), ("not pinned", info.why)]
    one_minus = None if info.cosine is None else 1 - info.cosine
    out = [
        ("norm", f"{number(info.norm_native)} native, {number(info.norm_pinned)} pinned"),
        (
            "native - pinned",
            f"relative L2 {number(info.relative_l2)}, 1 - cosine {number(one_minus)}, max {number(info.max_abs)},"
            f" {of(info.unequal, info.elements)} elements unequal",
        ),
        ("pinned gradient", f"sha256 {info.digest[:16]}: the same at every TP up to 8, with SP or without, of these sequences"),
    ]
    return [*out, ("pinned backward", "; ".join(info.composition))] if verbose else out


def _relative(x: float | None) -> Cell:
    return Cell(text=number(x), style="dim" if x is None else "good" if x == 0 else "")


def _players(info: GradientInfo) -> Table:
    columns = (
        Column(header="pinned apart"),
        numeric("alone", "rel. L2"),
        numeric("last", "rel. L2"),
        numeric("share"),
        Column(header="", flexible=True),
    )
    rows = tuple(
        (
            cell(_WORDS[p.player]),
            _relative(p.alone),
            _relative(p.last),
            cell(percent(p.share)),
            cell(p.why or p.axis or "every pin of the forward, with its gradient", "dim"),
        )
        for p in info.players
    )
    return Table(columns=columns, rows=rows)


def _parameters(shown: Sequence[GradientRow]) -> Table:
    columns = (
        Column(header="parameter", flexible=True),
        numeric("unequal", "elements"),
        numeric("norm"),
        numeric("n - p", "rel. L2"),
        numeric("1 - cosine"),
        numeric("max"),
    )
    rows = tuple(
        (
            cell(r.parameter),
            unequal(r.unequal, r.elements),
            cell(number(r.norm)),
            _relative(r.relative_l2),
            cell(number(None if r.cosine is None else 1 - r.cosine)),
            cell(number(r.max_abs)),
        )
        for r in shown
    )
    return Table(columns=columns, rows=rows)
