"""The arms by name: one id for one setting of all pins, the same on both sides and in every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlmismatch.engines.attention_forms import FORMS
from rlmismatch.engines.protocol import ScorePath
from rlmismatch.pins.spec import PINS
from rlmismatch.settings import Settings

ROLLOUT_PATHS: Final[tuple[ScorePath, ...]] = ("prefill", "chunked", "decode")
# What pages, prefix hits and splits come to, attention alone being native, and with every pin in force.
PAGED: Final = "paged"
PAGED_PINNED: Final = "paged.pinned"
FORCED: Final = "backend="  # and a name: a side's own arithmetic but for attention, which another backend computes
NATIVE: Final = "native"  # no pin but those that a knob holds
RETURN: Final = "native.return"  # the same again at the very end: native bits must be back
LOCAL: Final = "local"
BOUNDARY: Final = "boundary"
ATTENTION: Final = "attention"  # every pin but attention: native attention on equal operands
LOGITS: Final = "logits"  # every pin but the head's and the log-prob's: equal hidden rows, native from there
GRADS: Final = "grads"  # the trainer's gradients, native and pinned
GEMM: Final = "gemm"  # native, with every product and sum over ranks replayed on the operands that it had
ORACLE: Final = "oracle"
EAGER: Final = "native.eager"  # a rollout that runs compiled, loaded once more to run eagerly
COMPILE: Final = "model.compile"
ALL: Final = frozenset(PINS)

# Knobs that set the arithmetic of a pin, and so hold it: whatever their value, and on both sides where one side alone is given.
_PIN_ARITHMETIC: Final = (
    *(("accum_dtype", dtype) for dtype in ("fp32", "bf16")),
    *(("downcast_at", place) for place in ("final_write", "per_partial", "per_block")),
)
# Knob value -> pins that stay in force in every arm, the native one included.
BASE_PINS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("gemm.kernel", "triton"): ("gemm",),
    ("gemm.forward_reduce", "rank_order"): ("forward_reduce",),
    ("attention", "off"): ("attention",),
    ("attention.rope", "unfused_fp32"): ("rope",),
    ("attention.merge_order", "global_block_index"): ("attention",),
    **{(f"attention.{knob}", value): ("attention",) for knob, value in _PIN_ARITHMETIC},
    ("logprob.head_gemm_kernel", "triton"): ("head_gemm",),
}


def arm_id(pins: frozenset[str], base: frozenset[str] = frozenset()) -> str:
    """The canonical id of an arm that pins exactly `pins`, of which a knob holds `base`."""
    if pins == base:
        return NATIVE
    return "pins=all" if pins == ALL else "pins=" + "+".join(p for p in PINS if p in pins)


def repeat_id(number: int) -> str:
    """The id of a repeat of the native arm."""
    return f"{NATIVE}.repeat{number}"


def base_pins(settings: Settings) -> frozenset[str]:
    """Pins that a knob of the command line keeps in force throughout."""
    both = {(knob, str(value)) for knob, value in settings.knobs.items()}
    arithmetic = {f"attention.{knob}" for knob, _ in _PIN_ARITHMETIC}
    both |= {(rest, value) for knob, value in both if (rest := knob.partition(".")[2]) in arithmetic}  # trainer.attention.accum_dtype
    return frozenset(pin for knob_value in both for pin in BASE_PINS.get(knob_value, ()))


def compiled(settings: Settings) -> bool:
    """Whether the rollout is to run compiled code or captured graphs, where most pins are inert."""
    return settings.knobs_of("rollout").get(COMPILE, "eager") != "eager"


def rollout_paths(settings: Settings) -> tuple[ScorePath, ...]:
    """In which forms the rollout scores: three, or those that the attention family's knob names; prefill is what ratios need."""
    if settings.command != "attention":
        return ROLLOUT_PATHS
    knobs = settings.knobs_of("rollout")
    named = knobs.get("attention.materialization")
    forms = set(FORMS) if named is None else {"full_prefill", *named.split(",")}
    if named is None and knobs.get("attention.prefix_cache") == "off":
        forms.discard("paged_prefill")
    return tuple(path for form, path in FORMS.items() if form in forms)


def engine_knobs(settings: Settings, side: str) -> dict[str, str]:
    """Knobs that the adapter of `side` sets as long as its engine lives: those of its families, but for what a pin holds on both sides."""
    given = settings.knobs_of(side)
    arithmetic = {f"attention.{knob}" for knob, _ in _PIN_ARITHMETIC}
    held = {k for k, v in given.items() if (k, str(v)) in BASE_PINS and settings.knobs.get(k) == v} - arithmetic | _PIN_OR_NATIVE
    return {k: v for k, v in given.items() if k.startswith(("logprob.", "attention.", "gemm.", COMPILE)) and k not in held}


# Knobs whose only values are a pin and its absence.
_PIN_OR_NATIVE: Final = frozenset({"gemm.kernel", "logprob.head_gemm_kernel", "attention.rope", "attention.merge_order"})
