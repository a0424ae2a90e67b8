"""What a rotary embedding does, read from what it makes of unit vectors: pairs, width, factor, and the position of each token.

Every unit vector of a head goes in as a head of its own, so what comes out is the rotation itself, column by column. It is asked for
token t = 0, 1, ... as the engine counts them; the angle of the fastest pair tells the position that was used, and slower pairs which
turn of it. Pure functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.contract import Reading, read, unknown

TOKENS: Final = 24
_SAME: Final = 0.02  # of a factor; bfloat16 cos and sin are good to 0.4 %
_POSITION_ERROR: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What was found. None: nothing that is known here."""

    layout: str | None  # half | interleaved
    rotary_dim: int
    factor: float | None  # on cos and sin
    positions: tuple[int, ...] | None  # of token 0, 1, ...

    @property
    def steps(self) -> str | None:
        """``0..n-1`` for positions that count up by one, wherever they start; else where they jump."""
        if self.positions is None:
            return None
        jumps = [(t, b - a - 1) for t, (a, b) in enumerate(zip(self.positions, self.positions[1:], strict=False), 1) if b - a != 1]
        return "0..n-1" if not jumps else f"jumps by {jumps[0][1]:+d} at token {jumps[0][0]}"

    @property
    def offset(self) -> int:
        """By how much all positions are shifted alike: RoPE is relative, so this has no numeric effect."""
        return self.positions[0] if self.positions and self.steps == "0..n-1" else 0


def unit_vectors(dim: int, tokens: int = TOKENS, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[tokens, D, D]: head h of every token is the h-th unit vector of a head of `dim`."""
    return torch.eye(dim, dtype=dtype, device=device).expand(tokens, dim, dim).contiguous()


def read_rotation(out_TDD: torch.Tensor, inv_freq: torch.Tensor) -> Rotation:
    """The rotation behind `out_TDD`, what became of `unit_vectors`. inv_freq: [rotary_dim / 2], the live ones, fastest first."""
    out = out_TDD.double().cpu()
    frequencies = inv_freq.double().cpu()
    dim = out.shape[1]
    moved = (out - torch.eye(dim, dtype=torch.float64)).abs().amax((0, 2)) > 1e-6
    width = int(moved.sum())
    others = out.abs().amax(0).fill_diagonal_(0.0)
    partners = others.argmax(1)[: max(width, 1)].tolist()
    half = width // 2
    layout = None
    # Slow pairs hardly turn within so few tokens: the fastest ones decide.
    if half and partners[0] == half:
        layout = "half"
    elif half and partners[0] == 1:
        layout = "interleaved"
    if layout is None:
        return Rotation(layout=None, rotary_dim=width, factor=None, positions=None)
    index = [j if layout == "half" else 2 * j for j in range(half)]
    partner = [j + half if layout == "half" else 2 * j + 1 for j in range(half)]
    cos, sin = out[:, index, index], out[:, index, partner]
    norms = torch.hypot(cos, sin)
    factor = float(norms.mean())
    steady = bool(((norms / factor - 1.0).abs() < _SAME).all())
    return Rotation(
        layout=layout,
        rotary_dim=width,
        factor=(1.0 if abs(factor - 1.0) < _SAME else float(f"{factor:.3g}")) if steady else None,
        positions=_positions(torch.atan2(sin, cos), frequencies[:half]),
    )


def _positions(angle_TF: torch.Tensor, frequencies: torch.Tensor) -> tuple[int, ...] | None:
    """The position whose angle is seen in every pair: from the slowest pair that can tell, then turn by turn in faster ones."""
    out = []
    for angles in angle_TF:
        found: float | None = None
        for frequency, angle in sorted(zip(frequencies.tolist(), angles.tolist(), strict=True)):
            turn = 2 * math.pi / frequency
            if frequency < 1e-4:
                continue  # so slow that rounding is worth a position or more
            here = angle / frequency
            if found is None:
                found = here % turn if here < -_POSITION_ERROR / frequency else here
            else:
                found = here + turn * round((found - here) / turn)
        if found is None or abs(found - round(found)) > _POSITION_ERROR:
            return None
        out.append(round(found))
    return tuple(out)


def rotation_fields(found: Rotation, passed: Sequence[int], source: str) -> dict[str, Reading]:
    """The fields of attention.rope that a trial answers. passed: the positions that the engine hands to its rotary embedding; none where
    that cannot be seen, and then what it does with 0, 1, ... is all that is read.
    """
    passed = passed or [0]
    wrong = [t for t, p in enumerate(passed) if p - passed[0] != t]
    steps = found.steps if not wrong else f"{passed[wrong[0]]} at token {wrong[0]}"
    offset = found.offset + passed[0]
    shifted = f"; shifted alike by {offset}: no numeric effect expected" if offset else ""

    def field(value: str | float | None) -> Reading:
        return unknown(f"{source}: its answers fit no rotation that is known") if value is None else read(value, source + shifted)

    return {
        "attention_factor": field(found.factor),
        "rotary_dim": read(found.rotary_dim, source),
        "rotary_layout": field(found.layout),
        "position_ids": field(steps),
    }
