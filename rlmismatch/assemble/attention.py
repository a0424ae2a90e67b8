"""The attention family from captures: what the rollout's forms and pages come to, and what a reader should be told beside the verdict.

Pure functions of the two sides' captures; the trainer's own measures stand in attention_trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from rlmismatch.arms import ATTENTION, LOCAL, PAGED, PAGED_PINNED
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.contract import Evidence as Known
from rlmismatch.contract import Reading
from rlmismatch.drift import AlignedScores
from rlmismatch.drift.model import Hint
from rlmismatch.engines.protocol import NOT_PACKED, SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

_SIDES: Final[tuple[SideName, ...]] = ("trainer", "rollout")
_SHIFTED: Final = "shifted alike by "  # engines/rope_probe.py: rotation_fields


def notices(evidence: Evidence) -> tuple[Hint, ...]:
    """What decides nothing and must be said: a backend that fell back, positions shifted alike, a window that no token sees past."""
    return tuple(hint for side in _SIDES for hint in (*_fallback(evidence, side), *_shifted(evidence, side), *_window(evidence, side)))


def _reading(evidence: Evidence, side: SideName, axis: str, field: str) -> Reading:
    found = evidence.side(side)
    return found.readings.get(axis, {}).get(field, Reading()) if found else Reading()


def _fallback(evidence: Evidence, side: SideName) -> Iterator[Hint]:
    reason = _reading(evidence, side, "attention.provenance", "fallback_reason")
    if reason.evidence is Known.READ:
        yield Hint(name="backend_fell_back", says=f"{side}: {reason.value}", axis="attention.provenance")


def shifted_alike(evidence: Evidence, side: SideName) -> bool:
    """Whether a side's positions are all shifted alike: its rotated Q and K are others than the reference's, and their products are not."""
    return _SHIFTED in _reading(evidence, side, "attention.rope", "position_ids").source


def _shifted(evidence: Evidence, side: SideName) -> Iterator[Hint]:
    source = _reading(evidence, side, "attention.rope", "position_ids").source
    if _SHIFTED in source:
        text = source[source.index(_SHIFTED) :]
        yield Hint(name="positions_shifted_alike", says=f"{side}: positions are {text}", axis="attention.rope")


def _window(evidence: Evidence, side: SideName) -> Iterator[Hint]:
    window = _reading(evidence, side, "attention.provenance", "sliding_window").value
    longest = max((len(s.token_ids) for s in evidence.sequences), default=0)
    if isinstance(window, int) and not isinstance(window, bool) and window >= longest > 0:
        says = f"{side}: the longest sequence has {longest} tokens, so no number here sees the window of {window}: use longer prompts"
        yield Hint(name="window_not_reached", says=says, axis="attention.provenance", numbers={"window": window, "longest": longest})


def measures(evidence: Evidence, book: ScoreBook) -> tuple[MeasureRow, ...]:
    """Rows of materialization, rope, layout and paged_kv; none without the arms of ``rlmismatch attention``."""
    return (
        *_forms(book),
        *_rope(book),
        *_heads(evidence),
        *_strided(book),
        *_pages(evidence, book),
    )


def _forms(book: ScoreBook) -> Iterator[MeasureRow]:
    """Attention alone between one form and another: everything else is pinned, and so sees no row count."""
    paged = book.arms["rollout"].get(PAGED)
    if paged is None:
        return
    yield _apart(
        "attention.materialization",
        "prefill against decode, all but attention pinned",
        book.aligned(paged.scores["prefill"], paged.scores["decode"]),
    )


def _rope(book: ScoreBook) -> Iterator[MeasureRow]:
    """Rotated Q and K of every layer in units in the last place, against the float64 rotation rounded once."""
    for side in _SIDES:
        arm = book.arms[side].get(LOCAL)
        for name in ("q_rope", "k_rope"):
            errors = [e for e in arm.local if e.boundary.endswith(name)] if arm else []
            count, unequal = sum(e.count for e in errors), sum(e.unequal for e in errors)
            if count:
                beyond = sum(e.beyond_one_ulp for e in errors)
                yield MeasureRow(
                    axis="attention.rope",
                    side=side,
                    what=f"{name[0].upper()} after RoPE, share of elements more than 1 ULP from the reference",
                    value=100.0 * beyond / count,
                    unit="%",
                    note=f"largest {max(e.ulp_max for e in errors):.0f} ULP, where two terms cancel; {unequal} of {count} not as pinned",
                )


def _heads(evidence: Evidence) -> Iterator[MeasureRow]:
    for side in _SIDES:
        reading = _reading(evidence, side, "attention.layout", "tp_head_ownership")
        heads = evidence.run["checkpoint"]["num_heads"]
        if isinstance(reading.value, list):
            ranges = [r for r in reading.value if isinstance(r, list) and len(r) == 2]
            placed = sum(end - start for start, end in ranges)
            yield MeasureRow(
                axis="attention.layout",
                side=side,
                what=f"of {heads} query heads, those that a rank does not hold in the checkpoint's order",
                value=float(heads - placed),
                unit="heads",
                note=reading.source,
            )


def _strided(book: ScoreBook) -> Iterator[MeasureRow]:
    """The trainer's attention, and ours, on views into one packed buffer."""
    arm = book.arms["trainer"].get(ATTENTION)
    for source, words, limit in (("native", "the live attention", None), ("pin", "our kernel", 0.0)):
        found = [x for key, x in (arm.boundaries if arm else {}).items() if key.startswith(f"layout/{source}/")]
        if found:
            unequal, count = (int(sum(float(x[i]) for x in found)) for i in (0, 1))
            yield MeasureRow(
                axis="attention.layout",
                side="trainer",
                what=f"{words} on strided views of one Q, K, V buffer, against contiguous operands",
                value=float(unequal),
                unit="elements unequal",
                limit=limit,
                note=f"of {count}",
            )


