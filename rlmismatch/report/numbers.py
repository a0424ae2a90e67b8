"""How values are written. Three significant digits; ``0`` only for exactly zero; an em dash for what was not measured."""

from __future__ import annotations

import json
import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

NOT_MEASURED: Final = "—"


def number(x: float | None, *, signed: bool = False, digits: int = 3) -> str:
    """``0.0132``, ``1.32e-7``, ``12.3``, ``0``, ``inf``, ``—``; with a plus sign where `signed` and above zero."""
    if x is None:
        return NOT_MEASURED
    if x == 0:
        return "0"
    sign = "+" if signed and x > 0 else ""
    if not math.isfinite(x):
        return f"{sign}{x}"
    # Rounded first, so that 0.0009999 becomes 0.00100 and not 1.00e-3 beside a neighbour written otherwise.
    scientific = f"{x:.{digits - 1}e}"
    if 1e-3 <= abs(float(scientific)) < 10**digits:
        return f"{sign}{x:#.{digits}g}".rstrip(".")
    mantissa, exponent = scientific.split("e")
    return f"{sign}{mantissa}e{int(exponent)}"


def probability_ratio(x: float | None) -> str:
    """A mean of e^|d|: two more digits, since all the drift is behind the 1; ``1`` only for exactly one."""
    return "1" if x == 1 else number(x, digits=5)


def percent(share: float | None) -> str:
    """``51.2 %``; exactly 0 and 1 alone are written ``0 %`` and ``100 %``."""
    if share is None:
        return NOT_MEASURED
    if not math.isfinite(share):
        return str(share)
    if share == 0:
        return "0 %"
    if abs(share) < 1e-3:
        return "<0.1 %"
    text = f"{100 * share:#.3g}".rstrip(".")
    if text == "100" and share != 1:
        return ">99.9 %" if share < 1 else ">100 %"
    return f"{text} %"


def count(n: int | None) -> str:
    """``12,345``; an em dash for None."""
    return NOT_MEASURED if n is None else f"{n:,}"


def of(part: int | None, whole: int) -> str:
    """``3 of 111``."""
    return NOT_MEASURED if part is None else f"{part:,} of {whole:,}"


def plural(n: int, word: str) -> str:
    """``1 tensor``, ``27 tensors``; 'sequence' and the like only, no irregular words."""
    return f"{n:,} {word}" + ("" if n == 1 else "s")


def passing_limit(x: float, *, at_least: bool = False, digits: int = 4) -> str:
    """A short number that `x` is still within when it is given as a limit: rounded up, or down for a lower limit."""
    if x == 0 or not math.isfinite(x):
        return number(x)
    rounding = ROUND_FLOOR if at_least else ROUND_CEILING
    exact = Decimal(x)
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding=rounding)):.{digits}g}"


def value(x: Any, *, limit: int = 160) -> str:
    """A JSON value on one line, all digits kept, cut to `limit` characters. Control characters are escaped, a sha256 is cut to 12."""
    if isinstance(x, str) and re.fullmatch(r"[0-9a-f]{64}", x):
        return f"{x[:12]}…"
    text = x if isinstance(x, str) else "none" if x is None else json.dumps(x, ensure_ascii=False)
    return shorten(printable(text), limit) if text else '""'


def printable(text: str) -> str:
    """Text with everything that could move a cursor or break a line written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
