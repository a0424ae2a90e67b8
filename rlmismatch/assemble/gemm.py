"""The GEMM family's measures: pure functions of the two sides' captures of the arm ``gemm`` (engines/gemm_probe.py).

Errors are against float64, mean over the elements, as a share of the result's mean size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.arms import GEMM
from rlmismatch.assemble.defects import FLOAT32_SUM, LOCAL_ERROR_RATIO
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.assemble.worst import worst
from rlmismatch.engines.gemm_facts import AloneFacts, ReplayFacts, SumFacts, unpacked
from rlmismatch.engines.protocol import SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import CollectiveRow, ControlRow, MeasureRow, ReplayRow
from rlmismatch.report.numbers import number

FULL: Final = "full"
_SIDES: Final[tuple[SideName, ...]] = ("trainer", "rollout")
_REDUCE: Final = "gemm.forward_reduce"
BACKEND: Final = "rollout.all_reduce_backend"


def captured(book: ScoreBook) -> dict[SideName, Mapping[str, torch.Tensor]]:
    """Side -> the tensors of its arm ``gemm``."""
    return {side: book.arms[side][GEMM].boundaries for side in _SIDES if GEMM in book.arms[side]}


def replay(book: ScoreBook) -> tuple[ReplayRow, ...]:
    """Every product of both sides, in the order of the forward pass, rows ascending."""
    out = []
    for side, tensors in captured(book).items():
        facts = unpacked(tensors, "replay", ReplayFacts)
        for (product, rows), f in sorted(facts.items(), key=lambda item: _order(*item[0])):
            out.append(
                ReplayRow(
                    side=side,
                    product=product,
                    rows=rows,
                    count=int(f.count),
                    unequal_pin=int(f.unequal_pin),
                    unequal_full=int(f.unequal_full),
                    native_error=share(f.native_error, f.scale),
                    pin_error=share(f.pin_error, f.scale),
                    largest_pin=f.largest_pin,
                    largest_full=f.largest_full,
                )
            )
    return tuple(out)


COLUMNS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def _order(product: str, rows: str) -> tuple[float, int, float]:
    parts = product.split(".")
    return int(parts[1]) if len(parts) > 1 else math.inf, COLUMNS.index(parts[-1]), math.inf if rows == FULL else int(rows)


def collectives(book: ScoreBook) -> tuple[CollectiveRow, ...]:
    """What the rollout's TP group ran in the steps of the arm, prefill first, by operation and payload."""
    found = {n.split("/", 1)[1]: t.tolist() for n, t in captured(book).get("rollout", {}).items() if n.startswith("collective/")}
    out = []
    for name, (calls, steps) in found.items():
        phase, op, backend, dtype, size = name.split("/")
        if steps:  # what ran outside of any step is a trial of ours
            row = CollectiveRow(
                phase=phase, op=op, backend=backend, dtype=dtype, size_bytes=int(size), calls=int(calls), per_step=calls / steps
            )
            out.append(row)
    return tuple(sorted(out, key=lambda r: (("prefill", "mixed", "decode").index(r.phase), r.op, r.backend, r.dtype, r.size_bytes)))


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Every measure of the family's forward half, in the order of its axes; none without the arm ``gemm``."""
    return (*alone(book), *sums(book), *backends(book))


def backends(book: ScoreBook) -> tuple[MeasureRow, ...]:
    """The rollout's all-reduces on its own partials: as its layers call it, and each backend by itself."""
    tensors = captured(book).get("rollout", {})
    dtype = _payload(tensors)
    sums = unpacked(tensors, "sum", SumFacts)
    live = {("as its layers call it", rows): f for (way, payload, rows), f in sums.items() if (way, payload) == ("all_reduce", dtype)}
    alone = {(name, rows): f for (name, rows), f in unpacked(tensors, "backend", SumFacts).items()}
    out = []
    for (name, rows), f in (live | alone).items():
        ordered = sums["rank_order", dtype, rows]
        out.append(_sum_row(BACKEND, "rollout", f"{name}, {rows} rows: error of the sum", f, ordered))
    if out:
        names = ", ".join(dict.fromkeys(name for name, _ in live | alone))
        error = worst(row.value or 0.0 for row in out)
        out.insert(0, MeasureRow(axis=BACKEND, what="error of the worst all-reduce", value=error, unit="", note=f"of {names}"))
    return tuple(out)


