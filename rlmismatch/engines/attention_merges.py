"""The log-sum-exp that a merge inside one side's attention takes: watched in a trial with known operands, and said where it is wrong.

Shapes: Hq / Hkv heads of this rank, T query rows, N keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from rlmismatch import attention_policies
from rlmismatch.attention_policies import Partial
from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines.attention_lse import LseFound, diagnose, exact
from rlmismatch.pins.hooks import Patch, installed

TOKENS: Final = 48  # of the trial: more than a sequence may have and still be short


@contextmanager
def consumed() -> Iterator[list[Sequence[Partial]]]:
    """The partials of every merge that this tool's own arithmetic makes while the context is open, as the merge takes them."""
    seen: list[Sequence[Partial]] = []

    def make(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def merge(parts: Sequence[Partial]) -> torch.Tensor:
            seen.append(parts)
            return native(parts)

        return merge

    with installed([Patch(target=attention_policies, name="merge", make=make, pins=(), label="trial: merges")]):
        yield seen


def diagnose_merges(merges: Sequence[Sequence[Partial]], q_THD: torch.Tensor, k_THD: torch.Tensor, scale: float) -> LseFound | None:
    """What the LSE is that merges of causal attention over q and k took; None where nothing was merged.

    Each merge is of the rows that end where its last key does.
    """
    live, truth = [], []
    for parts in merges:
        end = max(part.keys[1] for part in parts)
        rows = slice(end - parts[0].lse_HT.shape[1], end)
        live += [part.lse_HT for part in parts]
        truth += [exact(q_THD[rows], k_THD[:end], scale, keys=part.keys) for part in parts]
    return diagnose(torch.cat(live, -1), torch.cat(truth, -1)) if live else None


# What a merge is to be given; kernels/attention exports it so.
_RIGHT: Final = {"lse_domain": "attention scores", "lse_base": "e", "lse_shape": "[head, token]", "masked_row": "-inf"}


def fields(found: LseFound | None, why_none: str, source: str) -> dict[str, Reading]:
    """The fields of attention.lse of a side whose ranks merge nothing. found: what a merge inside its attention was seen to take.

    Where nothing was seen, or what was seen is as it should be, no convention matters to the other side; what is wrong is said.
    """
    out = dict.fromkeys(("lse_export", *_RIGHT), not_applicable(why_none))
    if found is None:
        return out
    values = {"lse_domain": found.domain, "lse_base": found.base, "lse_shape": found.shape, "masked_row": found.masked_row or "-inf"}
    for name, value in values.items():
        if value is None:
            out[name] = unknown(f"{source}: what the merge takes fits no log-sum-exp of the scores (slope {found.slope:.4g})")
        elif value != _RIGHT[name]:
            out[name] = read(value, f"{source}: slope {found.slope:.4f} over float64")
    return out


def trial_operands(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] of normal numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, n, dim, generator=generator).to(device, dtype) for n in (heads, kv_heads, kv_heads))
    return q, k, v
