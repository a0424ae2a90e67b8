"""The gradient of attention. The chain: float64 autograd of a formula written here = reference -> each implementation within the
budget of plain torch's own gradient -> alone = in a batch, bit for bit -> the autograd function hands out those gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmismatch.kernels import attention, attention_backward
from rlmismatch.kernels.attention_backward import AttentionGrads, Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
SCALE = 0.3
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 9},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 33, "soft_cap": 3.0, "sinks": True},
}


def _operands(randn: Randn, tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.bfloat16) -> Any:
    return [randn(tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)]


def _form(name: str, randn: Randn, heads: int) -> dict[str, Any]:
    form = dict(FORMS[name])
    if form.pop("sinks", False):
        form["sinks_H"] = randn(heads)
    return form


def _autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dtype: torch.dtype,
    *, window: int | None = None, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None,
) -> AttentionGrads:  # fmt: skip
    """One sequence, unfused, by torch's autograd in `dtype`."""
    q, k, v, dout = (x.detach().to(dtype).requires_grad_() for x in (q, k, v, dout))
    group, tokens = q.shape[1] // k.shape[1], len(q)
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    gap = torch.arange(tokens, device=DEVICE)[:, None] - torch.arange(tokens, device=DEVICE)
    score = score.masked_fill((gap < 0) | (gap >= (window or tokens)), -torch.inf)
    sinks = None if sinks_H is None else sinks_H.detach().to(dtype).requires_grad_()
    if sinks is not None:
        score = torch.cat([score, sinks[:, None, None].expand(-1, tokens, 1)], dim=-1)
    weight = score.softmax(-1)[..., :tokens]
    out = torch.einsum("hqk,khd->qhd", weight, values)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    grads = torch.autograd.grad(out, inputs, dout)
    return AttentionGrads(*grads[:3], grads[3] if sinks is not None else None)


def _ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, bounds: list[int], impl: Impl, **form: Any
) -> AttentionGrads:
    out, lse = attention.causal(q, k, v, bounds, scale=SCALE, impl=impl, **form)
    return attention_backward.causal_backward(q, k, v, out, lse, dout, bounds, scale=SCALE, impl=impl, **form)


