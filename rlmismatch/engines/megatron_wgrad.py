"""Megatron's fused dW: the GEMM that adds to main_grad itself, where there is one, or one that is put in its place."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch

INJECTED: Final = "an explicit product in float32, put in for the CUDA extension that a CPU does not have"
_APEX: Final = "fused_weight_gradient_mlp_cuda (Apex)"
_TE: Final = "Transformer Engine's GEMM, which adds to its output, put in for Apex's extension"


def available(device: torch.device) -> str:
    """Who adds dW inside the GEMM on this device; "" if nobody can."""
    from megatron.core.tensor_parallel import layers

    if device.type == "cpu":
        return INJECTED
    if layers._grad_accum_fusion_available:
        return _APEX
    try:
        importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    except (ImportError, OSError, RuntimeError):  # not there, or its libraries do not load
        return ""
    return _TE


def kernel(device: torch.device) -> Any:
    """The module of the two functions ``f(x [T, K], dy [T, N], main_grad [N, K])`` that Megatron calls, or what stands in for it."""
    from megatron.core.tensor_parallel import layers

    found = available(device)
    if found == _APEX:
        return layers.fused_weight_gradient_mlp_cuda
    product = _te_accumulate if found == _TE else _accumulate
    return SimpleNamespace(wgrad_gemm_accum_fp32=product, wgrad_gemm_accum_fp16=product)


def _te_accumulate(x_TK: torch.Tensor, dy_TN: torch.Tensor, main_NK: torch.Tensor) -> None:
    """main_grad += dy.T @ x in one cuBLASLt call, as Transformer Engine's own layers make it under gradient_accumulation_fusion."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(x_TK, dy_TN, out_dtype=main_NK.dtype, layout="NT", out=main_NK, accumulate=True, grad=True)


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
        if not layers._grad_accum_fusion_available:  # the module does not have the name at all
            layers.fused_weight_gradient_mlp_cuda = kernel(device)
            stack.callback(delattr, layers, "fused_weight_gradient_mlp_cuda")
        for module in linears(gpt):
            before = module.gradient_accumulation_fusion
            module.gradient_accumulation_fusion = True
            stack.callback(setattr, module, "gradient_accumulation_fusion", before)
        yield
