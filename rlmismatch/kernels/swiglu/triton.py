"""Triton kernel of `swiglu`."""

import torch
import triton
import triton.language as tl

from rlmismatch.kernels.common.triton import INTERPRETED, exp, storage, widen

_BLOCK_R = 64 if INTERPRETED.value else 1
_BLOCK_I = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[..., I] in gate's dtype, contiguous."""
    width = gate.shape[-1]
    gate_RI, up_RI = widen(gate.reshape(-1, width)), widen(up.reshape(-1, width))
    out_RI = torch.empty(gate_RI.shape, dtype=storage(gate.dtype), device=gate.device)
    if out_RI.numel():
        grid = (triton.cdiv(gate_RI.shape[0], _BLOCK_R), triton.cdiv(width, _BLOCK_I))
        _swiglu_kernel[grid](
            gate_RI,
            up_RI,
            out_RI,
            *gate_RI.shape,
            *gate_RI.stride(),
            *up_RI.stride(),
            BLOCK_R=_BLOCK_R,
            BLOCK_I=_BLOCK_I,
            enable_fp_fusion=False,
        )
    return out_RI.to(gate.dtype).view(gate.shape)


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, out_ptr, rows, width, stride_gr, stride_gi, stride_ur, stride_ui, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Order: none to choose, nothing is summed. silu(g) u = (g / (1 + e^-|g|)) u, times e^-|g| where g < 0: no overflow."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = (r < rows)[:, None] & (i < width)[None, :]
    r = r.to(tl.int64)[:, None]
    gate = tl.load(gate_ptr + r * stride_gr + i[None, :] * stride_gi, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + r * stride_ur + i[None, :] * stride_ui, mask=mask, other=0.0).to(tl.float32)
    decay = exp(-tl.abs(gate))
    silu = tl.div_rn(tl.where(gate < 0, gate * decay, gate), 1.0 + decay)
    tl.store(out_ptr + r * width + i[None, :], (silu * up).to(out_ptr.dtype.element_ty), mask=mask)
