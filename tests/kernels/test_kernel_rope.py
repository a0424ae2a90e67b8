"""Rotary embedding: the rotation, partial rotation, positions, no rounding of cos and sin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.kernels import rope
from rlmismatch.kernels.rope import Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]


def _inv_freq(rotary_dim: int, theta: float = 1e4) -> torch.Tensor:
    return (1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)).to(DEVICE)


@pytest.mark.parametrize(("rotary_dim", "scale"), [(32, 1.0), (16, 1.0), (12, 0.75)])
def test_rotary_is_a_complex_rotation(randn: Randn, impl: Impl, dtype: torch.dtype, rotary_dim: int, scale: float) -> None:
    q, k = randn(9, 3, 32, dtype=dtype), randn(9, 1, 32, dtype=dtype)
    positions, inv_freq = torch.tensor([0, 1, 2, 3, 4, 100, 101, 4095, 32767], device=DEVICE), _inv_freq(rotary_dim)
    rotated = rope.rotary(q, k, positions, inv_freq, impl=impl, scale=scale)
    half = rotary_dim // 2
    turn = torch.polar(
        torch.full((9, 1, half), scale, dtype=torch.float64, device=DEVICE), positions[:, None, None].double() * inv_freq.double()
    )
    angle = positions.float()[:, None, None] * inv_freq
    cos, sin = angle.cos() * scale, angle.sin() * scale
    for x, actual in zip((q, k), rotated, strict=True):
        z = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn
        exact = torch.cat([z.real, z.imag], dim=-1)
        a, b = x[..., :half].float(), x[..., half:rotary_dim].float()
        plain = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(dtype)
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        assert_within_budget(actual[..., :rotary_dim], exact, plain)
        assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


def test_cos_and_sin_are_not_rounded_to_the_model_dtype(randn: Randn, impl: Impl) -> None:
    q, inv_freq, positions = randn(40, 2, 32, dtype=torch.bfloat16), _inv_freq(32), torch.arange(40, device=DEVICE)
    angle = positions[:, None, None].float() * inv_freq
    cos, sin = angle.cos().bfloat16().float(), angle.sin().bfloat16().float()
    a, b = q.float().chunk(2, dim=-1)
    rounded_tables = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()
    assert (rope.rotary(q, q, positions, inv_freq, impl=impl).q_THD != rounded_tables).float().mean() > 0.1


def test_position_zero_is_the_identity(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    q = randn(2, 2, 16, dtype=dtype)
    assert torch.equal(rope.rotary(q, q, torch.zeros(2, dtype=torch.int64, device=DEVICE), _inv_freq(16), impl=impl).q_THD, q)


def test_a_token_alone_has_the_bits_it_has_in_a_batch(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    q, k, positions, inv_freq = (
        randn(50, 4, 32, dtype=dtype),
        randn(50, 2, 32, dtype=dtype),
        torch.arange(50, device=DEVICE) + 7,
        _inv_freq(32),
    )
    together = rope.rotary(q, k, positions, inv_freq, impl=impl)
    for t in (0, 17, 49):
        alone = rope.rotary(q[t : t + 1], k[t : t + 1], positions[t : t + 1], inv_freq, impl=impl)
        assert torch.equal(alone.q_THD[0], together.q_THD[t])
        assert torch.equal(alone.k_THD[0], together.k_THD[t])


def test_any_strides_and_position_dtype(randn: Randn, impl: Impl) -> None:
    packed, inv_freq = randn(8, 6, 16, dtype=torch.bfloat16), _inv_freq(16)
    positions = torch.arange(16, device=DEVICE)[::2]
    q, k = packed[:, :4], packed[:, 4:]
    views = rope.rotary(q, k, positions.to(torch.int32), inv_freq, impl=impl)
    copies = rope.rotary(q.contiguous(), k.contiguous(), positions.contiguous(), inv_freq, impl=impl)
    assert torch.equal(views.q_THD, copies.q_THD)
    assert torch.equal(views.k_THD, copies.k_THD)
    head_major = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rope.rotary(head_major, k, positions, inv_freq, impl=impl).q_THD, copies.q_THD)


def test_reference_in_float64_is_unrounded(randn: Randn) -> None:
    from rlmismatch.kernels.rope import reference

    q, positions = randn(5, 1, 8, dtype=torch.bfloat16), torch.arange(5, device=DEVICE)
    out = reference.rotary(q, positions, _inv_freq(8), out_dtype=torch.float64)
    norm = out.view(5, 2, 4).square().sum(dim=1)
    torch.testing.assert_close(norm, q.double().view(5, 2, 4).square().sum(dim=1), rtol=1e-14, atol=0.0)  # a rotation keeps the length


def test_operands_that_do_not_fit_are_refused(impl: Impl) -> None:
    q, positions = torch.zeros(4, 2, 16, device=DEVICE), torch.arange(4, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        rope.rotary(q, q, positions[:3], _inv_freq(16), impl=impl)
    with pytest.raises(ValueError, match="do not fit"):
        rope.rotary(q, q[:3], positions, _inv_freq(16), impl=impl)
    with pytest.raises(ValueError, match="inv_freq"):
        rope.rotary(q, q, positions, _inv_freq(18), impl=impl)
    with pytest.raises(ValueError, match="inv_freq"):
        rope.rotary(q, q, positions, _inv_freq(16).bfloat16(), impl=impl)
    with pytest.raises(ValueError, match="positions must be"):
        rope.rotary(q, q, positions.float(), _inv_freq(16), impl=impl)
