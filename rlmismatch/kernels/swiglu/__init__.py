"""SwiGLU: ``silu(gate) * up``."""

from __future__ import annotations

import torch

from rlmismatch.kernels.common.dispatch import Impl, implementation

__all__ = ["Impl", "swiglu", "swiglu_packed"]


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, impl: Impl) -> torch.Tensor:
    """``gate / (1 + exp(-gate)) * up``, contiguous, in the shape and dtype of `gate`; one rounding.

    gate, up: [..., I] of one shape and dtype, any strides. float32 (triton) or float64 (reference) inside.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} do not fit")
    module = implementation("swiglu", impl, gate, up)
    out: torch.Tensor = module.swiglu(gate, up)
    return out


def swiglu_packed(gate_up: torch.Tensor, *, impl: Impl) -> torch.Tensor:
    """`swiglu` of the two halves of the last dim. gate_up: [..., 2 I], gate first. Returns [..., I]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"the last dim of gate_up must be even, got {tuple(gate_up.shape)}")
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu(gate, up, impl=impl)
