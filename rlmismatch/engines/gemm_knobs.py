"""The GEMM family's knobs: what has to stand in a side's environment before its engine starts, and what became of each afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from rlmismatch.contract import Reading, not_applicable, read
from rlmismatch.engines import gemm_flags
from rlmismatch.engines.gemm_flags import PREFIX, asked_flag
from rlmismatch.engines.logprob_knobs import Outcome, applied, outcome, unsupported
from rlmismatch.engines.protocol import SideConfig

Sum = Literal["native", "all_reduce", "reduce_scatter", "rank_order"]
# Megatron's own trainer asks for these beside its config's flag (megatron/training/arguments.py); NCCL and cuBLAS read them once.
_DETERMINISTIC_TRAINER: Final = {
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# The all-reduces that vLLM's CUDA communicator may choose, and its variable for each that has one. NCCL is what is left.
_VLLM_VARIABLES: Final = {
    "symm_mem": "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "flashinfer": "VLLM_ALLREDUCE_USE_FLASHINFER",
}
CUDA_BACKENDS: Final = ("nccl", "custom", "symm_mem", "flashinfer")
CPU_BACKENDS: Final = ("shm", "gloo")


def environment(config: SideConfig) -> dict[str, str]:
    """Variables that a side's process must have before anything of its engine is imported."""
    out: dict[str, str] = {}
    if config.side == "trainer" and config.knobs.get(PREFIX + "deterministic_mode") == "on":
        out |= _DETERMINISTIC_TRAINER
    if config.side == "rollout" and config.device == "cuda":
        invariant, backend = config.knobs.get(PREFIX + "batch_invariant"), all_reduce_backend(config)
        if invariant is not None:
            out["VLLM_BATCH_INVARIANT"] = "1" if invariant == "on" else "0"
        if backend in CUDA_BACKENDS:
            out |= {variable: str(int(backend == name)) for name, variable in _VLLM_VARIABLES.items()}
    return out


def all_reduce_backend(config: SideConfig) -> str:
    """The rollout's all-reduce as asked for; ``auto`` where nobody asked."""
    return str(config.knobs.get(PREFIX + "all_reduce_backend", "auto"))


def row_sum(config: SideConfig) -> Sum:
    """How this side is asked to sum its row-parallel partials; ``native`` where nobody asked."""
    value: Sum = config.knobs.get(PREFIX + "forward_reduce", "native")
    return value


def flag_outcomes(config: SideConfig) -> dict[str, Outcome]:
    """The outcome of torch's own switches, read back. They act on a GPU only; elsewhere they are a contract between the sides."""
    live = {
        "tf32": gemm_flags.tf32_reading().value,
        "bf16_reduced_precision_reduction": gemm_flags.reduced_precision_reading().value,
    }
    idle = "" if config.device == "cuda" else "the switch itself: no product of this device looks at it"
    return {PREFIX + name: _switch(config, name, value, idle) for name, value in live.items() if asked_flag(config, name) is not None}


def mode_outcome(config: SideConfig, name: str, *, live: bool, reason: str = "", refused: str = "") -> dict[str, Outcome]:
    """The outcome of an engine's own mode. live: as read back. refused: why this engine cannot have the mode on."""
    wanted = asked_flag(config, name)
    if wanted is None:
        return {}
    if wanted and refused:
        return {PREFIX + name: unsupported("on", "off", refused)}
    return {PREFIX + name: _switch(config, name, live, reason)}


def _switch(config: SideConfig, name: str, live: bool, reason: str) -> Outcome:
    wanted = bool(asked_flag(config, name))
    words = {True: "on", False: "off"}
    return applied(words[wanted], reason) if live is wanted else outcome(words[wanted], words[live], "fell_back", reason)


def sum_outcome(config: SideConfig, *, tp: int, refused: str = "") -> dict[str, Outcome]:
    """The outcome of the knob forward_reduce on a side with `tp` ranks. refused: why this engine's sum cannot be replaced."""
    knob = PREFIX + "forward_reduce"
    if knob not in config.knobs:
        return {}
    wanted = str(config.knobs[knob])
    if tp == 1:
        return {knob: unsupported(wanted, None, "one rank has nothing to sum")}
    return {knob: unsupported(wanted, "the engine's own", refused) if refused else applied(wanted)}


