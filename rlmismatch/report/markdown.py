"""The page as GitHub Markdown, for pull requests and issues."""

from __future__ import annotations

import re
from typing import Final

from rlmismatch.report.blocks import Block, Cell, Headline, Item, Items, Page, Pairs, Section, Table

MARKS: Final = {"good": "✅", "bad": "❌", "warn": "⚠️", "dim": "ℹ️"}
# An underscore inside a word is no markup.
_SPECIAL: Final = re.compile(r"([\\`*{}\[\]<>#|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def render(content: Page) -> str:
    """The page as Markdown."""
    parts = [f"> [!WARNING]\n> **{_escape(line)}**" for line in content.banner]
    parts += [_headline(content.headline), *(_section(s) for s in content.sections), f"<sub>{_escape(content.title)}</sub>"]
    return "\n\n".join(parts) + "\n"


def _headline(headline: Headline) -> str:
    mark = MARKS["good" if headline.style == "good" else "warn" if headline.style == "warn" else "bad"]
    title = f"# {mark} {headline.word}" + (f" (exit {headline.exit_code})" if headline.exit_code is not None else "")
    return "\n\n".join([title, *([_items(headline.why)] if headline.why else [])])


def _section(section: Section) -> str:
    title = f"## {_escape(section.title)}"
    note = [f"*{_escape(section.note)}*"] if section.note else []
    return "\n\n".join([title, *note, *(_block(b) for b in section.blocks)])


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Items):
        return _items(block.items)
    if isinstance(block, Pairs):
        return "\n".join(f"- **{_escape(label)}**: {_cell(c)}" for label, c in block.pairs)
    return "\n\n".join(_cell(c) for c in block.lines)


def _table(table: Table) -> str:
    head = [" ".join(filter(None, (_escape(c.header), f"({_escape(c.unit)})" if c.unit else ""))) for c in table.columns]
    rule = ["---:" if c.right else ":---" for c in table.columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *([_cell(c) for c in row] for row in table.rows)))


def _cell(c: Cell) -> str:
    text = _escape(c.text.strip())
    return f"**{text}**" if text and c.style in ("bad", "strong") else text


def _items(items: tuple[Item, ...]) -> str:
    return "\n".join(line for item in items for line in _item(item))


def _item(item: Item) -> list[str]:
    tail = f": {_escape(item.tail)}" if item.tail else ""
    head = f"**{_escape(item.head)}**" if item.tail else _escape(item.head)
    head = f"**{_escape(item.lead)}**: {head}" if item.lead else head
    lines = [f"- {MARKS[item.mark]} {head}{tail}"]
    return lines + [f"  - {_escape(label)}{' ' if label else ''}{_escape(text)}" for label, text in item.details]


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
