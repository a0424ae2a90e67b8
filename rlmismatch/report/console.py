"""The page on a terminal, with rich: colour where the terminal has it, plain elsewhere, never wider than asked."""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from rlmismatch.report.blocks import (
    BAR_WIDTH,
    Block,
    Cell,
    Headline,
    Item,
    Items,
    Lines,
    Page,
    Pairs,
    Section,
    Table,
    fit,
    fits,
    parts,
    spaced,
)

WIDTH: Final = 100
INDENT: Final = 2
GAP: Final = 2
STYLES: Final = {"": "", "good": "green", "bad": "bold red", "warn": "yellow", "dim": "bright_black", "strong": "bold"}
MARKS: Final = {"good": "✓", "bad": "✗", "warn": "!", "dim": "·"}
_BEYOND: Final = 4096
ARROW: Final = "bold cyan"
BANNER_STYLE: Final = "bold white on magenta"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def render(content: Page, *, width: int | None = None, colour: bool | None = None) -> str:
    """The page as terminal text, `width` columns wide at most; only a number that does not fit beside the name of its row goes beyond.

    width: None is the terminal's own up to 100 columns, and 100 where there is no terminal. colour: None is "only on a terminal
    and only if NO_COLOR is not set".
    """
    columns = width or (min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH)
    coloured = _wants_colour() if colour is None else colour
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(columns, _BEYOND),  # rich cuts what is wider than the console
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        no_color=not coloured,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},
    )
    for line in content.banner:
        console.print(Padding(Text(line), (0, 1), style=BANNER_STYLE if coloured else "", expand=True), width=columns)
    console.print(_verdict(content.title, content.headline), width=columns)
    for section in content.sections:
        console.print()
        console.print(_title(section), width=columns)
        for i, block in enumerate(section.blocks):
            if i and spaced(section.blocks[i - 1], block):
                console.print()
            wide = _BEYOND if isinstance(block, Table) else columns
            console.print(Padding(_block(block, columns - INDENT), (0, 0, 0, INDENT)), width=wide)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _verdict(title: str, headline: Headline) -> Panel:
    style = STYLES[headline.style]
    first = Text.assemble((f" {headline.word} ", f"bold reverse {style}"))
    if headline.exit_code is not None:
        first.append(f"  exit {headline.exit_code}", style="bold")
    parts: list[RenderableType] = [first]
    if headline.why:
        parts += [Text(), *(_item(item, 0) for item in headline.why)]
    return Panel(
        Group(*parts),
        title=Text(title, style="bold"),
        title_align="left",
        border_style=style.replace("bold ", ""),
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _title(section: Section) -> Text:
    text = Text(section.title, style="bold cyan")
    if section.note:
        text.append(f"   {section.note}", style=f"not bold {STYLES['dim']}")
    return text


def _tables(table: Table, width: int) -> RenderableType:
    """The table, closer where that is enough, or else in parts below each other."""
    for gap in (GAP, 1):
        if fits(table, width, gap=gap):
            return _table(fit(table, width, gap=gap), gap)
    first, *more = parts(table, width, gap=GAP)
    return Group(_table(first, GAP), *(Group(Text(), _table(one, GAP)) for one in more))


def _block(block: Block, width: int) -> RenderableType:
    if isinstance(block, Table):
        return _tables(block, width)
    if isinstance(block, Items):
        heads = max((len(i.head) for i in block.items if i.tail), default=0)
        return Group(*(_item(i, min(heads, width // 2)) for i in block.items))
    if isinstance(block, Pairs):
        return _grid([(Text(label, style=STYLES["dim"]), _styled(c)) for label, c in block.pairs])
    return Group(*(_styled(line) for line in block.lines)) if isinstance(block, Lines) else Text()


def _table(table: Table, gap: int) -> RichTable:
    out = RichTable(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style=STYLES["dim"])
    units = any(c.unit for c in table.columns)
    for c in table.columns:
        header = Text(f"{c.header}\n{c.unit}" if units else c.header)
        out.add_column(header, justify="right" if c.right else "left", no_wrap=True)
    for row in table.rows:
        out.add_row(*(_styled(c) for c in row))
    return out


def _styled(c: Cell) -> Text:
    text = Text(c.text, style=STYLES[c.style])
    return text if c.bar is None else Text.assemble((bar(c.bar), "cyan"), " ", text)


def bar(share: float) -> str:
    """A bar of `share` (0..1) in eighths of a character, 12 wide."""
    eighths = round(share * BAR_WIDTH * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(BAR_WIDTH)


def _item(item: Item, head_width: int) -> RenderableType:
    style = STYLES[item.mark]
    head = Text.assemble((item.lead, "bold"), ": " if item.lead else "", item.head)
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    if item.tail:
        grid.add_column(min_width=head_width + 1, max_width=head_width + 1, overflow="fold")
        grid.add_column(overflow="fold")
        grid.add_row(Text(MARKS[item.mark], style=style), head, Text(item.tail, style=style if item.mark != "good" else ""))
    else:
        grid.add_column(overflow="fold")
        head.style = STYLES["dim"] if item.mark == "dim" else ""
        grid.add_row(Text(MARKS[item.mark], style=style), head)
    if not item.details:
        return grid
    details = _grid([(Text(label, style=ARROW if label == "→" else STYLES["dim"]), Text(text)) for label, text in item.details])
    return Group(grid, Padding(details, (0, 0, 0, GAP)))


def _grid(rows: list[tuple[Text, Text]]) -> RichTable:
    grid = RichTable.grid(padding=(0, GAP, 0, 0))
    if any(label.plain for label, _ in rows):
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in rows:
            grid.add_row(label, text)
    else:
        grid.add_column(overflow="fold")
        for _, text in rows:
            grid.add_row(text)
    return grid
