"""A learned sink on request: one logit more in every head's denominator, given to both engines by the knob ``sink``.

No checkpoint of the models that run here has sinks, but how an engine treats one can be asked all the same: a backend may take a sink and
drop it. The engine's own place for a sink is filled; whether it has an effect the trials of live attention read back.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError

KNOB: Final = "attention.sink"
PLANT: Final = "sink_dropped"
_LARGEST: Final = 4.0  # beyond, a row's own weights get too small for a trial in 16 bits; below 0 it is the sink's that does


def asked(config: SideConfig) -> float | None:
    """The sink logit of every head, as the model's dtype holds it; None: no sink. Raises UsageError for one that no trial could see."""
    text = config.knobs.get(KNOB)
    if text is None:
        return None
    logit = float(text)
    if not (math.isfinite(logit) and 0.0 <= logit <= _LARGEST):
        raise UsageError(
            "sink-out-of-range",
            f"--sink {text}: only a logit from 0 to {_LARGEST:g} can be seen in a row's weights",
            where=config.side,
            hint="--sink 1",
        )
    return float(torch.tensor(logit, dtype=getattr(torch, config.dtype)))


def check(config: SideConfig) -> None:
    """Refuse, in one UsageError, a sink where no place for one is known."""
    if asked(config) is None:
        return
    reason = ""
    if config.cp > 1:
        reason = "context parallelism has no place for a sink"
    elif config.side == "trainer" and config.trainer_spec != "local":
        reason = f"the trainer spec {config.trainer_spec} takes a sink when it is built, and this one was loaded without"
    elif config.grads:
        reason = "gradients are not built for a sink"
    elif {"attention.accum_dtype", "attention.downcast_at"} & config.knobs.keys():
        reason = "--accum-dtype and --downcast-at are simulated without one"
    if reason:
        raise UsageError("sink-not-built", reason, where=config.side, hint="leave --sink out")


def given(config: SideConfig) -> float | None:
    """What the live engine gets: the sink that was asked for, but for a plant."""
    return None if PLANT in config.plants else asked(config)


def why_not_dropped(config: SideConfig, model: object) -> str | None:
    """Why the fault ``sink_dropped`` cannot exist in this run, or None."""
    return "there is no sink to drop; use --sink" if asked(config) is None else None


def into_trainer(cores: list[Any], logit: float | None) -> None:
    """Fill the softmax offset of Megatron-core's own attention, which is what it calls a sink."""
    if logit is None:
        return
    for core in cores:
        core.softmax_offset = torch.full(
            (core.num_attention_heads_per_partition,), logit, dtype=core.config.params_dtype, device=_device(core.config)
        )


def _device(config: Any) -> torch.device:
    return torch.device("cpu" if config.use_cpu_initialization else "cuda")


def into_rollout(impls: list[Any], logit: float | None, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the sinks of vLLM's attention implementations."""
    if logit is None:
        return
    for impl in impls:
        impl.sinks = torch.full((impl.num_heads,), logit, dtype=dtype, device=device)
