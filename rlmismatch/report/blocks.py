"""What a page is made of, for every renderer: sections of tables, items, pairs and paragraphs, in words and with a style, no markup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len

Style = Literal["", "good", "bad", "warn", "dim", "strong"]
BAR_WIDTH: Final = 12
MIN_FLEX: Final = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text and its style; `bar` (0..1) asks for a bar of that length before the text."""

    text: str
    style: Style = ""
    bar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """`unit` stands below the header. A flexible column is cut with an ellipsis where the page is too narrow; others never are."""

    header: str
    unit: str = ""
    right: bool = False
    flexible: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line with a mark, and details below it as (label, text)."""

    mark: Literal["good", "bad", "warn", "dim"]
    head: str
    lead: str = ""  # stands out before the head
    tail: str = ""  # in a column of its own
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Items:
    items: tuple[Item, ...]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Label and text, one pair a line."""

    pairs: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Paragraphs, wrapped by the renderer."""

    lines: tuple[Cell, ...]


Block = Table | Items | Pairs | Lines


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    note: str = ""  # beside the title


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The verdict: word, exit code, why, and what to change."""

    word: str
    exit_code: int | None
    style: Style
    why: tuple[Item, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    banner: tuple[str, ...]  # loud lines, first of all
    headline: Headline
    sections: tuple[Section, ...]


def spaced(before: Block, after: Block) -> bool:
    """Whether a blank line stands between two blocks of one section."""
    return isinstance(after, Table) or (isinstance(before, (Table, Lines)) and isinstance(after, Pairs))


def cell(text: str, style: Style = "") -> Cell:
    return Cell(text=text, style=style)


def fit(table: Table, width: int, *, gap: int = 2, header_padding: int = 0) -> Table:
    """The table with the cells of flexible columns cut so that it fits `width` columns with `gap` between; never below 8 each.

    header_padding: blanks that the renderer adds to each header.
    """
    heads = [max(cell_len(c.header), cell_len(c.unit)) + header_padding for c in table.columns]
    widths = [max([head, *(_wide(row[i]) for row in table.rows)]) for i, head in enumerate(heads)]
    flexible = [i for i, c in enumerate(table.columns) if c.flexible and widths[i] > MIN_FLEX]
    surplus = sum(widths) + gap * (len(widths) - 1) - width
    while surplus > 0 and flexible:
        widest = max(flexible, key=lambda i: widths[i])
        widths[widest] -= 1
        surplus -= 1
        flexible = [i for i in flexible if widths[i] > MIN_FLEX]
    rows = tuple(
        tuple(Cell(text=clip(c.text, widths[i]), style=c.style, bar=c.bar) if table.columns[i].flexible else c for i, c in enumerate(row))
        for row in table.rows
    )
    return Table(columns=table.columns, rows=rows)


def clip(text: str, width: int) -> str:
    """`text` in at most `width` terminal cells, its end replaced by an ellipsis."""
    if cell_len(text) <= width:
        return text
    out, used = "", 0
    for char in text:
        used += cell_len(char)
        if used > width - 1:
            break
        out += char
    return out + "…"


def _wide(c: Cell) -> int:
    return cell_len(c.text) + (BAR_WIDTH + 1 if c.bar is not None else 0)
