"""What a page is made of, for every renderer: sections of tables, items, pairs and paragraphs, in words and with a style, no markup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len

Style = Literal["", "good", "bad", "warn", "dim", "strong"]
BAR_WIDTH: Final = 12
MIN_FLEX: Final = 8
MIN_KEY: Final = 24  # of a first column that is flexible: it says what a row is


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
    """The table with the cells of flexible columns cut so that it fits `width` columns with `gap` between, each to its least at most.

    header_padding: blanks that the renderer adds to each header.
    """
    widths, least = _widths(table, header_padding)
    flexible = [i for i, w in enumerate(widths) if w > least[i]]
    surplus = sum(widths) + gap * (len(widths) - 1) - width
    while surplus > 0 and flexible:
        widest = max(flexible, key=lambda i: widths[i])
        widths[widest] -= 1
        surplus -= 1
        flexible = [i for i in flexible if widths[i] > least[i]]
    rows = tuple(
        tuple(Cell(text=clip(c.text, widths[i]), style=c.style, bar=c.bar) if table.columns[i].flexible else c for i, c in enumerate(row))
        for row in table.rows
    )
    return Table(columns=table.columns, rows=rows)


def fits(table: Table, width: int, *, gap: int = 2, header_padding: int = 0) -> bool:
    """Whether `fit` can make it narrow enough without a cut in a column that must be whole."""
    _, least = _widths(table, header_padding)
    return sum(least) + gap * (len(least) - 1) <= width


def parts(table: Table, width: int, *, gap: int = 2, header_padding: int = 0) -> tuple[Table, ...]:
    """The table as one that `fits`, or as several with its columns in turn, each beside the first one, which says what a row is.

    A pair of columns that does not fit even so is wider than `width`: a number that is cut is another number.
    """
    _, least = _widths(table, header_padding)
    groups: list[list[int]] = [[]]
    for i in range(1, len(least)):
        taken = least[0] + sum(gap + least[other] for other in (*groups[-1], i))
        if groups[-1] and taken > width:
            groups.append([])
        groups[-1].append(i)
    said = [group for group in groups if any(row[i].text for row in table.rows for i in group)]
    cut = [
        Table(columns=tuple(table.columns[i] for i in (0, *group)), rows=tuple(tuple(row[i] for i in (0, *group)) for row in table.rows))
        for group in said or groups[:1]
    ]
    return tuple(fit(part, width, gap=gap, header_padding=header_padding) for part in cut)


def _widths(table: Table, header_padding: int) -> tuple[list[int], list[int]]:
    """Each column's width, and the least it may have: all of it, or of a flexible one its header and some characters."""
    heads = [max(cell_len(c.header), cell_len(c.unit)) + header_padding for c in table.columns]
    widths = [max([head, *(_wide(row[i]) for row in table.rows)]) for i, head in enumerate(heads)]
    floors = [max(head, MIN_FLEX if i else MIN_KEY) for i, head in enumerate(heads)]
    return widths, [min(w, floor) if c.flexible else w for c, w, floor in zip(table.columns, widths, floors, strict=True)]


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
