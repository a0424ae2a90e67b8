"""The sum over ranks: order, one rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.kernels import reduce
from rlmismatch.kernels.common.tree import pairwise_tree
from rlmismatch.kernels.reduce import Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_fold_order(randn: Randn, ranks: int) -> None:
    p = [randn(7, 5, scale=10.0) for _ in range(ranks)]
    tree = {
        1: lambda: p[0],
        2: lambda: p[0] + p[1],
        3: lambda: (p[0] + p[1]) + p[2],
        4: lambda: (p[0] + p[1]) + (p[2] + p[3]),
        5: lambda: ((p[0] + p[1]) + (p[2] + p[3])) + p[4],
        6: lambda: ((p[0] + p[1]) + (p[2] + p[3])) + (p[4] + p[5]),
        7: lambda: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6]),
        8: lambda: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])),
    }[ranks]()
    assert torch.equal(reduce.fold(p, impl="triton", out_dtype=torch.float32), tree)


@pytest.mark.parametrize("ranks", [9, 12, 16, 17, 72])
def test_fold_order_of_more_ranks_than_one_launch_takes(randn: Randn, ranks: int) -> None:
    p = [randn(7, 5, scale=10.0) for _ in range(ranks)]
    assert torch.equal(reduce.fold(p, impl="triton", out_dtype=torch.float32), pairwise_tree(p, torch.add))


@pytest.mark.parametrize("ranks", [2, 8])
def test_fold_accuracy_of_model_dtype_partials(randn: Randn, impl: Impl, dtype: torch.dtype, ranks: int) -> None:
    partials = [randn(16, 33, dtype=dtype) for _ in range(ranks)]
    exact = torch.stack([p.double() for p in partials]).sum(dim=0)
    plain = torch.stack(partials).sum(dim=0)
    assert_within_budget(reduce.fold(partials, impl=impl, out_dtype=dtype), exact, plain)


def test_fold_rounds_once(impl: Impl) -> None:
    # In bfloat16 steps 1 + 2^-8 would round to 1 and stay there.
    partials = [torch.tensor([v], dtype=torch.bfloat16, device=DEVICE) for v in (1.0, 2.0**-8, 2.0**-9, 2.0**-9)]
    assert reduce.fold(partials, impl=impl, out_dtype=torch.bfloat16).item() == 1 + 2.0**-7


def test_fold_of_one_rank_is_the_rounding(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    partial = randn(4, 9)
    assert torch.equal(reduce.fold([partial], impl=impl, out_dtype=dtype), partial.to(dtype))


def test_fold_does_not_write_its_operands(randn: Randn, impl: Impl) -> None:
    partials = [randn(4, 9), randn(9, 4).T]
    before = [p.clone() for p in partials]
    out = reduce.fold(partials, impl=impl, out_dtype=torch.float32)
    assert torch.equal(out, before[0] + before[1])
    assert all(torch.equal(a, b) for a, b in zip(partials, before, strict=True))


def test_nothing_to_add_is_an_error(impl: Impl) -> None:
    with pytest.raises(ValueError, match="at least one"):
        reduce.fold([], impl=impl, out_dtype=torch.float32)


def test_partials_of_other_shapes_are_refused(impl: Impl) -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        reduce.fold([torch.zeros(2, 3, device=DEVICE), torch.zeros(3, device=DEVICE)], impl=impl, out_dtype=torch.float32)


def test_triton_does_not_pretend_to_float64() -> None:
    with pytest.raises(ValueError, match="float64"):
        reduce.fold([torch.zeros(2, device=DEVICE)], impl="triton", out_dtype=torch.float64)
