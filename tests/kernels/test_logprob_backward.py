"""Gradient and entropy of the log-prob. The chain: finite differences -> the reference; float64 -> accuracy; one set of bits a sharding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.errors import ContractError
from rlmismatch.kernels import logprob, logprob_backward
from rlmismatch.kernels.logprob_backward import Impl, Normaliser
from rlmismatch.kernels.logprob_backward import reference as fp64
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
VOCAB = 1100  # 17 tiles and 12 columns


def _targets(rows: int) -> torch.Tensor:
    edges = torch.tensor([0, 63, 64, 575, 576, 639, 640, 1023, 1024, 1099])
    return edges.repeat(-(-rows // 10))[:rows].to(DEVICE)


def _weights(rows: int) -> torch.Tensor:
    """A grad_output of its own for every row, none of them 1."""
    return torch.linspace(-1.5, 2.5, rows, device=DEVICE) + 0.01


def _normaliser(logits: torch.Tensor, targets: torch.Tensor, impl: Impl, temperature: float = 1.0) -> Normaliser:
    part = logprob.partials(logits, targets, vocab_start=0, vocab_size=VOCAB, impl=impl, temperature=temperature)
    return logprob_backward.normaliser([part], vocab_size=VOCAB, impl=impl)


def _dlogits(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, impl: Impl, temperature: float = 1.0) -> torch.Tensor:
    return logprob_backward.dlogits(
        logits,
        targets,
        weights,
        normaliser=_normaliser(logits, targets, impl, temperature),
        vocab_start=0,
        vocab_size=VOCAB,
        impl=impl,
        temperature=temperature,
    )


def _autograd(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    leaf = logits.detach().requires_grad_()
    logp = (leaf[:, :VOCAB] / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (grad,) = torch.autograd.grad(logp, leaf, weights.to(leaf.dtype))
    return grad


def test_the_reference_is_the_derivative_by_finite_differences(randn: Randn) -> None:
    """Central differences of the float64 log-prob, in every column of a small vocabulary."""
    logits, targets, weights = randn(5, 20, dtype=torch.float64, scale=2.0), torch.tensor([0, 3, 19, 7, 7]), _weights(5).cpu()
    logits, step, temperature = logits.cpu(), 1e-5, 0.7

    def loss(x: torch.Tensor) -> torch.Tensor:
        return weights.double() * (x / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    numeric = torch.zeros_like(logits)
    for v in range(20):
        bump = torch.zeros_like(logits)
        bump[:, v] = step
        numeric[:, v] = (loss(logits + bump) - loss(logits - bump)) / (2 * step)
    x = logits / temperature
    max_T = x.amax(1)
    logsum_T = (x - max_T[:, None]).logsumexp(1)
    exact = fp64.dlogits(logits, targets, weights, max_T, logsum_T, columns=20, temperature=temperature, out_dtype=torch.float64)
    assert (exact - numeric).abs().max() < 1e-9


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_dlogits_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, temperature: float) -> None:
    logits, targets, weights = randn(20, 1152, dtype=dtype, scale=3.0), _targets(20), _weights(20)
    exact = _autograd(logits.double(), targets, weights, temperature)
    plain = _autograd(logits.float(), targets, weights, temperature)
    actual = _dlogits(logits, targets, weights, impl, temperature)
    assert actual.dtype == torch.float32
    assert_within_budget(actual, exact, plain)
    assert not actual[:, VOCAB:].any()


def test_grad_output_is_one_a_row(randn: Randn, impl: Impl) -> None:
    """A kernel that reads one grad_output for all rows is right wherever they are equal."""
    logits, targets = randn(20, VOCAB), _targets(20)
    ones = _dlogits(logits, targets, torch.ones(20, device=DEVICE), impl)
    own = _dlogits(logits, targets, _weights(20), impl)
    assert torch.allclose(own, ones * _weights(20)[:, None], rtol=1e-6, atol=0)
    assert not torch.equal(own, ones)


@pytest.mark.parametrize("width", [640, 64, 1280])
def test_every_shard_gets_its_columns_of_one_gradient(randn: Randn, impl: Impl, dtype: torch.dtype, width: int) -> None:
    logits, targets, weights = randn(11, 1280, dtype=dtype, scale=3.0), _targets(11), _weights(11)
    logits[:, VOCAB:] = torch.nan  # padding rows of the head are never read
    normaliser = _normaliser(logits, targets, impl)
    whole = _dlogits(logits, targets, weights, impl)
    for start in range(0, 1280, width):
        part = logprob_backward.dlogits(
            logits[:, start : start + width],
            targets,
            weights,
            normaliser=normaliser,
            vocab_start=start,
            vocab_size=VOCAB,
            impl=impl,
        )
        assert torch.equal(part, whole[:, start : start + width])
        foreign = (targets < start) | (targets >= start + width)
        if start < VOCAB and bool(foreign.any()):
            assert part[foreign].abs().amax(dim=1).min() > 0  # not the owner, and yet not without a gradient


def test_rows_do_not_see_the_batch(randn: Randn, impl: Impl) -> None:
    logits, targets, weights = randn(33, VOCAB, scale=3.0), _targets(33), _weights(33)
    whole, entropies = _dlogits(logits, targets, weights, impl), logprob_backward.entropy(logits, vocab_size=VOCAB, impl=impl)
    for rows in (slice(0, 1), slice(7, 9), slice(32, 33)):
        assert torch.equal(_dlogits(logits[rows], targets[rows], weights[rows], impl), whole[rows])
        assert torch.equal(logprob_backward.entropy(logits[rows], vocab_size=VOCAB, impl=impl), entropies[rows])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, temperature: float) -> None:
    logits = randn(20, 1152, dtype=dtype, scale=3.0)

    def plainly(x: torch.Tensor) -> torch.Tensor:
        logp = (x[:, :VOCAB] / temperature).log_softmax(-1)
        return -(logp.exp() * logp).sum(1)

    actual = logprob_backward.entropy(logits, vocab_size=VOCAB, impl=impl, temperature=temperature)
    assert actual.dtype == torch.float32
    # Torch's own error, or a few ulp of an entropy of 7 nats where torch's luck is better.
    error, allowed = ((x.double() - plainly(logits.double())).abs().max() for x in (actual, plainly(logits.float())))
    assert error <= 2 * allowed + 4 * 2.0**-22


@pytest.mark.parametrize("width", [640, 576, 64])
def test_entropy_does_not_see_the_shards(randn: Randn, impl: Impl, width: int) -> None:
    logits = randn(11, 1280, dtype=torch.bfloat16, scale=3.0)
    parts = [
        logprob_backward.entropy_partials(logits[:, s : s + width], vocab_start=s, vocab_size=VOCAB, impl=impl)
        for s in range(0, 1280, width)
    ]
    whole = logprob_backward.entropy(logits, vocab_size=VOCAB, impl=impl)
    assert torch.equal(logprob_backward.merge_entropy(parts, vocab_size=VOCAB, impl=impl), whole)
    with pytest.raises(ContractError, match="expected"):
        logprob_backward.merge_entropy([parts[0], *parts], vocab_size=VOCAB, impl=impl)


def test_entropy_of_a_sure_and_of_a_flat_row(impl: Impl) -> None:
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    logits[0] = -torch.inf
    logits[0, 5] = 3.0
    sure, flat = logprob_backward.entropy(logits, vocab_size=VOCAB, impl=impl).tolist()
    assert sure == 0.0
    assert flat == pytest.approx(7.0030654587, abs=1e-6)


def test_padding_changes_the_entropy_it_is_counted_in(randn: Randn, impl: Impl) -> None:
    logits = randn(5, 1152)
    masked, included = (logprob_backward.entropy(logits, vocab_size=v, impl=impl) for v in (VOCAB, 1152))
    assert (included - masked).abs().min() > 1e-3


def test_a_nan_reaches_gradient_and_entropy(randn: Randn, impl: Impl) -> None:
    logits = randn(3, VOCAB)
    logits[1, 700] = torch.nan
    assert _dlogits(logits, _targets(3), _weights(3), impl)[1].isnan().all()
    assert logprob_backward.entropy(logits, vocab_size=VOCAB, impl=impl).isnan().tolist() == [False, True, False]


def test_no_rows_are_no_error(impl: Impl) -> None:
    empty = torch.zeros(0, VOCAB, device=DEVICE)
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert _dlogits(empty, none, torch.zeros(0, device=DEVICE), impl).shape == (0, VOCAB)
    assert logprob_backward.entropy(empty, vocab_size=VOCAB, impl=impl).shape == (0,)


def test_what_does_not_fit_is_refused(randn: Randn, impl: Impl) -> None:
    logits, targets = randn(2, VOCAB), _targets(2)
    normaliser = _normaliser(logits, targets, impl)

    def call(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return logprob_backward.dlogits(logits, t, w, normaliser=normaliser, vocab_start=0, vocab_size=VOCAB, impl=impl)

    with pytest.raises(ValueError, match="grad_output"):
        call(targets, torch.ones(2, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ContractError, match="not in"):
        call(torch.tensor([0, VOCAB], device=DEVICE), torch.ones(2, device=DEVICE))