def backend_outcome(config: SideConfig, ran: Mapping[str, Mapping[str, int]], *, tp: int, idle: str = "") -> dict[str, Outcome]:
    """The outcome of the knob all_reduce_backend.

    ran: backend -> payload in bytes (as text) -> calls in the arm; what ran decides. idle: why what was asked for did not run.
    """
    knob = PREFIX + "all_reduce_backend"
    if knob not in config.knobs:
        return {}
    wanted, actual = all_reduce_backend(config), ", ".join(ran) or "none"
    refused = backend_refused(config, tp=tp)
    if refused:
        return {knob: unsupported(wanted, actual, refused)}
    sizes = "; ".join(f"{name}: {min(map(int, by))} to {max(map(int, by))} bytes" for name, by in ran.items() if by)
    if wanted == "auto" and ran:
        return {knob: outcome(wanted, actual, "applied", sizes)}
    if set(ran) == {wanted}:
        return {knob: outcome(wanted, actual, "applied", sizes)}
    reasons = [sizes or "no all-reduce ran", *([f"{wanted}: {idle}"] if idle and wanted not in ran else [])]
    return {knob: outcome(wanted, actual, "fell_back", "; ".join(reasons))}


def backend_refused(config: SideConfig, *, tp: int) -> str:
    """Why the rollout cannot have the all-reduce that it is asked for; empty where it can."""
    wanted = all_reduce_backend(config)
    if tp == 1:
        return "one rank has nothing to sum"
    if config.device == "cpu" and wanted in CUDA_BACKENDS:
        return f"vLLM's CPU build has {' and '.join(CPU_BACKENDS)}"
    if config.device == "cuda" and wanted in CPU_BACKENDS:
        return f"on CUDA vLLM has {', '.join(CUDA_BACKENDS)}"
    if config.knobs.get(PREFIX + "forward_reduce") not in (None, "all_reduce"):
        return "--forward-reduce replaces the all-reduce"
    return ""


def rank_order_fields(config: SideConfig, *, ranks: int) -> dict[str, Reading]:
    """The fields of gemm.forward_reduce on a side that sums in rank order by our own kernel."""
    source = "our sum in the place of the engine's"
    single = ranks == 2 or config.impl == "triton"
    return {
        "order": not_applicable("two ranks: one addition, no order") if ranks == 2 else read("rank order, by halves", source),
        # One addition of two, rounded once, is one number whether float32 or float64 holds it.
        "acc_dtype": read("float32" if single else "float64", f"{source}: {config.impl}"),
        "collective": read("all_gather", source),
        "engine": read("rank_order", source),
    }


def under_pin(outcomes: dict[str, Outcome], pins: frozenset[str]) -> dict[str, Outcome]:
    """`outcomes` in an arm whose pin sums the row-parallel partials: another sum, or another all-reduce, did not take effect."""
    if "forward_reduce" not in pins:
        return outcomes
    held = {PREFIX + "forward_reduce", PREFIX + "all_reduce_backend"} & outcomes.keys()
    wanted = {k: outcomes[k]["requested"] for k in held if outcomes[k]["status"] != "unsupported"}
    out = {
        k: outcome(v, "rank_order", "applied" if v == "rank_order" else "fell_back", "the pin forward_reduce is in force")
        for k, v in wanted.items()
    }
    return outcomes | out


def not_for(config: SideConfig, known: Mapping[str, Any], side: str) -> dict[str, Outcome]:
    """Knobs of this family that nothing on this side took: no effect is no pass."""
    given = {k: v for k, v in config.knobs.items() if k.startswith(PREFIX) and k not in known}
    return {k: unsupported(v, None, f"not a knob of the {side}") for k, v in given.items()}


def vllm_batch_invariant() -> bool:
    """vLLM's own switch for its batch-invariant kernels, as this process has it."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
