"""The section that says which attention ran: one line where all layers are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlmismatch.report.blocks import Cell, Column, Section, Table, cell
from rlmismatch.report.cells import numeric
from rlmismatch.report.model import AttentionRanRow
from rlmismatch.report.numbers import number


def ran(rows: Sequence[AttentionRanRow], *, verbose: bool) -> Section | None:
    """A line for each run of layers that are alike, or one a layer when verbose."""
    if not rows:
        return None
    by_name = any(row.requested != "auto" for row in rows)
    columns = (
        Column(header="side"),
        Column(header="layers"),
        Column(header="phase"),
        *((Column(header="asked for"),) if by_name else ()),
        Column(header="ran"),
        numeric("calls"),
        Column(header="computes", flexible=True),
        Column(header="K, V"),
    )
    lines = []
    for same in _alike(rows, verbose):
        first, last = same[0], same[-1]
        lines.append(
            (
                cell(first.side),
                cell(str(first.layer) if first is last else f"{first.layer} to {last.layer}"),
                cell(first.phase),
                *((cell(first.requested),) if by_name else ()),
                Cell(text=first.backend, style="bad" if not first.calls else "warn" if first.fallback_reason else ""),
                cell(str(first.calls)),
                cell(_computes(first)),
                cell(first.kv_dtype),
            )
        )
    return Section(title="Attention that ran", note="calls of one layer in a trial", blocks=(Table(columns=columns, rows=tuple(lines)),))


def _alike(rows: Sequence[AttentionRanRow], verbose: bool) -> list[list[AttentionRanRow]]:
    """Neighbouring layers of one side and phase that differ in nothing but their number."""
    groups: list[list[AttentionRanRow]] = []
    for row in rows:
        before = groups[-1][-1] if groups else None
        if before is not None and not verbose and dataclasses.replace(row, layer=before.layer) == before:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _computes(row: AttentionRanRow) -> str:
    words = [row.mask or "no known mask", f"×{number(row.scale)}"]
    words += [f"window {row.window}"] if row.window else []
    words += [f"cap {number(row.soft_cap)}"] if row.soft_cap else []
    words += [f"sink {number(row.sink)}"] if row.sink is not None else []
    return ", ".join(words)