_PAGE_PAIRS: Final = (
    ("attention.layout", "prefill", "prefill_packed", "all sequences packed into one prefill, against each alone"),
    ("attention.paged_kv", "prefill", "prefill_shuffled", "prefill on shuffled pages"),
    ("attention.paged_kv", "decode", "decode_shuffled", "decode on shuffled pages"),
    ("attention.paged_kv", "decode", "decode_hit", "decode behind a prefix hit"),
)


def _pages(evidence: Evidence, book: ScoreBook) -> Iterator[MeasureRow]:
    for name, words, limit in ((PAGED, "all but attention pinned", None), (PAGED_PINNED, "every axis pinned", 0.0)):
        arm = book.arms["rollout"].get(name)
        if arm is None:
            continue
        for axis, first, second, what in _PAGE_PAIRS:
            why = next((n.removeprefix(NOT_PACKED) for n in arm.notes if n.startswith(NOT_PACKED)), "")
            if second == "prefill_packed" and why:
                yield MeasureRow(axis=axis, side="rollout", what=f"{what}, {words}", value=None, note=why)
            elif second in arm.scores:
                aligned = book.aligned(arm.scores[first], arm.scores[second])
                # A plant that breaks the cache breaks its pin's operands too: the contract says so, and this is no second finding.
                yield _apart(axis, f"{what}, {words}", aligned, None if evidence.broken else limit)
    survived = _reading(evidence, "rollout", "attention.paged_kv", "prefix_cache_hits")
    if isinstance(survived.value, int) and PAGED in book.arms["rollout"]:
        yield MeasureRow(
            axis="attention.paged_kv",
            side="rollout",
            what="tokens of an older prefix that outlive a weight update where nothing resets the cache",
            value=float(survived.value),
            unit="tokens",
            note="vLLM does not reset it by itself: call reset_prefix_cache() at every update" if survived.value else "",
        )


def _apart(axis: str, what: str, aligned: AlignedScores | None, limit: float | None = None) -> MeasureRow:
    """How far two score sets of the rollout lie apart, the largest; expected exactly zero."""
    if aligned is None:
        return MeasureRow(axis=axis, side="rollout", what=what, value=None, note="not taken")
    if aligned.invalid:  # taken, and no number: within no limit
        return MeasureRow(axis=axis, side="rollout", what=what, value=math.nan, limit=limit, note=aligned.invalid[0].text)
    delta = abs(aligned.delta_N)
    return MeasureRow(
        axis=axis,
        side="rollout",
        what=what,
        value=float(delta.max()) if len(delta) else math.nan,
        limit=limit,
        note=f"{int((delta != 0).sum())} of {aligned.tokens} tokens unequal",
    )
