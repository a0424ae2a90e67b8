"""RMSNorm: the formula with its two roundings, the residual sum, rows that do not know each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.kernels import norm
from rlmismatch.kernels.norm import Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
EPS = 1e-6


@pytest.mark.parametrize("width", [32, 576])
def test_rms_norm_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, width: int) -> None:
    x, weight = randn(70, width, dtype=dtype, scale=3.0), 1 + randn(width, dtype=dtype, scale=0.2)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5) * weight.double()
    actual = norm.rms_norm(x, weight, EPS, impl=impl)
    assert actual.dtype == dtype
    assert_within_budget(actual, exact, _hugging_face(x, weight))


def test_rounds_before_the_weight_and_after_it(randn: Randn, impl: Impl) -> None:
    x, weight = randn(64, 128, dtype=torch.bfloat16), 1 + randn(128, dtype=torch.bfloat16, scale=0.2)
    actual = norm.rms_norm(x, weight, EPS, impl=impl)
    # Equal but for elements where float32 and float64 fall on two sides of a tie; rounding once at the end moves a quarter of them.
    assert (actual != _hugging_face(x, weight)).float().mean() < 0.001
    assert (actual != torch.nn.functional.rms_norm(x, (128,), weight, EPS)).float().mean() > 0.05


def test_reference_in_float64_is_unrounded(randn: Randn) -> None:
    from rlmismatch.kernels.norm import reference

    x, r, weight = randn(5, 40, dtype=torch.bfloat16), randn(5, 40, dtype=torch.bfloat16), randn(40, dtype=torch.bfloat16)
    total = x.double() + r.double()
    exact = total / (total.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    y, residual = reference.add_rms_norm(x, r, weight, EPS, out_dtype=torch.float64)
    assert torch.equal(residual, total)
    torch.testing.assert_close(y, exact, rtol=1e-14, atol=1e-14)


def test_add_rms_norm_is_the_norm_of_the_rounded_sum(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    x, r, weight = randn(20, 96, dtype=dtype), randn(20, 96, dtype=dtype), randn(96, dtype=dtype)
    y, residual = norm.add_rms_norm(x, r, weight, EPS, impl=impl)
    assert torch.equal(residual, x + r)
    assert torch.equal(y, norm.rms_norm(residual, weight, EPS, impl=impl))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_the_kernels_rounding_is_to_nearest_even_everywhere(randn: Randn) -> None:
    # The residual sum of these pairs covers ties, both signs, subnormals, overflow, infinity and NaN.
    scale = torch.logspace(-38.5, 38.4, 4096, dtype=torch.float64)
    x = (randn(1, 4096).cpu().double() * scale).to(torch.bfloat16).to(DEVICE)
    r = (x.float() * 2.0**-8).to(torch.bfloat16)
    x[0, :3], r[0, :3] = torch.tensor([torch.inf, -torch.inf, 1.0]), torch.tensor([1.0, 1.0, torch.nan])
    x[0, 3:5], r[0, 3:5] = torch.tensor([3.3895e38, -0.0]), torch.tensor([3.3895e38, -0.0])
    residual = norm.add_rms_norm(x, r, torch.ones(4096, device=DEVICE), EPS, impl="triton").residual
    expected = x + r
    assert torch.equal(residual.view(torch.int16)[~expected.isnan()], expected.view(torch.int16)[~expected.isnan()])
    assert torch.equal(residual.isnan(), expected.isnan())


@pytest.mark.parametrize("width", [32, 100, 576])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(randn: Randn, impl: Impl, dtype: torch.dtype, width: int) -> None:
    x, weight = randn(150, width, dtype=dtype), randn(width, dtype=dtype)
    together = norm.rms_norm(x, weight, EPS, impl=impl)
    for rows in (slice(0, 1), slice(149, 150), slice(77, 101)):
        assert torch.equal(norm.rms_norm(x[rows], weight, EPS, impl=impl), together[rows])


def test_any_strides_and_leading_dims(randn: Randn, impl: Impl) -> None:
    packed, weight = randn(6, 5, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16)
    q = packed[:, 1:4]  # heads inside a packed projection
    out = norm.rms_norm(q, weight, EPS, impl=impl)
    assert out.is_contiguous()
    assert torch.equal(out, norm.rms_norm(q.contiguous(), weight, EPS, impl=impl))
    assert torch.equal(norm.rms_norm(q.transpose(0, 1), weight, EPS, impl=impl), out.transpose(0, 1))


def test_float32_weight_of_a_bfloat16_model(randn: Randn, impl: Impl) -> None:
    x, weight = randn(9, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    assert torch.equal(norm.rms_norm(x, weight.float(), EPS, impl=impl), norm.rms_norm(x, weight, EPS, impl=impl))


def test_eps_enters(randn: Randn, impl: Impl) -> None:
    x, weight = randn(4, 64, scale=1e-3), torch.ones(64, device=DEVICE)
    ratio = norm.rms_norm(x, weight, 1e-5, impl=impl) / norm.rms_norm(x, weight, 1e-6, impl=impl)
    mean = x.double().pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(ratio.double(), ((mean + 1e-6) / (mean + 1e-5)).sqrt().expand_as(x), rtol=1e-5, atol=0.0)


def test_no_rows(impl: Impl) -> None:
    assert norm.rms_norm(torch.zeros(0, 16, device=DEVICE), torch.ones(16, device=DEVICE), EPS, impl=impl).shape == (0, 16)


def test_nan_stays_in_its_row(randn: Randn, impl: Impl) -> None:
    x = randn(3, 64)
    x[1, 7] = torch.nan
    assert norm.rms_norm(x, torch.ones(64, device=DEVICE), EPS, impl=impl).isnan().all(dim=1).tolist() == [False, True, False]


def test_operands_that_do_not_fit_are_refused(impl: Impl) -> None:
    x = torch.zeros(2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, torch.ones(15, device=DEVICE), EPS, impl=impl)
    with pytest.raises(ValueError, match="residual"):
        norm.add_rms_norm(x, x.bfloat16(), torch.ones(16, device=DEVICE), EPS, impl=impl)


def _hugging_face(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x.float()
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
