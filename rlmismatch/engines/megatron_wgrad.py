"""Megatron's fused dW: the GEMM that adds to main_grad itself, where there is one, and on the CPU one that is put in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch

INJECTED: Final = "an explicit product in float32, put in for the CUDA extension that a CPU does not have"


def available(device: torch.device) -> str:
    """Who adds dW inside the GEMM on this device; "" if nobody can."""
    from megatron.core.tensor_parallel import layers

    if device.type == "cpu":
        return INJECTED
    return "fused_weight_gradient_mlp_cuda (Apex)" if layers._grad_accum_fusion_available else ""


def kernel(device: torch.device) -> Any:
    """The module of the two functions ``f(x [T, K], dy [T, N], main_grad [N, K])`` that Megatron calls, or the CPU's stand-in."""
    from megatron.core.tensor_parallel import layers

    if device.type == "cpu":
        return SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    return layers.fused_weight_gradient_mlp_cuda


def _accumulate(x_TK: torch.Tensor, dy_TN: torch.Tensor, main_NK: torch.Tensor) -> None:
    """main_grad += dy.T @ x: the product and the addition in float32, one rounding to main_grad's dtype, as cuBLAS does with beta 1."""
    main_NK.copy_(main_NK.float() + dy_TN.float().T @ x_TK.float())


def linears(gpt: Any) -> list[Any]:
    """Every linear module that has the flag, in the order of the forward."""
    out = []
    for layer in gpt.decoder.layers:
        out += [layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1, layer.mlp.linear_fc2]
    return [*out, gpt.output_layer]


@contextlib.contextmanager
def fusion(gpt: Any, device: torch.device) -> Iterator[None]:
    """Turns the fused dW on in every linear layer of the live model. main_grad must be there before a backward."""
    from megatron.core.tensor_parallel import layers

    with contextlib.ExitStack() as stack:
        if device.type == "cpu":  # where the extension is missing the module does not have the name at all
            layers.fused_weight_gradient_mlp_cuda = kernel(device)
            stack.callback(delattr, layers, "fused_weight_gradient_mlp_cuda")
        for module in linears(gpt):
            before = module.gradient_accumulation_fusion
            module.gradient_accumulation_fusion = True
            stack.callback(setattr, module, "gradient_accumulation_fusion", before)
        yield
