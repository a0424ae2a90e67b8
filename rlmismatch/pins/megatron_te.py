"""The pins of Megatron-core's Transformer Engine spec, where it is built differently from the local one.

TE runs a layer norm and the GEMM it feeds in one module. To pin one of the two, or to look at the norm's output, the module is run as
the two calls that it makes itself: `apply_normalization` and `general_gemm` (read in transformer_engine 2.11.0,
pytorch/module/layernorm_linear.py and linear.py). Run that way with both native it must give the module's own bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlmismatch.pins.hooks import OpSwitch, Patch
from rlmismatch.pins.megatron import Parts, TrainerOps


class TransformerEngineOps(TrainerOps):
    """All hooks of one live GPTModel with TE layers."""

    def _norm_and_column(
        self,
        switch: OpSwitch,
        norm_module: Any,
        linear: Any,
        norm_name: str,
        name: str,
        parts: Callable[[torch.Tensor], Parts],
        feeds: int | None = None,
    ) -> list[Patch]:
        """One hook for both: `linear` holds the norm, `norm_module` is an identity."""
        bias = linear.bias if linear.use_bias else None

        def native_gemm(input: torch.Tensor, **_: Any) -> torch.Tensor:
            return te_gemm(linear, torch.cat(self.tp.gathered(input)) if self.shape.sp else input, bias)

        normed = self._normed(
            switch, "norm", lambda x: te_norm(linear, x), linear.layer_norm_weight, lambda y: {norm_name: self._rows(y)}, self._row_split
        )
        multiplied = self._multiplied(switch, "gemm", native_gemm, parts, feeds)

        def make(_: Callable[..., Any]) -> Callable[..., Any]:
            return lambda x_sBH: (multiplied(normed(x_sBH), linear.weight, bias, sequence_parallel=self.shape.sp), None)

        pins = ("norm", "gemm") if feeds is None else ("norm", "gemm", "activation")
        return [Patch(target=linear, name="forward", make=make, pins=pins, label=f"{norm_name}, {name}")]

    def _native_partial(self, module: Any, x_SBK: torch.Tensor) -> torch.Tensor:
        return te_gemm(module, x_SBK, None)


def te_norm(linear: Any, x_sBH: torch.Tensor) -> torch.Tensor:
    """The norm that a TE linear runs on its input [s, B, H]; same shape and dtype."""
    from transformer_engine.pytorch.module._common import apply_normalization

    normed, *_ = apply_normalization(
        x_sBH.reshape(-1, x_sBH.shape[-1]),
        None,
        linear.layer_norm_weight,
        None,
        linear.eps,
        None,
        x_sBH.dtype,
        linear.normalization,
        linear.fwd_ln_sm_margin,
        linear.zero_centered_gamma,
    )
    return normed.view_as(x_sBH)  # type: ignore[no-any-return]


def te_gemm(linear: Any, x_SBK: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product that a TE linear runs on this rank, before any sum over ranks: [S, B, N] in x's dtype."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    product, *_ = general_gemm(linear.weight, x_SBK.reshape(-1, x_SBK.shape[-1]), out_dtype=x_SBK.dtype, bias=bias)
    return product.view(*x_SBK.shape[:-1], -1)  # type: ignore[no-any-return]
