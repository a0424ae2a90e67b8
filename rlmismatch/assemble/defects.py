"""RECORDED must not mean "never fails": an op far from float64 is a defect, whatever its tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rlmismatch import axes
from rlmismatch.arms import LOCAL
from rlmismatch.assemble import attention
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.engines.protocol import LocalError, SideName
from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

# A native op may be this many times further from float64 than the correctly rounded pin on the same inputs (mean over the op's output).
# Measured on real engines: see docs/measurements.md, "Local errors"; the limit leaves a factor over the worst honest op.
LOCAL_ERROR_RATIO: Final = 4.0
# Megatron's unfused attention rounds scores and probabilities to the model's dtype, and what that costs grows with the scores.
ATTENTION_ERROR_RATIO: Final = 16.0
# Of the result's size: what an honest float32 sum of up to some 1e5 terms may be off by. It decides where results are float32 themselves.
FLOAT32_SUM: Final = 2.0**-16


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One op of one layer on one side whose result is wrong, not merely rounded differently."""

    axis: str
    side: SideName
    boundary: str
    native_error: float  # mean |native - float64|, in the op's unit
    pin_error: float  # mean |pin - float64|
    relative: float  # native_error / mean |float64|

    @property
    def text(self) -> str:
        times = "" if not self.pin_error else f", {self.native_error / self.pin_error:.3g} times the pin's error"
        return f"{self.side} {self.boundary}: {100 * self.relative:.2g} % from float64 on its own inputs{times}"


# A broken contract field of one of these axes says already why the op is not the one that its pin and float64 compute.
_EXPLAINED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "norm": ("model.norm", "model.mode"),
    "qk_norm": ("model.qk_norm",),
    "gemm": ("gemm.forward_reduce", "model.mode"),
    "forward_reduce": ("gemm.forward_reduce",),
    "rope": ("attention.rope",),
    "attention": ("attention.provenance", "attention.precision", "attention.rope", "model.mode"),
    "activation": ("model.activation",),
    "head_gemm": ("logprob.precision", "logprob.head_gemm"),
    "logprob": ("logprob.vocab_padding", "logprob.transform_chain", "logprob.precision", "logprob.reduce", "logprob.selected_gather"),
}


def defects(evidence: Evidence, book: ScoreBook) -> tuple[Defect, ...]:
    """Every op over the limit that no broken contract field explains, worst first."""
    broken = {c.axis for c in evidence.broken}
    sides: tuple[SideName, ...] = ("trainer", "rollout")
    found = [
        Defect(
            axis=_axis(e, evidence, side),
            side=side,
            boundary=e.boundary,
            native_error=e.native_vs_fp64_mean,
            pin_error=e.pin_vs_fp64_mean,
            relative=e.native_vs_fp64_mean / e.fp64_scale if e.fp64_scale else 0.0,
        )
        for side in sides
        for e in (book.arms[side][LOCAL].local if LOCAL in book.arms[side] else [])
        if is_defect(e) and broken.isdisjoint(_EXPLAINED_BY[e.pin]) and not (e.pin == "rope" and attention.shifted_alike(evidence, side))
    ]
    return tuple(sorted(found, key=lambda d: d.native_error / max(d.pin_error, 1e-300), reverse=True))


def _axis(error: LocalError, evidence: Evidence, side: SideName) -> str:
    """The axis that speaks for the pin, but for a log-softmax that was asked to round its sums: that is no matter of its merge."""
    return "logprob.precision" if error.pin == "logprob" and rounds_sums(evidence, side) else axes.PLAYERS[error.pin]


def rounds_sums(evidence: Evidence, name: SideName) -> bool:
    """Whether a side adds up, or hands on, the sum of exponentials in bfloat16."""
    side = evidence.side(name)
    fields = side.readings.get("logprob.precision", {}) if side else {}
    rounded = {"accum_dtype": "bfloat16", "downcast_at": "per_partial"}
    return any(field in fields and fields[field].value == value for field, value in rounded.items())


def is_defect(error: LocalError) -> bool:
    """NaN is a defect too: it is not at most anything."""
    ratio = ATTENTION_ERROR_RATIO if error.pin == "attention" else LOCAL_ERROR_RATIO
    return not error.native_vs_fp64_mean <= ratio * error.pin_vs_fp64_mean + FLOAT32_SUM * error.fp64_scale


@dataclass(frozen=True, kw_only=True)
class OverLimit:
    """A measure that does not hold its limit."""

    axis: str
    text: str


def over_limit(rows: Iterable[MeasureRow]) -> tuple[OverLimit, ...]:
    """Every measure over its limit, in their order."""
    return tuple(
        OverLimit(axis=row.axis, text=f"{row.side} {row.what} is {row.value:.3g}, at most {row.limit:.3g}".strip())
        for row in rows
        if not row.ok
    )
