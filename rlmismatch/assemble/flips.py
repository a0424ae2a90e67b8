"""The measures of gemm.runtime_flags: what each flag of a side's process does to that side's products (engines/gemm_flips.py).

Pure functions of the capture of the arm ``gemm``. A row a flag, and under a flag that moves anything a row for each kind of product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlmismatch.arms import GEMM
from rlmismatch.assemble.gemm import captured, share
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst_of
from rlmismatch.engines.gemm_facts import NOT_FLIPPED, FlagFacts, joined, packed, unpacked
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import ControlRow, MeasureRow
from rlmismatch.report.numbers import number, plural

AXIS: Final = "gemm.runtime_flags"
KINDS: Final = ("qkv", "o_proj", "gate_up", "down_proj", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One flag of one side, and what its flip did to each product: (product's name, its rows) -> facts."""

    side: SideName
    flag: str
    before: str
    after: str
    products: Mapping[tuple[str, str], FlagFacts]

    @property
    def words(self) -> str:
        return f"{self.flag} {self.before} → {self.after}"

    @property
    def whole(self) -> FlagFacts:
        return _joined(self.products.values())


def _joined(facts: Iterable[FlagFacts]) -> FlagFacts:
    (whole,) = unpacked({"flag/whole": joined([packed(f) for f in facts], FlagFacts)}, "flag", FlagFacts).values()
    return whole


def flips(book: ScoreBook) -> tuple[Flip, ...]:
    """Every flag that was flipped, trainer first."""
    out = []
    for side, tensors in captured(book).items():
        by_flag: dict[tuple[str, str, str], dict[tuple[str, str], FlagFacts]] = {}
        for (flag, before, after, product, rows), f in unpacked(tensors, "flag", FlagFacts).items():
            by_flag.setdefault((flag, before, after), {})[product, rows] = f
        out += [Flip(side=side, flag=flag, before=before, after=after, products=found) for (flag, before, after), found in by_flag.items()]
    return tuple(out)


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """The worst flag of both sides; then every flag of each side, moved or not, and those that a live process cannot flip."""
    found = flips(book)
    if not found:
        return ()
    most = worst_of(found, lambda flip: _percent(flip.whole))
    floor = worst_of(found, lambda flip: flip.whole.unequal_floor)
    rows = [
        MeasureRow(
            axis=AXIS,
            what="elements that the worst flipped flag moves",
            value=_percent(most.whole),
            unit="%",
            note=f"{most.side}, {most.words}" if most.whole.unequal else f"of {len(found)} flags flipped",
        ),
        MeasureRow(
            axis=AXIS,
            what="elements that move with no flag flipped",
            value=100 * floor.whole.unequal_floor / floor.whole.count,
            unit="%",
            note="the floor: each product again, as it is",
        ),
    ]
    for flip in found:
        rows += _rows(flip)
    return (*rows, *_refused(book))


def _rows(flip: Flip) -> Iterator[MeasureRow]:
    yield _row(flip, "", flip.products)
    if not flip.whole.unequal:
        return
    for kind in KINDS:
        products = {key: f for key, f in flip.products.items() if key[0].split(".")[-1] == kind}
        if products:
            yield _row(flip, f", {kind}", products)


def _row(flip: Flip, where: str, products: Mapping[tuple[str, str], FlagFacts]) -> MeasureRow:
    whole = _joined(products.values())
    rows = sorted({int(m) for _, m in products})
    names = {name for name, _ in products}
    note = [
        f"{whole.unequal:,.0f} of {whole.count:,.0f} elements in {plural(len(names), 'product')} at M = {_listed(rows)}",
        f"floor {whole.unequal_floor:,.0f}",
    ]
    if whole.unequal:
        product, m = worst_of(products, lambda key: _percent(products[key]))
        note += [
            f"moved by {number(share(whole.difference, whole.scale))} of the result, at most by {whole.largest:.3g}",
            f"off float64 by {number(share(whole.native_error, whole.scale))}, flipped {number(share(whole.flipped_error, whole.scale))}",
            f"most in {product}, M = {m}",
        ]
    what = f"flipped: {flip.words}{where}"
    return MeasureRow(axis=AXIS, side=flip.side, what=what, value=_percent(whole), unit="%", note="; ".join(note))


def _refused(book: ScoreBook) -> Iterator[MeasureRow]:
    for side in captured(book):
        for note in book.arms[side][GEMM].notes:
            if note.startswith(NOT_FLIPPED):
                flag, _, why = note.removeprefix(NOT_FLIPPED).partition(": ")
                yield MeasureRow(axis=AXIS, side=side, what=f"not flipped: {flag}", value=None, unit="", note=why)


def controls(book: ScoreBook) -> tuple[ControlRow, ...]:
    """That each side's flags are back: they were read back in the process, and each product gives what it gave before."""
    out = []
    for side in captured(book):
        mine = [flip for flip in flips(book) if flip.side == side]
        if not mine:
            continue
        moved = sum(flip.whole.unequal_after for flip in mine)
        floor = sum(flip.whole.unequal_floor for flip in mine)
        got = f"{len(mine)} flags read back; {moved:.0f} elements of products differ" + (
            f", and {floor:.0f} by themselves" if floor else ""
        )
        name, expected = f"{side}: flipped flags are put back", "native bits return"
        out.append(ControlRow(name=name, expected=expected, got=got, ok=not moved or bool(floor)))
    return tuple(out)


def _percent(f: FlagFacts) -> float:
    return 100 * f.unequal / f.count if f.count else float("nan")


def _listed(rows: Sequence[int]) -> str:
    return " and ".join(map(str, rows))
