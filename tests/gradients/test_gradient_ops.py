"""Gradients of the pinned operations against torch's autograd of formulas written here, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlmismatch.kernels.common.tree import pairwise_tree
from rlmismatch.pins import gradient_ops

TOLERANCE = 1e-12  # of float64 sums of some 100 terms of size 1


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def autograd(function: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.double().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad.double())


def close(got: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((got.double() - exact).abs().max() <= TOLERANCE * exact.abs().max())


def test_rms_norm() -> None:
    x, weight, dy, eps = normal(5, 3, 16), normal(16, seed=1), normal(5, 3, 16, seed=2), 1e-2
    exact_x, exact_w = autograd(lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + eps) ** 0.5 * w, dy, x, weight)
    assert close(gradient_ops.rms_norm_input(dy, x, weight, eps), exact_x)
    assert close(gradient_ops.rms_norm_weight(dy, x, eps), exact_w)


def test_swiglu() -> None:
    packed, dy = normal(4, 24), normal(4, 12, seed=1)
    (exact,) = autograd(lambda p: p[..., :12] / (1 + torch.exp(-p[..., :12])) * p[..., 12:], dy, packed)
    assert close(gradient_ops.swiglu_packed(dy, packed), exact)


def test_a_result_is_rounded_once_to_the_operands_dtype() -> None:
    x, weight, dy = (
        normal(7, 16, dtype=torch.bfloat16),
        normal(16, seed=1, dtype=torch.bfloat16),
        normal(7, 16, seed=2, dtype=torch.bfloat16),
    )
    exact = gradient_ops.rms_norm_input(dy.double(), x.double(), weight.double(), 1e-6)
    got = gradient_ops.rms_norm_input(dy, x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    assert bool(((got.double() - exact).abs() <= 2.0**-8 * exact.abs()).all())


def test_rows_are_added_in_token_order_and_strangers_left_out() -> None:
    ids = torch.tensor([3, -1, 0, 3, 9, 3])
    rows = torch.tensor([[1.0], [7.0], [5.0], [2.0**24], [7.0], [1.0]])
    total = torch.zeros(4, 1)
    gradient_ops.add_rows(total, ids, rows)
    # ((1 + 2^24) + 1): the first 1 is lost to rounding, and so is the second; any other order keeps them.
    assert total[:, 0].tolist() == [5.0, 0.0, 0.0, 2.0**24]
    many = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0))
    values = normal(200, 3, dtype=torch.float32)
    got, expected = torch.zeros(5, 3), torch.zeros(5, 3)
    gradient_ops.add_rows(got, many, values)
    for i, row in zip(many.tolist(), values, strict=True):
        expected[i] += row
    assert torch.equal(got, expected)


def test_no_row_is_nothing() -> None:
    total = torch.zeros(4, 2)
    gradient_ops.add_rows(total, torch.tensor([7, -2]), torch.ones(2, 2))
    assert not total.any()


def test_a_replaced_operation_takes_its_gradient_from_what_is_given() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    y = gradient_ops.replaced(lambda x: x * 10, lambda dy, x: (dy * x,), x)
    y.backward()
    assert y.item() == 20.0
    assert x.grad is not None
    assert x.grad.item() == 2.0


def test_several_sums_over_ranks_are_one_tree_at_every_size() -> None:
    """What a rank hands over is a subtree: the same sum from 1, 2, 4 and 8 ranks, bit for bit."""
    leaves = [[normal(3, 5, seed=10 * s + i) for i in range(8)] for s in range(2)]

    def of(ranks: int) -> torch.Tensor:
        each = 8 // ranks
        shares = [[pairwise_tree(x[r * each : (r + 1) * each], torch.add) for r in range(ranks)] for x in leaves]
        return gradient_ops.folded(shares, impl="reference", out_dtype=torch.float64)

    results = [of(ranks) for ranks in (1, 2, 4, 8)]
    assert all(torch.equal(results[0], other) for other in results[1:])
