"""float64 where an engine has put kernels of its own in the place of torch's, as vLLM's batch-invariant mode does for its whole process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlmismatch import attention_policies, float64
from rlmismatch.attention_policies import Operands
from rlmismatch.engines import logprob_knobs
from rlmismatch.kernels import attention, attention_backward, gemm, norm

REPLACED = ("bmm", "mm", "addmm", "matmul", "linear", "mean.dim", "_log_softmax")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise KeyError(torch.float64)


@pytest.fixture
def replaced() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in REPLACED:
                library.impl(name, refuse, "CPU", allow_override=True)
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def test_it_is_what_torch_computes() -> None:
    a, b = randn(3, 5, 7), randn(3, 7, 2)
    torch.testing.assert_close(float64.matmul(a, b), a @ b, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(float64.matmul(a[0], b[0]), a[0] @ b[0], rtol=1e-14, atol=1e-14)
    for m, k, n in ((0, 7, 2), (5, 0, 2), (5, 7, 0)):
        assert torch.equal(float64.matmul(randn(3, m, k), randn(3, k, n)), randn(3, m, k) @ randn(3, k, n))
    torch.testing.assert_close(float64.mean(a), a.mean(dim=-1, keepdim=True), rtol=1e-14, atol=0)
    torch.testing.assert_close(float64.log_softmax(40 * a), (40 * a).log_softmax(-1), rtol=1e-14, atol=1e-14)
    cut = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, -torch.inf, -torch.inf]], dtype=torch.float64)
    torch.testing.assert_close(float64.log_softmax(cut), cut.log_softmax(-1), rtol=1e-14, atol=1e-14, equal_nan=True)


def test_the_engines_own_are_in_force(replaced: None) -> None:
    for product in (lambda: randn(2, 3, 3) @ randn(2, 3, 3), lambda: randn(3, 3).mean(-1), lambda: randn(3, 3).log_softmax(-1)):
        with pytest.raises(KeyError):
            product()


def test_no_reference_runs_in_them(replaced: None) -> None:
    x, weight = randn(6, 8), randn(4, 8)
    gemm.linear(x, weight, impl="reference", out_dtype=torch.float64)
    gemm.row_partial(x, weight, k_total=8, impl="reference")
    gemm.grad_weight(x, x, impl="reference")
    norm.rms_norm(x, randn(8), 1e-6, impl="reference")
    q, k = randn(6, 4, 8, dtype=torch.float32), randn(6, 2, 8, dtype=torch.float32)
    out, lse = attention.causal(q, k, k, [0, 6], scale=0.3, impl="reference")
    attention_backward.causal_backward(q, k, k, out, lse, q, [0, 6], scale=0.3, impl="reference")
    given = Operands(q_THD=q, k_THD=k, v_THD=k, scale=0.3)
    attention_policies.exact(given)
    attention_policies.partials(given, [0, 3, 6])
    logits = x[:, None].mul(weight).sum(-1)
    assert logprob_knobs.rows_made_of(logits, x, weight, "trial").value == "one row per scored token"
