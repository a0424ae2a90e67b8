"""Prints docs/axes.md: ``python -m rlmismatch.axes > docs/axes.md``."""

from __future__ import annotations

import sys

from rlmismatch.axes import ALL, FAMILIES, family
from rlmismatch.axes.base import Axis
from rlmismatch.contract import Tier

_HEAD = """\
# The axes

What can differ between a trainer and a rollout, one row each. Written by `python -m rlmismatch.axes > docs/axes.md`; a test
holds it current.

Tiers belong to fields. **I** identical: differs or missing, and the sides are not comparable, the numbers void. **S** semantic:
differs, or is unknown where it applies, and the contract fails. **R** recorded: shown, never compared for equality; an error over
budget against the float64 oracle is a defect.

Built: **complete** (its fields are read, its knobs work in both engines, and its numbers come from a pin or from measures) · **pin
only** (the pin and its numbers are there, the knobs are not yet) · **contract only** (its fields are read and compared, nothing gives
numbers) · **not built** (listed; asking for it by name exits 7).
"""
_COLUMNS = ("axis", "asks", "knobs", "fields", "pin", "structural zero", "trap", "plants", "built")


def render() -> str:
    """The whole document, in Markdown."""
    counts = {name: len(family(name)) for name in FAMILIES}
    parts = [_HEAD, f"{len(ALL)} axes: " + ", ".join(f"{n} {name}" for name, n in counts.items()) + ".\n"]
    for name in FAMILIES:
        rows = [_row(a) for a in family(name)]
        parts.append("\n".join([f"## {name}\n", _line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *map(_line, rows)]) + "\n")
    return "\n".join(parts)


def _row(axis: Axis) -> list[str]:
    tiers = {t: [f.name for f in axis.fields if f.tier is t] for t in Tier}
    return [
        f"`{axis.id}`" + (f" ({axis.side} only)" if axis.side != "both" else ""),
        axis.asks,
        "<br>".join(f"`{knob}`: {' / '.join(values) or 'free'}" for knob, values in axis.knobs.items()),
        "<br>".join(f"**{t.value[0].upper()}** {', '.join(names)}" for t, names in tiers.items() if names),
        axis.pin or "none",
        "<br>".join(axis.zero.values()),
        axis.trap,
        "<br>".join(f"`{p.id}` → {p.verdict}{'' if p.built else ' (not built)'}" for p in axis.plants),
        axis.built.replace("_", " "),
    ]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(render())
