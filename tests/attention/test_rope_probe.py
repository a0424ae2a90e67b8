"""Reading a rotary embedding from unit vectors: layout, width, factor and positions, each with a fault of its own."""

from __future__ import annotations

import pytest
import torch

from rlmismatch.engines import rope_probe
from rlmismatch.engines.rope_probe import Rotation

DIM = 32


def rotate(x, positions, inv_freq, *, interleaved=False, factor=1.0, dtype=torch.bfloat16):  # type: ignore[no-untyped-def]
    """RoPE with cos and sin in the model's dtype, as native engines have them; the formula written out on its own."""
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * inv_freq.double()
    cos, sin = ((f(angle) * factor).to(dtype).double()[:, None] for f in (torch.cos, torch.sin))
    x = x.double()
    width = 2 * len(inv_freq)
    turned, rest = x[..., :width], x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1).to(dtype)


def found(positions: list[int] | None = None, *, theta: float = 1e6, width: int = DIM, **fault: object) -> Rotation:
    inv_freq = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    x = rope_probe.unit_vectors(DIM, dtype=torch.bfloat16, device=torch.device("cpu"))
    return rope_probe.read_rotation(rotate(x, positions or list(range(rope_probe.TOKENS)), inv_freq, **fault), inv_freq)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_a_clean_rotation(theta: float) -> None:
    got = found(theta=theta)
    assert got == Rotation(layout="half", rotary_dim=DIM, factor=1.0, positions=tuple(range(rope_probe.TOKENS)))
    assert (got.steps, got.offset) == ("0..n-1", 0)


def test_neighbours_instead_of_halves() -> None:
    assert found(interleaved=True).layout == "interleaved"


def test_a_factor_on_cos_and_sin() -> None:
    got = found(factor=1.4159)
    assert got.factor == pytest.approx(1.4159, rel=0.01)
    assert got.positions == tuple(range(rope_probe.TOKENS))


def test_half_of_the_head() -> None:
    assert found(width=DIM // 2).rotary_dim == DIM // 2


def test_positions_that_jump_and_positions_shifted_alike() -> None:
    n = rope_probe.TOKENS
    assert found([p + 5 * (p >= 8) for p in range(n)]).steps == "jumps by +5 at token 8"
    shifted = found([p + 7 for p in range(n)])
    assert (shifted.steps, shifted.offset) == ("0..n-1", 7)


def test_no_rotation_at_all() -> None:
    assert found([0] * rope_probe.TOKENS) == Rotation(layout=None, rotary_dim=0, factor=None, positions=None)
