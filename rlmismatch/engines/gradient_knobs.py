"""The knobs of the trainer's backward as a run asks for them, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rlmismatch.engines.logprob_knobs import Outcome, applied, unsupported
from rlmismatch.pins.megatron_gradients import Choice

DGRAD: Final = "gemm.dgrad_reduce"
WGRAD: Final = "gemm.wgrad_accumulate"


def base_choice(knobs: Mapping[str, Any], pins: frozenset[str]) -> Choice:
    """The backward of a run without further pins: what its knobs hold."""
    return Choice(
        pins=pins,
        dgrad="rank_order" if knobs.get(DGRAD) == "rank_order" else "native",
        wgrad="explicit" if knobs.get(WGRAD) == "explicit" else "native",
    )


def outcomes(knobs: Mapping[str, Any], *, tp: int, fused: str) -> dict[str, Outcome]:
    """knob -> what became of it. fused: who adds dW inside the GEMM in the live trainer; "" if nobody can."""
    out: dict[str, Outcome] = {}
    if DGRAD in knobs:
        out[DGRAD] = applied(knobs[DGRAD], "one rank: dX is whole" if tp == 1 else "")
    if WGRAD in knobs:
        value = knobs[WGRAD]
        if value == "fused" and not fused:
            missing = "neither fused_weight_gradient_mlp_cuda (Apex) nor Transformer Engine can be imported here"
            out[WGRAD] = unsupported(value, "explicit, dW rounded to the model's dtype", missing)
        else:
            out[WGRAD] = applied(value, fused if value == "fused" else "")
    return out
