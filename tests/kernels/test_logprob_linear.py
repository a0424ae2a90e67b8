"""Head and log-prob in one. The chain: a block = its columns of the whole GEMM -> selected of any block = the path that holds all logits;
float64 -> accuracy of what is not bit-equal to anything, the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.errors import ContractError
from rlmismatch.kernels import gemm, logprob, logprob_backward, logprob_linear
from rlmismatch.kernels.logprob_linear import Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
ROWS, HIDDEN, VOCAB = 9, 48, 300


def _operands(randn: Randn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(ROWS, HIDDEN, dtype=dtype), randn(VOCAB, HIDDEN, dtype=dtype, scale=0.5), (torch.arange(ROWS) * 37 % VOCAB).to(DEVICE)


@pytest.mark.parametrize("block", [64, 128, 8192])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_bits_of_the_path_that_holds_all_logits(
    randn: Randn, impl: Impl, dtype: torch.dtype, block: int, logits_dtype: torch.dtype | None
) -> None:
    hidden, weight, targets = _operands(randn, dtype)
    logits = gemm.linear(hidden, weight, impl=impl, out_dtype=logits_dtype)
    whole = logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl, temperature=0.7)
    fused = logprob_linear.selected(
        hidden, weight, targets, vocab_size=VOCAB, impl=impl, block_size=block, logits_dtype=logits_dtype, temperature=0.7
    )
    assert torch.equal(fused, whole)


def test_shards_and_chunks_do_not_enter(randn: Randn, impl: Impl) -> None:
    hidden, weight, targets = _operands(randn, torch.bfloat16)
    whole = logprob_linear.selected(hidden, weight, targets, vocab_size=VOCAB, impl=impl)
    parts = [
        logprob_linear.partials(hidden, weight[s : s + 128], targets, vocab_start=s, vocab_size=VOCAB, impl=impl, block_size=64)
        for s in range(0, VOCAB, 128)
    ]
    assert torch.equal(logprob.merge(parts, vocab_size=VOCAB, impl=impl), whole)
    chunks = [
        logprob_linear.selected(hidden[i : i + 2], weight, targets[i : i + 2], vocab_size=VOCAB, impl=impl) for i in range(0, ROWS, 2)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def test_gradients_against_float64(randn: Randn, impl: Impl) -> None:
    """One grad_output a row; two ranks' dhidden add up to the whole one."""
    hidden, weight, targets = _operands(randn, torch.float32)
    grads = torch.linspace(-1.5, 2.0, ROWS, device=DEVICE)

    def autograd(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        x, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
        logp = ((x @ w.T) / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return torch.autograd.grad(logp, (x, w), grads.to(dtype))

    part = logprob_linear.partials(hidden, weight, targets, vocab_start=0, vocab_size=VOCAB, impl=impl, temperature=0.7)
    normaliser = logprob_backward.normaliser([part], vocab_size=VOCAB, impl=impl)
    ranks = [
        logprob_linear.backward(
            hidden,
            weight[rows],
            targets,
            grads,
            normaliser=normaliser,
            vocab_start=rows.start,
            vocab_size=VOCAB,
            impl=impl,
            block_size=64,
            temperature=0.7,
        )
        for rows in (slice(0, 192), slice(192, VOCAB))
    ]
    exact, plain = autograd(torch.float64), autograd(torch.float32)
    assert_within_budget(ranks[0].dhidden_TH + ranks[1].dhidden_TH, exact[0], plain[0])
    assert_within_budget(torch.cat([r.dweight_VH for r in ranks]), exact[1], plain[1])
    assert all(r.dhidden_TH.abs().amax(dim=1).min() > 0 for r in ranks)


def test_no_more_than_a_block_of_logits_is_made(randn: Randn, impl: Impl, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    native = gemm.linear

    def watched(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        out = native(*args, **kwargs)  # type: ignore[arg-type]
        widths.append(out.shape[1])
        return out

    monkeypatch.setattr(gemm, "linear", watched)
    hidden, weight, targets = _operands(randn, torch.bfloat16)
    logprob_linear.selected(hidden, weight, targets, vocab_size=VOCAB, impl=impl, block_size=64)
    assert widths == [64, 64, 64, 64, 44]


def test_what_does_not_fit_is_refused(randn: Randn, impl: Impl) -> None:
    hidden, weight, targets = _operands(randn, torch.float32)
    with pytest.raises(ValueError, match="cuts tiles"):
        logprob_linear.selected(hidden, weight, targets, vocab_size=VOCAB, impl=impl, block_size=100)
    with pytest.raises(ContractError, match="not in"):
        logprob_linear.selected(hidden, weight, targets + VOCAB, vocab_size=VOCAB, impl=impl)
