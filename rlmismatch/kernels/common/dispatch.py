"""The implementation that the caller named, or an error. Never another one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal, get_args

import torch

from rlmismatch.errors import EnvironmentUnfitError, UsageError

Impl = Literal["reference", "triton"]


def implementation(op: str, impl: Impl, *operands: torch.Tensor | None) -> Any:
    """The module ``rlmismatch.kernels.<op>.<impl>``, fit for `operands` (None is skipped).

    Raises UsageError for an unknown `impl`, ValueError for operands on different devices, EnvironmentUnfitError if `impl` cannot run
    here: Triton is missing, it has no way to run on the operands' device, or a gradient is asked of a forward-only kernel.
    """
    if impl not in get_args(Impl):
        raise UsageError("kernel-impl-unknown", f"there is no kernel implementation {impl!r}", hint=f"one of: {', '.join(get_args(Impl))}")
    tensors = [t for t in operands if t is not None]
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{op}: operands on different devices: {sorted(map(str, devices))}")
    if impl == "triton":
        _require_triton(op, tensors)
    return importlib.import_module(f"rlmismatch.kernels.{op}.{impl}")


def _require_triton(op: str, tensors: list[torch.Tensor]) -> None:
    if importlib.util.find_spec("triton") is None:
        raise EnvironmentUnfitError(
            "triton-missing", f"kernel {op}: Triton is not installed", hint="pip install triton, or --impl reference"
        )
    # A detached result would be a silently wrong gradient.
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise EnvironmentUnfitError(
            "triton-forward-only",
            f"kernel {op}: the Triton kernel has no backward",
            hint="call it under torch.no_grad(), or --impl reference",
        )
    interpreted = importlib.import_module("rlmismatch.kernels.common.triton").INTERPRETED.value
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    if on_cpu and not interpreted:
        raise EnvironmentUnfitError(
            "triton-needs-interpreter",
            f"kernel {op}: Triton cannot compile for the CPU",
            hint="set TRITON_INTERPRET=1 before the process starts, or --impl reference",
        )
    if interpreted and not on_cpu:
        raise EnvironmentUnfitError(
            "triton-interpreter-on-gpu",
            f"kernel {op}: TRITON_INTERPRET is set, so the GPU's operands would be computed on the CPU",
            hint="unset TRITON_INTERPRET",
        )