def sums(book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Row-parallel partials through every way to sum, at both row counts and in both payloads, and what the order and the dtype do."""
    out: list[MeasureRow] = []
    order: dict[str, list[tuple[str, SumFacts]]] = {}
    errors: dict[str, list[float]] = {}
    for side, tensors in captured(book).items():
        found = unpacked(tensors, "sum", SumFacts)
        for (way, payload, rows), f in found.items():
            what = f"{way}, {payload} payload, {rows} rows: error of the sum"
            out.append(_sum_row(_REDUCE, side, what, f, found["rank_order", payload, rows]))
            errors.setdefault(payload, []).append(share(f.error, f.scale) or 0.0)
            if way != "rank_order":
                order.setdefault(payload, []).append((f"{side} {way} at {rows} rows", f))
    return (*_order_and_dtype(order, errors), *out)


def _order_and_dtype(order: Mapping[str, list[tuple[str, SumFacts]]], errors: Mapping[str, list[float]]) -> Iterator[MeasureRow]:
    for payload, ways in order.items():
        name, most = max(ways, key=lambda item: item[1].unequal / item[1].count)
        yield MeasureRow(
            axis=_REDUCE,
            what=f"elements not as in rank order, {payload} payload",
            value=100 * most.unequal / most.count,
            unit="%",
            note=f"most in {name}; {most.unequal_rounded:.0f} of {most.count:.0f} after rounding to the model's dtype",
        )
    for payload, found in errors.items():
        yield MeasureRow(axis=_REDUCE, what=f"error of the sum, {payload} payload", value=worst(found), unit="")


def _sum_row(axis: str, side: SideName, what: str, f: SumFacts, ordered: SumFacts) -> MeasureRow:
    """Its limit is what an honest sum of the same payload has: a multiple of rank order's own error, and float32's."""
    allowed = LOCAL_ERROR_RATIO * (share(ordered.error, ordered.scale) or 0.0) + FLOAT32_SUM
    note = f"{f.unequal:.0f} of {f.count:.0f} elements other than in rank order; from what was sent: {number(share(f.sum_error, f.scale))}"
    return MeasureRow(axis=axis, side=side, what=what, value=share(f.error, f.scale), unit="", limit=allowed, note=note)


def _payload(tensors: Mapping[str, torch.Tensor]) -> str:
    """The model's own dtype among the payloads: the one that is not there to hold the unrounded partials."""
    payloads = {name.split("/")[2] for name in tensors if name.startswith("sum/")}
    return next((p for p in sorted(payloads) if p != "float32"), "float32")


def alone(book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Log-probs of the live engines that move when the same tokens are scored among fewer rows."""
    axis, found = "gemm.runtime_flags", []
    for side, tensors in captured(book).items():
        found += [(side, path, f) for (path,), f in unpacked(tensors, "alone", AloneFacts).items()]
    rows = [
        MeasureRow(
            axis=axis,
            side=side,
            what=f"{path}: log-probs that move among fewer rows",
            value=f.unequal,
            unit="tokens",
            note=f"of {f.tokens:.0f} tokens; largest {f.largest:.3g} nats",
        )
        for side, path, f in found
    ]
    if not found:
        return ()
    moved, tokens = (sum(getattr(f, name) for _, _, f in found) for name in ("unequal", "tokens"))
    whole = MeasureRow(axis=axis, what="log-probs that move among fewer rows", value=moved, unit="tokens", note=f"of {tokens:.0f}")
    return (whole, *rows)


@dataclass(frozen=True, kw_only=True)
class BrokenPromise:
    """A side that says that it is batch-invariant, and is not."""

    axis: str
    text: str


def broken_promises(evidence: Evidence, book: ScoreBook) -> tuple[BrokenPromise, ...]:
    """The first product of each promising side whose bits depend on M, or else the whole engine's."""
    out = []
    for side, where in evidence.promised.items():
        tensors = captured(book).get(side, {})
        moved = [row for row in replay(book) if row.side == side and row.rows != FULL and row.unequal_full]
        whole = [f for f in unpacked(tensors, "alone", AloneFacts).values() if f.unequal]
        promise = f"batch invariance is promised ({where})"
        if moved:
            first = moved[0]
            more = f", and {len({r.product for r in moved}) - 1} more products" if len({r.product for r in moved}) > 1 else ""
            text = (
                f"{side} {first.product} gives other bits at M = {first.rows} than at all rows"
                f" ({first.unequal_full} of {first.count} elements{more}), though {promise}"
            )
            out.append(BrokenPromise(axis="gemm.kernel", text=text))
        elif whole:
            text = f"{side}: {whole[0].unequal:.0f} of {whole[0].tokens:.0f} log-probs move when scored among fewer rows, though {promise}"
            out.append(BrokenPromise(axis="gemm.runtime_flags", text=text))
    return tuple(out)


def controls(evidence: Evidence, book: ScoreBook) -> tuple[ControlRow, ...]:
    """That each promise of batch invariance was put to the test: one that nothing was held against is not kept."""
    rows = []
    for side in evidence.promised:
        tensors = captured(book).get(side, {})
        products = sum(int(f.count) for (_, m), f in unpacked(tensors, "replay", ReplayFacts).items() if m != FULL)
        tokens = sum(int(f.tokens) for f in unpacked(tensors, "alone", AloneFacts).values())
        got = f"{products} elements of products and {tokens} log-probs" if products and tokens else "not tried in this run"
        name = f"{side}: the promise of batch invariance is tried"
        rows.append(ControlRow(name=name, expected="rows alone and among others", got=got, ok=bool(products and tokens)))
    return tuple(rows)


def share(total: float, scale: float) -> float | None:
    """An error as a share of the result's size: None where nothing was compared, infinite where the result ought to be zero."""
    if scale:
        return total / scale
    return math.inf if total else None
