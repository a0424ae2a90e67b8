"""SwiGLU: accuracy, extremes, strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.kernels import swiglu
from rlmismatch.kernels.swiglu import Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize("width", [40, 1100])
def test_swiglu_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, width: int) -> None:
    gate, up = randn(5, width, dtype=dtype, scale=4.0), randn(5, width, dtype=dtype)
    exact = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    plain = (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype)
    actual = swiglu.swiglu(gate, up, impl=impl)
    assert actual.dtype == dtype
    assert_within_budget(actual, exact, plain)


def test_one_rounding(randn: Randn, impl: Impl) -> None:
    gate, up = randn(8, 256, dtype=torch.bfloat16), randn(8, 256, dtype=torch.bfloat16)
    twice = torch.nn.functional.silu(gate) * up
    assert (swiglu.swiglu(gate, up, impl=impl) != twice).float().mean() > 0.05


def test_extreme_gates(impl: Impl, dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, 100.0, -100.0, 32768.0, -32768.0, torch.nan], dtype=dtype, device=DEVICE)
    out = swiglu.swiglu(gate, torch.full_like(gate, 0.5), impl=impl)
    assert out[0] == 0
    assert out[[1, 3]].tolist() == [50.0, 16384.0]
    assert (out[[2, 4]].float().abs() < 1e-30).all()
    assert out[5].isnan()


def test_relative_accuracy_of_small_results(randn: Randn, impl: Impl) -> None:
    gate = torch.linspace(-80, 0, 400, device=DEVICE)
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    relative = (swiglu.swiglu(gate, torch.ones_like(gate), impl=impl).double() / exact - 1)[:-1].abs()
    assert relative.max() < 8 * 2.0**-24


def test_packed_is_the_two_halves(randn: Randn, impl: Impl) -> None:
    gate, up = randn(3, 7, 24, dtype=torch.bfloat16), randn(3, 7, 24, dtype=torch.bfloat16)
    separate = swiglu.swiglu(gate, up, impl=impl)
    assert torch.equal(swiglu.swiglu_packed(torch.cat([gate, up], dim=-1), impl=impl), separate)
    assert separate.is_contiguous()


def test_a_row_alone_has_the_bits_it_has_in_a_batch(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    gate, up = randn(70, 33, dtype=dtype), randn(70, 33, dtype=dtype)
    together = swiglu.swiglu(gate, up, impl=impl)
    assert torch.equal(swiglu.swiglu(gate[69:], up[69:], impl=impl), together[69:])
    assert torch.equal(swiglu.swiglu(gate.T, up.T, impl=impl), together.T)


def test_no_rows(impl: Impl) -> None:
    assert swiglu.swiglu_packed(torch.zeros(0, 16, device=DEVICE), impl=impl).shape == (0, 8)


def test_operands_that_do_not_fit_are_refused(impl: Impl) -> None:
    x = torch.zeros(2, 5, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        swiglu.swiglu(x, x[:1], impl=impl)
    with pytest.raises(ValueError, match="do not fit"):
        swiglu.swiglu(x, x.bfloat16(), impl=impl)
    with pytest.raises(ValueError, match="even"):
        swiglu.swiglu_packed(x, impl=impl)
