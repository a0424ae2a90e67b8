"""The sections of the GEMM probe: every product against the pin and against itself at other row counts, and what ran between the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rlmismatch.report.blocks import Block, Cell, Column, Item, Items, Section, Table, cell
from rlmismatch.report.cells import numeric, unequal
from rlmismatch.report.model import CollectiveRow, ReplayRow
from rlmismatch.report.numbers import NOT_MEASURED, number, plural

FULL: Final = "full"


def products(rows: Sequence[ReplayRow], *, ascending: Collection[str] = (), verbose: bool) -> Section | None:
    """One line a logical column over all layers, or one a layer and row count when verbose.

    ascending: sides whose pin is one float32 chain over ascending K, so that a product with its bits adds in that order too.
    """
    if not rows:
        return None
    sides = dict.fromkeys(r.side for r in rows)
    blocks: list[Block] = [Items(items=tuple(_summary(side, rows, ascending=side in ascending) for side in sides))]
    blocks.append(_every(rows) if verbose else _by_column(rows))
    note = "captured inputs of each product; another kernel: not the pin's bits; another M: not its own bits at all rows"
    return Section(title="GEMM replay", note=note, blocks=tuple(blocks))


def _summary(side: str, rows: Iterable[ReplayRow], *, ascending: bool) -> Item:
    own = [r for r in rows if r.side == side]
    names = dict.fromkeys(r.product for r in own)
    moved = {r.product for r in own if r.rows != FULL and r.unequal_full}
    other = {r.product for r in own if r.unequal_pin}
    noisy = {r.product for r in own if r.rows == FULL and r.unequal_full}
    words = [
        f"the pin's bits in {len(names) - len(other)} of {plural(len(names), 'product')}",
        f"the same bits at every M in {len(names) - len(moved)}",
    ]
    if ascending and other:
        words.append(f"K not added in ascending order (split, or by another tree) in {len(other)}")
    if noisy:
        words.append(f"a second run differs in {len(noisy)}")
    return Item(mark="warn" if moved or noisy else "good", head=side, tail=", ".join(words))


def _by_column(rows: Sequence[ReplayRow]) -> Table:
    counts = sorted({r.rows for r in rows} - {FULL}, key=int)
    columns = (
        Column(header="side"),
        Column(header="product"),
        numeric("another", "kernel"),
        *(numeric("another M" if i == 0 else "", f"M = {m}") for i, m in enumerate(counts)),
        numeric("native", "error"),
        numeric("pin", "error"),
        Column(header="most in", flexible=True),
    )
    lines = []
    for side, name in dict.fromkeys((r.side, _column(r)) for r in rows):
        own = [r for r in rows if (r.side, _column(r)) == (side, name)]
        full = [r for r in own if r.rows == FULL]
        at = {m: [r for r in own if r.rows == m] for m in counts}
        worst = max(own, key=lambda r: (r.rows != FULL and r.unequal_full / max(1, r.count), r.unequal_pin / max(1, r.count)))
        moved = worst.unequal_full or worst.unequal_pin
        lines.append(
            (
                cell(side),
                cell(name),
                _unequal(full, "unequal_pin"),
                *(_unequal(at[m], "unequal_full") for m in counts),
                cell(number(_mean(full, "native_error"))),
                cell(number(_mean(full, "pin_error"))),
                cell(f"{worst.product.rpartition('.')[0]}, M = {worst.rows}" if moved and len(full) > 1 else "", "dim"),
            )
        )
    return Table(columns=columns, rows=tuple(lines))


def _every(rows: Iterable[ReplayRow]) -> Table:
    columns = (
        Column(header="side"),
        Column(header="product", flexible=True),
        numeric("M"),
        numeric("another", "kernel"),
        numeric("largest"),
        numeric("another M"),
        numeric("largest"),
        numeric("native", "error"),
        numeric("pin", "error"),
    )
    lines = tuple(
        (
            cell(r.side),
            cell(r.product),
            cell(r.rows),
            unequal(r.unequal_pin, r.count),
            cell(number(r.largest_pin)),
            unequal(r.unequal_full, r.count),
            cell(number(r.largest_full)),
            cell(number(r.native_error)),
            cell(number(r.pin_error)),
        )
        for r in rows
    )
    return Table(columns=columns, rows=lines)


def _column(row: ReplayRow) -> str:
    return row.product.rsplit(".", 1)[-1]


def _unequal(rows: Sequence[ReplayRow], name: str) -> Cell:
    """The share of elements that differ, over all layers; exactly none stands out."""
    whole = sum(r.count for r in rows)
    part = sum(getattr(r, name) for r in rows)
    if not whole:
        return Cell(text=NOT_MEASURED, style="dim")
    return Cell(text="0" if not part else f"{number(100 * part / whole)} %", style="good" if not part else "")


def _mean(rows: Sequence[ReplayRow], name: str) -> float | None:
    values = [getattr(r, name) for r in rows if getattr(r, name) is not None]
    return sum(values) / len(values) if values else None


def collectives(rows: Sequence[CollectiveRow], *, verbose: bool) -> Section | None:
    """What ran, by phase: sizes as a range, or each one when verbose."""
    if not rows:
        return None
    columns = (
        Column(header="phase"),
        Column(header="collective"),
        Column(header="ran by"),
        Column(header="dtype"),
        numeric("payload", "bytes"),
        numeric("calls"),
        numeric("per step"),
    )
    groups: dict[tuple[str, str, str, str], list[CollectiveRow]] = {}
    for r in rows:
        groups.setdefault((r.phase, r.op, r.backend, r.dtype), []).append(r)
    lines = []
    for (phase, op, backend, dtype), same in groups.items():
        for part in [[r] for r in same] if verbose else [same]:
            sizes = [r.size_bytes for r in part]
            size = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
            lines.append(
                (
                    cell(phase),
                    cell(op),
                    cell(backend),
                    cell(dtype),
                    cell(size),
                    cell(f"{sum(r.calls for r in part):,}"),
                    cell(number(sum(r.per_step for r in part))),
                )
            )
    note = "what the rollout's TP group ran in the steps of the arm gemm"
    return Section(title="Collectives", note=note, blocks=(Table(columns=columns, rows=tuple(lines)),))
