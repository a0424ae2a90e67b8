"""An exported LSE is named by its slope and its axes, against a log-sum-exp written out on its own."""

from __future__ import annotations

import math

import pytest
import torch

from rlmismatch.engines import attention_lse

HEADS, KV_HEADS, TOKENS, DIM, SCALE = 4, 2, 6, 8, 0.3


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, HEADS, DIM, generator=generator), torch.randn(TOKENS, KV_HEADS, DIM, generator=generator)


def truth() -> torch.Tensor:
    q, k = operands()
    out = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for h in range(HEADS):
        for t in range(TOKENS):
            scores = [SCALE * float(q[t, h].double() @ k[n, h // 2].double()) for n in range(t + 1)]
            out[h, t] = math.log(sum(map(math.exp, scores)))
    return out


def test_the_exact_one_is_the_formula() -> None:
    assert torch.allclose(attention_lse.exact(*operands(), SCALE), truth(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("base", "factor"), [("e", 1.0), ("2", 1 / math.log(2))])
@pytest.mark.parametrize("shape", ["[head, token]", "[token, head]"])
def test_base_and_axes(base: str, factor: float, shape: str) -> None:
    live = (truth() * factor).float()
    found = attention_lse.diagnose(live if shape == "[head, token]" else live.T, truth())
    assert (found.base, found.shape, found.domain, found.masked_row) == (base, shape, "attention scores", None)
    assert found.slope == pytest.approx(factor, rel=1e-5)
    assert found.worst_nats < 1e-5


def test_rows_that_see_nothing_are_told_apart() -> None:
    exact_HT, live_HT = truth(), truth().float()
    exact_HT[:, 0] = -torch.inf
    live_HT[:, 0] = 0.0
    assert attention_lse.diagnose(live_HT, exact_HT).masked_row == "0.0"
    live_HT[:, 0] = -torch.inf
    assert attention_lse.diagnose(live_HT, exact_HT).masked_row == "-inf"


def test_the_lse_of_something_else_fits_nothing() -> None:
    found = attention_lse.diagnose(torch.randn(HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) + 10, truth())
    assert (found.base, found.shape, found.domain) == (None, None, None)


def test_nothing_is_fitted_to_other_sizes() -> None:
    with pytest.raises(ValueError, match="either order"):
        attention_lse.diagnose(torch.zeros(HEADS, TOKENS + 1), truth())
