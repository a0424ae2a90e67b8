"""Kernel tests run on the GPU where there is one, and in Triton's interpreter elsewhere. Fresh memory is NaN."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmismatch.kernels import reduce
from rlmismatch.kernels.common.dispatch import Impl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("gemm", "reduce", "norm", "rope", "attention", "attention_backward", "swiglu", "logprob", "logprob_backward")


def _import_kernels_for_the_interpreter() -> None:
    """Triton chooses between compiler and interpreter when a kernel is decorated. The variable goes again before any test starts a
    process that would inherit it."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for op in OPS:
            __import__(f"rlmismatch.kernels.{op}.triton")
        # The first launch imports the rest of Triton, which looks at the variable as well.
        reduce.fold([torch.zeros(1), torch.zeros(1)], impl="triton", out_dtype=torch.float32)
    finally:
        del os.environ["TRITON_INTERPRET"]


if DEVICE == "cpu":
    _import_kernels_for_the_interpreter()


@pytest.fixture(params=["reference", "triton"])
def impl(request: pytest.FixtureRequest) -> Impl:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)  # type: ignore[no-any-return]


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    """``randn(*shape, dtype=, scale=)``: the same numbers in every run; made in the dtype, so that input rounding is no one's error."""
    generator = torch.Generator().manual_seed(20251129)

    def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(DEVICE)

    return make


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN (or a wild integer), not a lucky zero."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = make(*args, **kwargs)
            return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh.fill_(77)

        return poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
