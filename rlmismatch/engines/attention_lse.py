"""What an exported log-sum-exp of attention is: its base, the order of its axes, and what it holds for a row that sees nothing.

A merge that takes one base for the other is off by a constant factor, 1 / ln 2, so the slope of the exported values over exact ones names
it; a table of heads by tokens that is read as tokens by heads fits neither way. Pure functions of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlmismatch import attention_policies

_SLOPES: Final = {"e": 1.0, "2": 1.0 / math.log(2.0)}
_SAME: Final = 1e-2  # of a slope; the bases lie 0.44 apart
_CLOSE_NATS: Final = 2e-2  # what an attention LSE of bfloat16 operands may be off by; one of the vocabulary's logits is off by nats


@dataclass(frozen=True, kw_only=True)
class LseFound:
    """What was found. None: it fits nothing that is known; masked_row is None, too, where every row sees something."""

    base: str | None  # e | 2
    shape: str | None  # [head, token] | [token, head]
    domain: str | None  # attention scores
    slope: float  # of the exported values over the exact ones in nats
    worst_nats: float  # the largest difference once base and shape are undone
    masked_row: str | None = None  # -inf, or the value

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def exact(
    q_THD: torch.Tensor, k_THD: torch.Tensor, scale: float, *, window: int | None = None, keys: tuple[int, int] | None = None
) -> torch.Tensor:
    """float64 [Hq, T] on the CPU, nats: of causal attention's scaled scores of the last T of N tokens.

    window: tokens that a token sees, itself included. keys: [start, end) of those that are summed; None: all.
    """
    group = q_THD.shape[1] // k_THD.shape[1]
    q, k = q_THD.double().cpu(), k_THD.double().cpu().repeat_interleave(group, 1)
    score_HTN = torch.einsum("thd,nhd->htn", q, k) * scale
    seen = attention_policies.visible(len(q), len(k), window, score_HTN.device)
    score_HTN = score_HTN.masked_fill(~seen, -torch.inf)
    return score_HTN[..., slice(*keys) if keys else slice(None)].logsumexp(-1)


def diagnose(live: torch.Tensor, exact_HT: torch.Tensor) -> LseFound:
    """What `live`, of two axes, is beside the exact LSE; rows of `exact_HT` that are -inf see nothing.

    Raises ValueError where `live` has other sizes than heads and tokens, in either order.
    """
    fits = [
        (shape, table)
        for shape, table in (("[head, token]", live), ("[token, head]", live.T))
        if tuple(table.shape) == tuple(exact_HT.shape)
    ]
    if live.dim() != 2 or not fits:
        raise ValueError(f"an LSE of shape {tuple(live.shape)} is none of {tuple(exact_HT.shape)} in either order")
    return min((_fitted(shape, table.double().cpu(), exact_HT) for shape, table in fits), key=lambda found: found.worst_nats)


def _fitted(shape: str, live_HT: torch.Tensor, exact_HT: torch.Tensor) -> LseFound:
    seen = torch.isfinite(exact_HT)
    x, y = exact_HT[seen], live_HT[seen]
    slope = float((x * y).sum() / x.square().sum()) if x.numel() and bool(x.any()) else math.nan
    base = next((name for name, known in _SLOPES.items() if abs(slope / known - 1.0) <= _SAME), None)
    worst = float((y / (_SLOPES[base] if base else 1.0) - x).abs().max()) if x.numel() else math.nan
    right = base is not None and worst <= _CLOSE_NATS
    masked = live_HT[~seen]
    values = sorted({float(v) for v in masked})
    return LseFound(
        base=base if right else None,
        shape=shape if right else None,
        domain="attention scores" if right else None,
        slope=slope,
        worst_nats=worst,
        masked_row=", ".join(map(str, values)) if values else None,
    )
