"""The rollout under torch.compile and CUDA graphs: how it is started so, and which pins it leaves inert.

A compiled forward never calls what a pin put in the place of an operation: no error, no effect. So calls are counted path by path, and a
pin that some path did not call counts as not called at all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

from rlmismatch.engines.logprob_knobs import Outcome, applied, unsupported
from rlmismatch.engines.protocol import SideConfig

Mode = Literal["eager", "graph", "inductor"]
KNOB: Final = "model.compile"


def mode_of(config: SideConfig) -> Mode:
    """The mode this side is started in: the one asked for, or eager where this device has no such mode."""
    asked = str(config.knobs.get(KNOB, "eager"))
    if asked not in get_args(Mode) or (asked == "graph" and config.device == "cpu"):
        return "eager"
    return asked  # type: ignore[return-value]


def start_options(config: SideConfig) -> dict[str, Any]:
    """What vLLM is constructed with. graph: the eager kernels, captured; inductor: vLLM's own default, graphs where the device has them."""
    mode = mode_of(config)
    if mode == "graph":
        return {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
    return {"enforce_eager": mode == "eager"}


def outcomes(config: SideConfig) -> dict[str, Outcome]:
    """Of the knob, if it was asked for. What really runs is read back as the field model.compile:mode."""
    if KNOB not in config.knobs:
        return {}
    asked, mode = str(config.knobs[KNOB]), mode_of(config)
    if asked == mode:
        return {KNOB: applied(asked)}
    return {KNOB: unsupported(asked, mode, "CPUs capture no graphs" if asked == "graph" else f"one of: {', '.join(get_args(Mode))}")}


@contextlib.contextmanager
def uncaptured(model: Any, runner: Any) -> Iterator[None]:
    """While it lasts the model's own Python runs, so that a trial sees what it hands to its operators.

    They are the kernels that a graph replays, but for the ops that vLLM chooses by mode. Of an eager engine it changes nothing.
    """
    flags = [(vars(model), "do_not_compile", True), (vars(getattr(runner, "cudagraph_dispatcher", model)), "keys_initialized", False)]
    present = [(space, name, space[name], value) for space, name, value in flags if name in space]
    for space, name, _, value in present:
        space[name] = value
    try:
        yield
    finally:
        for space, name, before, _ in present:
            space[name] = before


class PathCalls:
    """How often each pin ran, path by path."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls
        self._paths: dict[str, Mapping[str, int]] = {}

    @contextlib.contextmanager
    def of(self, path: str) -> Iterator[None]:
        before = Counter(self._calls)
        yield
        self._paths[path] = self._calls - before

    def total(self, pin: str) -> int:
        """Calls over all paths; 0 where one path made none."""
        counts = [calls.get(pin, 0) for calls in self._paths.values()]
        return sum(counts) if all(counts) else 0
