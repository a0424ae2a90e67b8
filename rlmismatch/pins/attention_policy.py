"""The pin ``attention`` with arithmetic that a knob asks for: rounded running sums or partials in place of the kernel's one rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlmismatch import attention_policies
from rlmismatch.attention_policies import Operands, Policy


def paged(
    q_THD: torch.Tensor,
    k_cache_NBHD: torch.Tensor,
    v_cache_NBHD: torch.Tensor,
    block_table_SN: torch.Tensor,
    bounds: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    policy: Policy,
) -> tuple[torch.Tensor]:
    """(out [T, Hq, D],) in q's dtype; the arguments are those of `kernels.attention.paged`. Rows behind the last bound are zero.

    Blocks lie at absolute positions, so a row has the same bits in every form and under context parallelism.
    """
    out_THD = torch.zeros_like(q_THD)
    block_size = k_cache_NBHD.shape[1]
    for s, ((start, end), length) in enumerate(zip(itertools.pairwise(bounds), lengths, strict=True)):
        position = torch.arange(length, device=q_THD.device)
        page, slot = block_table_SN[s, position // block_size].long(), position % block_size
        given = Operands(q_THD=q_THD[start:end], k_THD=k_cache_NBHD[page, slot], v_THD=v_cache_NBHD[page, slot], scale=scale)
        out_THD[start:end] = attention_policies.simulate(given, policy)
    return (out_THD,)
