"""The page as one self-contained HTML file: no script, no link, light and dark."""

from __future__ import annotations

from html import escape
from typing import Final

from rlmismatch.report.blocks import Block, Cell, Headline, Item, Items, Page, Pairs, Section, Table

MARKS: Final = {"good": "✓", "bad": "✗", "warn": "!", "dim": "·"}
_CSS: Final = """
:root {
  color-scheme: light dark; --fg: #1c1f24; --bg: #fff; --dim: #68707c; --line: #d9dde3; --good: #17803d; --bad: #c0262d; --warn: #8a6100;
  --bar: #2b8aa3;
}
@media (prefers-color-scheme: dark) {
  :root { --fg: #d9dce1; --bg: #14161a; --dim: #8b929d; --line: #33373f; --good: #50c878; --bad: #ff6b6b; --warn: #e6be46; --bar: #5ac8dc; }
}
body {
  font: 14px/1.45 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem;
}
h1 { font-size: 1.3rem; margin: 0 0 .5rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
h2 small { color: var(--dim); font-weight: normal; }
.headline { border: 1px solid; border-radius: 6px; padding: .8rem 1rem; }
.headline * { color: var(--fg); }
.headline h1 { color: inherit; }
.banner { background: #a3218f; color: #fff; font-weight: bold; padding: .5rem 1rem; border-radius: 6px; margin-bottom: .6rem; }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: bottom; white-space: nowrap; }
th { color: var(--dim); font-weight: normal; border-bottom: 1px solid var(--line); }
.right { text-align: right; }
ul { list-style: none; padding: 0; margin: .3rem 0; }
ul ul { padding-left: 1.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .3rem 0; }
dt, .dim, .label { color: var(--dim); }
dd { margin: 0; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
.warn { color: var(--warn); }
.strong { font-weight: 600; }
.bar { display: inline-block; height: .7em; background: var(--bar); margin-right: .4rem; }
"""


def render(content: Page) -> str:
    """The page as an HTML document."""
    body = [f'<p class="banner">{escape(line)}</p>' for line in content.banner]
    body += [_headline(content.headline), *(_section(s) for s in content.sections), f'<p class="dim">{escape(content.title)}</p>']
    title = f"{content.headline.word} - {content.title}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _headline(headline: Headline) -> str:
    code = f" &nbsp;exit {headline.exit_code}" if headline.exit_code is not None else ""
    return f'<div class="headline {headline.style}">\n<h1>{escape(headline.word)}{code}</h1>\n{_items(headline.why)}\n</div>'


def _section(section: Section) -> str:
    note = f" <small>{escape(section.note)}</small>" if section.note else ""
    return "\n".join([f"<h2>{escape(section.title)}{note}</h2>", *(_block(b) for b in section.blocks)])


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Items):
        return _items(block.items)
    if isinstance(block, Pairs):
        return "<dl>\n" + "\n".join(f"<dt>{escape(label)}</dt><dd>{_cell(c)}</dd>" for label, c in block.pairs) + "\n</dl>"
    return "\n".join(f"<p>{_cell(c)}</p>" for c in block.lines)


def _table(table: Table) -> str:
    sides = [' class="right"' if c.right else "" for c in table.columns]
    head = "".join(
        f"<th{side}>{escape(c.header)}{f'<br>{escape(c.unit)}' if c.unit else ''}</th>"
        for c, side in zip(table.columns, sides, strict=True)
    )
    rows = ["".join(f"<td{side}>{_cell(c)}</td>" for c, side in zip(row, sides, strict=True)) for row in table.rows]
    return "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in (head, *rows)) + "\n</table>"


def _cell(c: Cell) -> str:
    bar = f'<span class="bar" style="width:{8 * c.bar:.3f}rem"></span>' if c.bar is not None else ""
    text = escape(c.text)
    return bar + (f'<span class="{c.style}">{text}</span>' if c.style else text)


def _items(items: tuple[Item, ...]) -> str:
    return "<ul>\n" + "\n".join(_item(item) for item in items) + "\n</ul>"


def _item(item: Item) -> str:
    lead = f"<strong>{escape(item.lead)}</strong>: " if item.lead else ""
    tail = f" &nbsp;{escape(item.tail)}" if item.tail else ""
    details = "".join(f'<li><span class="label">{escape(label)}</span> {escape(text)}</li>' for label, text in item.details)
    below = f"<ul>{details}</ul>" if details else ""
    return f'<li><span class="{item.mark}">{MARKS[item.mark]}</span> {lead}{escape(item.head)}{tail}{below}</li>'
