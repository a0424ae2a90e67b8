"""Cells and columns that hold numbers."""

from __future__ import annotations

from typing import Final

from rlmismatch.report.blocks import Cell, Column
from rlmismatch.report.numbers import number, of

NATS: Final = "nats"


def numeric(header: str, unit: str = "") -> Column:
    """A right-aligned column, never cut."""
    return Column(header=header, unit=unit, right=True)


def nats(x: float | None, *, signed: bool = False) -> Cell:
    """A number of nats, or of an op's own unit; exactly zero stands out."""
    return Cell(text=number(x, signed=signed), style="dim" if x is None else "good" if x == 0 else "")


def unequal(n: int | None, tokens: int) -> Cell:
    """``3 of 111``: how many of the compared ones differ."""
    return Cell(text=of(n, tokens), style="dim" if n is None else "good" if n == 0 and tokens else "")
