"""Every axis, looked up by id, family, knob, pin or plant. Data only: importing this loads neither torch nor an engine."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, get_args

from rlmismatch.axes.attention import ATTENTION
from rlmismatch.axes.base import Axis, Family, Plant, Setup
from rlmismatch.axes.gemm import GEMM
from rlmismatch.axes.logprob import LOGPROB
from rlmismatch.axes.model import MODEL
from rlmismatch.contract import Evidence, FieldSpec, Reading, Readings, Sides
from rlmismatch.errors import EnvironmentUnfitError, UsageError

__all__ = [
    "ALL",
    "CAUSAL_ORDER",
    "FAMILIES",
    "PLAYERS",
    "Axis",
    "Family",
    "Plant",
    "Setup",
    "axes_of_plant",
    "axis_of_knob",
    "built",
    "by_id",
    "contract_fields",
    "family",
    "field_by_key",
    "implied_waivers",
    "one_sided",
    "plant",
    "unreported_fallbacks",
]

ALL: Final[tuple[Axis, ...]] = GEMM + ATTENTION + LOGPROB + MODEL
FAMILIES: Final[tuple[Family, ...]] = get_args(Family)

# The pins that attribution plays with, in the order of the forward pass, each with the axis that speaks for it.
PLAYERS: Final[Mapping[str, str]] = {
    "norm": "model.norm",
    "qk_norm": "model.qk_norm",
    "gemm": "gemm.kernel",
    "forward_reduce": "gemm.forward_reduce",
    "rope": "attention.rope",
    "attention": "attention.precision",
    "activation": "model.activation",
    "head_gemm": "logprob.head_gemm",
    "logprob": "logprob.reduce",
}

# Most causal first: what explains the axes below it when several fail. The gates; then what decides which distribution is meant;
# then the model's formulas in the order of the forward pass; then the arithmetic; last what only describes the processes.
CAUSAL_ORDER: Final[tuple[str, ...]] = (
    "model.tokens",
    "model.weights",
    "model.mode",
    "logprob.transform_chain",
    "logprob.selected_gather",
    "logprob.vocab_padding",
    "model.norm",
    "model.qk_norm",
    "attention.merge_order",  # how a sequence is cut over ranks decides which positions and masks a rank sees
    "attention.rope",
    "attention.layout",
    "attention.provenance",
    "attention.paged_kv",
    "model.activation",
    "attention.lse",
    "attention.precision",
    "attention.materialization",
    "logprob.precision",
    "logprob.head_gemm",
    "logprob.vocab_shards",
    "logprob.reduce",
    "logprob.merge_order",
    "logprob.fusion",
    "gemm.forward_reduce",
    "gemm.kernel",
    "rollout.all_reduce_backend",
    "attention.backend_reuse",
    "attention.backward",
    "logprob.backward",
    "gemm.dgrad_reduce",
    "gemm.wgrad_accumulate",
    "model.compile",
    "logprob.provenance",
    "gemm.runtime_flags",
)

_FLAGS: Final = "gemm.runtime_flags"
_TP_KEY: Final = f"{_FLAGS}:tensor_parallel_size"
_CP_KEY: Final = "attention.provenance:context_parallel_size"


def by_id(axis_id: str) -> Axis:
    """The axis of that id. Raises UsageError, with the nearest known id, for another."""
    found = next((a for a in ALL if a.id == axis_id), None)
    if found is None:
        raise UsageError("axis-unknown", f"there is no axis {axis_id!r}", hint=_nearest(axis_id, (a.id for a in ALL)))
    return found


def family(name: str) -> tuple[Axis, ...]:
    """The axes of one family, in table order. Raises UsageError for an unknown family."""
    if name not in FAMILIES:
        raise UsageError("family-unknown", f"there is no family {name!r}", hint=_nearest(name, FAMILIES))
    return tuple(a for a in ALL if a.family == name)


def built() -> tuple[Axis, ...]:
    """The axes whose fields are read and compared today: all but those that are not built."""
    return tuple(a for a in ALL if a.built != "not_built")


def contract_fields(axes: Iterable[Axis]) -> dict[str, tuple[FieldSpec, ...]]:
    """Axis id -> its fields, as `contract.compare` takes them."""
    return {a.id: a.fields for a in axes}


def one_sided(axes: Iterable[Axis]) -> dict[str, Sides]:
    """Axis id -> the one side that has it, for `contract.compare`."""
    return {a.id: a.side for a in axes if a.side != "both"}


def field_by_key(key: str) -> tuple[Axis, FieldSpec]:
    """The field that ``"axis:field"`` names. Raises UsageError, with the nearest known key, for another."""
    keys = {f"{a.id}:{f.name}": (a, f) for a in ALL for f in a.fields}
    if key not in keys:
        raise UsageError("field-unknown", f"there is no contract field {key!r}", hint=_nearest(key, keys))
    return keys[key]


def axis_of_knob(knob: str) -> Axis | None:
    """The axis that a knob belongs to; None for a setting that is no axis' knob.

    The table names some knobs after the side that has them (``training.deterministic_mode``), the command line after its family.
    """
    own, _, name = knob.partition(".")
    named = [(a, k.partition(".")) for a in ALL for k in a.knobs]
    exact = next((a for a, (prefix, _, rest) in named if (prefix, rest) == (own, name)), None)
    return exact or next((a for a, (_, _, rest) in named if rest == name and a.family == own), None)


def axes_of_plant(plant_id: str) -> tuple[Axis, ...]:
    """The axes that list a plant of that id; none for an unknown one."""
    return tuple(a for a in ALL if any(p.id == plant_id for p in a.plants))


def plant(plant_id: str, side: Literal["trainer", "rollout"]) -> tuple[Axis, Plant]:
    """The built plant of that id, and its axis.

    Raises UsageError for an unknown plant or a side where the fault cannot exist, EnvironmentUnfitError for one that is not built.
    """
    listed = [(a, p) for a in ALL for p in a.plants if p.id == plant_id]
    if not listed:
        raise UsageError("plant-unknown", f"there is no plant {plant_id!r}", hint=_nearest(plant_id, _built_plants()))
    ready = [(a, p) for a, p in listed if p.built]
    if not ready:
        raise EnvironmentUnfitError(
            "plant-not-built", f"plant {plant_id} is not built yet", hint=f"built are: {', '.join(sorted(_built_plants()))}"
        )
    axis, found = ready[0]
    if side not in found.sides:
        raise UsageError(
            "plant-wrong-side", f"plant {plant_id} cannot exist on the {side}", hint=f"say --plant {plant_id}@{found.sides[0]}"
        )
    return axis, found


def implied_waivers(waivers: Collection[str], trainer: Readings, rollout: Readings) -> frozenset[str]:
    """The further ``"axis:field"`` keys that must be waived because of what is waived already, or of what a side does not have.

    A waived field waives the fields that state the same fact again. Unequal TP, once waived, waives the fields that apply only above TP1
    where exactly one side has TP1; unequal CP likewise.
    """
    implied = {f"{a.id}:{name}" for a in ALL for name, origins in a.mirrors.items() if not set(origins).isdisjoint(waivers)}
    sized = [(a.id, name) for a in ALL if _TP_KEY in waivers for name in a.only_with_tp]
    sized += [(a.id, name) for a in ALL if _CP_KEY in waivers for name in a.only_with_cp]
    implied |= {f"{axis}:{name}" for axis, name in sized if _on_one_side_only(axis, name, trainer, rollout)}
    return frozenset(implied - set(waivers))


def unreported_fallbacks(trainer: Readings, rollout: Readings) -> dict[str, str]:
    """``"axis:field"`` of what ran -> in words, where something else was asked for and the side gives no reason."""
    out: dict[str, str] = {}
    for axis in ALL:
        for side, readings in (("trainer", trainer), ("rollout", rollout)):
            if axis.fallback is None or axis.id not in readings:
                continue
            asked, ran, reason = (readings[axis.id].get(name, Reading()) for name in axis.fallback)
            if Evidence.UNKNOWN not in (asked.evidence, ran.evidence) and asked.value != ran.value and reason.evidence is not Evidence.READ:
                key = f"{axis.id}:{axis.fallback[1]}"
                says = f"the {side} was asked for {asked.value}, ran {ran.value}, and reported no fallback"
                out[key] = f"{out[key]}; {says}" if key in out else says
    return out


def _on_one_side_only(axis: str, name: str, trainer: Readings, rollout: Readings) -> bool:
    """Whether one side knows a value where the other says that the field is not applicable."""
    t, r = (side.get(axis, {}).get(name, Reading()).evidence for side in (trainer, rollout))
    return Evidence.UNKNOWN not in (t, r) and (t is Evidence.NOT_APPLICABLE) != (r is Evidence.NOT_APPLICABLE)


def _built_plants() -> set[str]:
    return {p.id for a in ALL for p in a.plants if p.built}


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else ""
