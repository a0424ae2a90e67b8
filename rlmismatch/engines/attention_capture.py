"""Q, K and V as core attention got them, and what it made of them: the capture that the attention measures start from.

One sequence, a few layers, from the first token on; causal, so the first tokens alone are a sequence too. Everything lands in an arm's
tensors, by name, in global head order and the dtype that attention saw:

    layers.I.q [T, Hq, D]  layers.I.k, layers.I.v [T, Hkv, D]  layers.I.out [T, Hq, D]
    backward/...           see `megatron_attention` (trainer)
    backend/...            see `attention_candidates`
    window []              tokens that a token sees, itself included; 0: all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from rlmismatch.attention_policies import Operands
from rlmismatch.engines import attention_candidates, attention_knobs
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.collectives import TpGroup

MAX_TOKENS: Final = 512  # per layer kept: 512 tokens of Qwen3-8B's heads are 12 MB


def layers_kept(num_layers: int) -> tuple[int, ...]:
    """The first layer, the middle one and the last."""
    return tuple(sorted({0, num_layers // 2, num_layers - 1}))


@dataclass
class Seen:
    """This rank's heads of every call, by name; a second call of one layer is another sequence, and an error."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, layer: int, **named_THD: torch.Tensor) -> None:
        """Copies of the first tokens of each tensor. Raises ValueError for a layer that was kept before."""
        for name, x_THD in named_THD.items():
            key = f"layers.{layer}.{name}"
            if key in self.tensors:
                raise ValueError(f"{key} was captured twice: the probe takes one sequence in one piece")
            self.tensors[key] = x_THD[:MAX_TOKENS].detach().clone()


def joined(own: Mapping[str, torch.Tensor], tp: TpGroup, *, kv_copies: int) -> dict[str, torch.Tensor]:
    """Every rank's heads side by side, on the CPU; of `kv_copies` neighbouring ranks that hold one K and V the first speaks. Collective."""
    out = {}
    for name, x_THD in own.items():
        ranks = tp.gathered(x_THD)
        out[name] = torch.cat(ranks[::kv_copies] if name.endswith((".k", ".v")) else ranks, dim=1).cpu()
    return out


def try_candidates(config: SideConfig, seen: Seen, *, rank: int, scale: float) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What other backends make of the first layer's operands of this rank's heads, and of synthetic ones; rank 0 alone tries."""
    if rank != 0:
        return {}, []
    q, k, v = (seen.tensors[f"layers.0.{name}"] for name in ("q", "k", "v"))
    given = {f"{len(q)} captured tokens": Operands(q_THD=q, k_THD=k, v_THD=v, scale=scale)}
    given |= attention_candidates.synthetic(q.device, q.dtype)
    return attention_candidates.measure(attention_knobs.wanted_candidates(config), given)
