"""The kernels on real shapes (Qwen3-0.6B and Qwen3-8B): the same bits whatever the rows, tile or shards, and accuracy.

That a tile moves no bit is a fact about a card, not a theorem: tensor cores round inside a product as they like, only the same for every
tile. These tests are the proof for the card they run on. The GEMM's are in test_gemm_gpu.py, attention's in test_attention_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.kernels import gemm, logprob, logprob_backward, logprob_linear, norm, rope, swiglu
from tests.kernels.budget import assert_within_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),  # Triton 3.9; every launch states its own
]

Randn = Callable[..., torch.Tensor]
BF16 = torch.bfloat16
VOCAB = 151936


@pytest.fixture
def randn() -> Randn:
    generator = torch.Generator("cuda").manual_seed(20251129)

    def make(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    return make


@pytest.mark.parametrize("width", [128, 1024, 4096, 12288])
def test_norm(randn: Randn, width: int) -> None:
    x, r, weight = randn(777, width), randn(777, width), 1 + randn(width, scale=0.2)
    y, residual = norm.add_rms_norm(x, r, weight, 1e-6, impl="triton")
    assert torch.equal(residual, x + r)
    for rows in (1, 5, 256):
        assert torch.equal(norm.rms_norm(residual[:rows], weight, 1e-6, impl="triton"), y[:rows])
    total = residual.double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    hidden = residual.float()
    plain = weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert_within_budget(y, exact, plain)


def test_rope(randn: Randn) -> None:
    q, k, positions = randn(600, 32, 128), randn(600, 8, 128), torch.randint(0, 40960, (600,), device="cuda")
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, 128, 2, device="cuda", dtype=torch.float32) / 128)
    together = rope.rotary(q, k, positions, inv_freq, impl="triton")
    alone = rope.rotary(q[-1:], k[-1:], positions[-1:], inv_freq, impl="triton")
    assert torch.equal(alone.q_THD[0], together.q_THD[-1])
    assert torch.equal(alone.k_THD[0], together.k_THD[-1])
    angle = positions[:, None, None].float() * inv_freq
    exact_angle = positions[:, None, None].double() * inv_freq.double()
    a, b = q.chunk(2, dim=-1)
    plain = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).bfloat16()
    a, b = a.double(), b.double()
    exact = torch.cat([a * exact_angle.cos() - b * exact_angle.sin(), b * exact_angle.cos() + a * exact_angle.sin()], dim=-1)
    assert_within_budget(together.q_THD, exact, plain)


def test_swiglu(randn: Randn) -> None:
    gate_up = randn(500, 2 * 12288, scale=2.0)
    out = swiglu.swiglu_packed(gate_up, impl="triton")
    assert torch.equal(swiglu.swiglu_packed(gate_up[-1:], impl="triton"), out[-1:])
    gate, up = gate_up.chunk(2, dim=-1)
    plain = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    assert_within_budget(out, torch.nn.functional.silu(gate.double()) * up.double(), plain)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_logprob(randn: Randn, dtype: torch.dtype) -> None:
    logits, targets = randn(64, VOCAB + 128, dtype=dtype, scale=3.0), torch.randint(0, VOCAB, (64,), device="cuda")
    logits[:, VOCAB:] = torch.nan
    whole = logprob.selected(logits, targets, vocab_size=VOCAB, impl="triton")
    for width in (76032, 75968, 64 * 100):  # the trainer's shards at TP2, the rollout's, and a third
        bounds = range(0, VOCAB, width)
        parts = [logprob.partials(logits[:, b : b + width], targets, vocab_start=b, vocab_size=VOCAB, impl="triton") for b in bounds]
        assert torch.equal(logprob.merge(parts, vocab_size=VOCAB, impl="triton"), whole), width
    every = logprob.log_softmax(logits, vocab_size=VOCAB, impl="triton")
    assert torch.equal(every.gather(1, targets[:, None])[:, 0], whole)
    assert torch.equal(logprob.selected(logits[5:6], targets[5:6], vocab_size=VOCAB, impl="triton"), whole[5:6])
    exact = logits[:, :VOCAB].double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    plain = logits[:, :VOCAB].float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert_within_budget(whole, exact, plain)


def test_logprob_of_many_rows(randn: Randn) -> None:
    """One program a row has the bits of tiles spread over the card; accuracy no worse than F.cross_entropy of float32 logits."""
    rows = 512
    logits, targets = randn(rows, VOCAB, dtype=BF16, scale=3.0), torch.arange(rows, device="cuda") * 293 % VOCAB
    whole = logprob.selected(logits, targets, vocab_size=VOCAB, impl="triton")
    for picked in (slice(0, 1), slice(100, 163), slice(0, 300)):
        assert torch.equal(logprob.selected(logits[picked], targets[picked], vocab_size=VOCAB, impl="triton"), whole[picked])
    for width in (76032, 75968):
        parts = [
            logprob.partials(logits[:, b : b + width], targets, vocab_start=b, vocab_size=VOCAB, impl="triton")
            for b in range(0, VOCAB, width)
        ]
        assert torch.equal(logprob.merge(parts, vocab_size=VOCAB, impl="triton"), whole)
    every = logprob.log_softmax(logits, vocab_size=VOCAB, impl="triton")
    assert torch.equal(every.gather(1, targets[:, None])[:, 0], whole)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    plain = -torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    ours, theirs = ((x.double() - exact).abs() for x in (whole, plain))
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= theirs.max()


def test_logprob_backward_and_entropy(randn: Randn) -> None:
    """2048 x 151936 in bfloat16: one set of bits a shard and a batch; accuracy no worse than torch's float32 autograd."""
    rows = 256
    logits, targets = randn(rows, VOCAB, scale=3.0, dtype=torch.bfloat16), torch.arange(rows, device="cuda") * 577 % VOCAB
    grads = torch.linspace(-1.5, 2.0, rows, device="cuda")
    part = logprob.partials(logits, targets, vocab_start=0, vocab_size=VOCAB, impl="triton")
    normaliser = logprob_backward.normaliser([part], vocab_size=VOCAB, impl="triton")

    def dlogits(start: int, end: int, picked: slice = slice(None)) -> torch.Tensor:
        own = logprob_backward.Normaliser(max_T=normaliser.max_T[picked], logsum_T=normaliser.logsum_T[picked])
        return logprob_backward.dlogits(
            logits[picked, start:end],
            targets[picked],
            grads[picked],
            normaliser=own,
            vocab_start=start,
            vocab_size=VOCAB,
            impl="triton",
        )

    whole = dlogits(0, VOCAB)
    for start, end in ((0, 75968), (75968, VOCAB), (76032, VOCAB)):
        assert torch.equal(dlogits(start, end), whole[:, start:end])
    assert torch.equal(dlogits(0, VOCAB, slice(7, 8)), whole[7:8])
    entropy = logprob_backward.entropy(logits, vocab_size=VOCAB, impl="triton")
    assert torch.equal(logprob_backward.entropy(logits[7:8], vocab_size=VOCAB, impl="triton"), entropy[7:8])

    def plainly(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.to(dtype).requires_grad_()
        logp = leaf.log_softmax(-1)
        (grad,) = torch.autograd.grad(logp.gather(1, targets[:, None])[:, 0], leaf, grads.to(dtype), retain_graph=True)
        return grad, -(logp.exp() * logp).sum(1).detach()

    exact, plain = plainly(torch.float64), plainly(torch.float32)
    for ours, truth, torchs in zip((whole, entropy), exact, plain, strict=True):
        error, allowed = ((x.double() - truth).abs().max() for x in (ours, torchs))
        assert error <= 2 * allowed + 2.0**-22 * truth.abs().max()


def test_head_and_logprob_in_one(randn: Randn) -> None:
    hidden, weight = randn(64, 1024, dtype=torch.bfloat16), randn(VOCAB, 1024, scale=0.05, dtype=torch.bfloat16)
    targets = torch.arange(64, device="cuda") * 2311 % VOCAB
    whole = logprob.selected(gemm.linear(hidden, weight, impl="triton"), targets, vocab_size=VOCAB, impl="triton")
    for block in (8192, 65536):
        fused = logprob_linear.selected(hidden, weight, targets, vocab_size=VOCAB, impl="triton", block_size=block)
        assert torch.equal(fused, whole)