@pytest.mark.parametrize("name", FORMS)
def test_reference_is_the_gradient(randn: Randn, name: str) -> None:
    from rlmismatch.kernels.attention import reference as forward
    from rlmismatch.kernels.attention.order import Scores
    from rlmismatch.kernels.attention_backward import reference

    q, k, v, dout = (x.double() for x in _operands(randn, 50))
    form = _form(name, randn, 4)
    out, lse = forward.causal(q, k, v, [0, 50], scale=SCALE, out_dtype=torch.float64, **form)
    sinks = form.pop("sinks_H", None)
    actual = reference.causal_backward(
        q, k, v, out, lse, dout, [0, 50], scores=Scores(scale=SCALE, **form), sinks_H=sinks, out_dtype=torch.float64
    )
    exact = _autograd(q, k, v, dout, torch.float64, sinks_H=sinks, **form)
    for ours, theirs in zip(actual, exact, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_long_reference_sequences_are_cut_without_a_seam(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = _operands(randn, 50, dtype=torch.float32)
    whole = _ours(*operands, [0, 50], "reference")
    monkeypatch.setattr("rlmismatch.kernels.attention_backward.reference._QUERY_ROWS", 7)
    for a, b in zip(_ours(*operands, [0, 50], "reference")[:3], whole[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, name: str) -> None:
    q, k, v, dout = _operands(randn, 70, heads=6, kv_heads=2, dim=24, dtype=dtype)
    form = _form(name, randn, 6)
    exact = _autograd(q, k, v, dout, torch.float64, **form)
    plain = _autograd(q, k, v, dout, dtype, **form)
    actual = _ours(q, k, v, dout, [0, 70], impl, **form)
    for ours, theirs, torchs in zip(actual[:3], exact[:3], plain[:3], strict=True):
        assert ours.dtype == dtype
        assert_within_budget(ours, theirs, torchs)
    if exact.dsinks_H is not None:
        assert actual.dsinks_H.dtype == torch.float32
        assert_within_budget(actual.dsinks_H, exact.dsinks_H, plain.dsinks_H)


def test_a_sequence_alone_and_in_a_batch(randn: Randn, impl: Impl) -> None:
    bounds = [0, 1, 67, 67, 140]
    operands = _operands(randn, 140)
    together = _ours(*operands, bounds, impl, window=50)
    for start, end in ((0, 1), (1, 67), (67, 140)):
        alone = _ours(*(x[start:end] for x in operands), [0, end - start], impl, window=50)
        for a, b in zip(alone[:3], together[:3], strict=True):
            assert torch.equal(a, b[start:end])


def test_operands_of_any_strides(randn: Randn, impl: Impl) -> None:
    q, k, v, dout = _operands(randn, 40)
    packed = torch.cat([q, k, v], dim=1)
    expected = _ours(q, k, v, dout, [0, 40], impl)
    actual = _ours(packed[:, :4], packed[:, 4:6], packed[:, 6:], dout.transpose(0, 1).contiguous().transpose(0, 1), [0, 40], impl)
    for a, b in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(a, b)


def test_autograd(randn: Randn, impl: Impl) -> None:
    q, k, v, dout = _operands(randn, 30)
    sinks = randn(4).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention_backward.causal_autograd(*leaves, [0, 30], scale=SCALE, impl=impl, sinks_H=sinks)
    assert not lse.requires_grad
    assert torch.equal(
        out,
        attention.causal(q, k, v, [0, 30], scale=SCALE, impl="reference" if impl == "reference" else impl, sinks_H=sinks.detach()).out_THD,
    )
    out.backward(dout)
    expected = _ours(q, k, v, dout, [0, 30], impl, sinks_H=sinks.detach())
    for leaf, grad in zip([*leaves, sinks], expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_it_takes_any_kernels_output(randn: Randn, impl: Impl) -> None:
    """An (out, lse) that is off moves the gradient: it is read, not computed anew."""
    q, k, v, dout = _operands(randn, 30)
    out, lse = attention.causal(q, k, v, [0, 30], scale=SCALE, impl="reference")
    right, off_lse, off_out = (
        attention_backward.causal_backward(q, k, v, o, s, dout, [0, 30], scale=SCALE, impl=impl)
        for o, s in ((out, lse), (out, lse + 0.5), (out + 1, lse))
    )
    assert torch.allclose(off_lse.dv_THD.float(), right.dv_THD.float() * torch.e**-0.5, atol=0.02, rtol=0.02)
    assert not torch.equal(off_out.dq_THD, right.dq_THD)
    assert torch.equal(off_out.dv_THD, right.dv_THD)


def test_no_tokens(randn: Randn, impl: Impl) -> None:
    grads = _ours(*_operands(randn, 0), [0, 0], impl)
    assert [tuple(g.shape) for g in grads[:3]] == [(0, 4, 32), (0, 2, 32), (0, 2, 32)]


def test_what_does_not_fit_is_refused(randn: Randn, impl: Impl) -> None:
    q, k, v, dout = _operands(randn, 8)
    out, lse = attention.causal(q, k, v, [0, 8], scale=SCALE, impl="reference")
    call = attention_backward.causal_backward
    with pytest.raises(ValueError, match="do not fit"):
        call(q, k, v, out[:7], lse, dout, [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="do not fit"):
        call(q, k, v, out, lse.T, dout, [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match=r"dout is torch\.float32"):
        call(q, k, v, out, lse, dout.float(), [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call(q, k, v, out, lse, dout, [0, 9], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="window"):
        call(q, k, v, out, lse, dout, [0, 8], scale=SCALE, impl=impl, window=0)
