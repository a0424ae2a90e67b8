"""Which attention ran, layer by layer and phase by phase, as a side's trial saw it: JSON for the side's provenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmismatch.engines.attention_probe import Operator, as_asked


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Of one layer. kernel: the function that was called, where it has a name of its own; calls: of it in the trial."""

    backend: str
    kernel: str
    calls: int


def rows(phase: str, ran: Sequence[Ran], operators: Sequence[Operator], *, scale: float, kv_dtype: str) -> list[dict[str, Any]]:
    """One row a layer: what ran, and what its answers to known operands show that it computes (None: they fit nothing).

    scale: what the engine says that it is; it stands where the trial reproduces it.
    """
    return [
        {
            "layer": layer,
            "phase": phase,
            "backend": one.backend,
            "kernel": one.kernel,
            "calls": one.calls,
            "mask": found.mask,
            "window": found.window,
            "scale": as_asked(found.scale, scale),
            "soft_cap": None if found.soft_cap is None else float(f"{found.soft_cap:.3g}"),
            "sink": _sink(found.sink_logits),
            "kv_dtype": kv_dtype,
        }
        for layer, (one, found) in enumerate(zip(ran, operators, strict=True))
    ]


def _sink(logits: tuple[float, ...] | None) -> float | None:
    """The largest sink logit of a layer's heads, to two digits; None where there is none, or nothing is known."""
    return float(f"{max(logits):.2g}") if logits else None
