"""The page as plain text with tabulate: for logs, mail and diffs."""

from __future__ import annotations

import textwrap
from typing import Final

from tabulate import MIN_PADDING, tabulate

from rlmismatch.report.blocks import BAR_WIDTH, Block, Cell, Headline, Item, Items, Page, Pairs, Section, Table, parts, spaced

WIDTH: Final = 100
MARKS: Final = {"good": "[ok]  ", "bad": "[FAIL]", "warn": "[warn]", "dim": "[note]"}
_INDENT: Final = "  "


def render(content: Page, *, width: int = WIDTH) -> str:
    """The page as plain text, no colour, `width` columns wide at most."""
    lines = [line for banner in content.banner for line in _hanging("*** ", f"{banner} ***", width)]
    lines += _headline(content.headline, width)
    for section in content.sections:
        lines += ["", *_section(section, width)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _headline(headline: Headline, width: int) -> list[str]:
    first = headline.word if headline.exit_code is None else f"{headline.word}  exit {headline.exit_code}"
    return [first, *(line for item in headline.why for line in _item(item, 0, width))]


def _section(section: Section, width: int) -> list[str]:
    title = f"{section.title}  ({section.note})" if section.note else section.title
    lines = [title, "=" * len(section.title)]
    for i, block in enumerate(section.blocks):
        lines += [""] if i and spaced(section.blocks[i - 1], block) else []
        lines += [_INDENT + line if line else line for line in _block(block, width - len(_INDENT))]
    return lines


def _block(block: Block, width: int) -> list[str]:
    if isinstance(block, Table):
        below = [line for part in parts(block, width, header_padding=MIN_PADDING) for line in ("", *_table(part))]
        return below[1:]
    if isinstance(block, Items):
        heads = min(max((len(i.head) for i in block.items if i.tail), default=0), width // 2)
        return [line for item in block.items for line in _item(item, heads, width)]
    if isinstance(block, Pairs):
        return _pairs([(label, c.text) for label, c in block.pairs], width)
    return [line for c in block.lines for line in textwrap.wrap(c.text, width)]


def _table(table: Table) -> list[str]:
    units = any(c.unit for c in table.columns)
    return tabulate(
        [[_text(c) for c in row] for row in table.rows],
        headers=[f"{c.header}\n{c.unit}" if units else c.header for c in table.columns],
        tablefmt="simple",
        colalign=["right" if c.right else "left" for c in table.columns],
        disable_numparse=True,
        preserve_whitespace=True,
    ).splitlines()


def _text(c: Cell) -> str:
    return c.text if c.bar is None else f"{'#' * round(c.bar * BAR_WIDTH):<{BAR_WIDTH}} {c.text}"


def _item(item: Item, head_width: int, width: int) -> list[str]:
    head = f"{item.lead}: {item.head}" if item.lead else item.head
    head = f"{head:<{head_width}}  {item.tail}" if item.tail else head
    lines = _hanging(f"{MARKS[item.mark]} ", head, width)
    return lines + [_INDENT + line for line in _pairs(list(item.details), width - len(_INDENT))]


def _pairs(pairs: list[tuple[str, str]], width: int) -> list[str]:
    labels = max((len(label) for label, _ in pairs), default=0)
    return [line for label, text in pairs for line in _hanging(f"{label:<{labels}}  " if labels else "", text, width)]


def _hanging(prefix: str, text: str, width: int) -> list[str]:
    if len(prefix) + len(text) <= width:  # keeps the blanks that align columns
        return [prefix + text]
    return textwrap.wrap(text, width, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_on_hyphens=False)
