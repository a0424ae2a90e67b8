"""Which checkpoint head each live head is: the heads' own values as canaries, through the engine's own weight loader.

One token, up to the first layer's RoPE: what the checkpoint says Q, K and V of that token are is compared with what the live engine has
there, head by head. Heads of a checkpoint are unlike each other, so each
names itself: a fused projection taken apart in another order, or ranks that hold other heads than they claim, show as what they are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from rlmismatch.checkpoint import Checkpoint
from rlmismatch.contract import Reading, read, unknown

TOKEN: Final = 1
_ALIKE: Final = 0.9  # cosine of a head with itself, after bfloat16 and with q/k norms that a fault may have left out
_UNLIKE: Final = 0.05  # by how much the next best must be worse


class Heads(NamedTuple):
    """Q [Hq, D], K and V [Hkv, D] of one token."""

    q_HD: torch.Tensor
    k_HD: torch.Tensor
    v_HD: torch.Tensor


def of_checkpoint(checkpoint: Checkpoint, token: int = TOKEN) -> Heads:
    """float64 on the CPU: the first layer's heads for one token, from the checkpoint alone."""
    model = checkpoint.config
    layer = "model.layers.0"

    def weight(name: str) -> torch.Tensor:
        return checkpoint.tensor(name).double()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + model.rms_eps).rsqrt() * weight(name)

    x_H = normed(checkpoint.tensor("model.embed_tokens.weight")[token].double(), f"{layer}.input_layernorm.weight")
    heads = {}
    for name in ("q", "k", "v"):
        y = weight(f"{layer}.self_attn.{name}_proj.weight") @ x_H
        if model.qkv_bias:
            y = y + weight(f"{layer}.self_attn.{name}_proj.bias")
        y_HD = y.view(-1, model.head_dim)
        heads[name] = normed(y_HD, f"{layer}.self_attn.{name}_norm.weight") if model.qk_norm and name != "v" else y_HD
    return Heads(q_HD=heads["q"], k_HD=heads["k"], v_HD=heads["v"])


def named(live_HD: torch.Tensor, checkpoint_HD: torch.Tensor) -> list[int] | None:
    """For each live head the checkpoint head that it is; None if one is like none of them, or like two."""
    live, known = (torch.nn.functional.normalize(x.double().cpu(), dim=-1) for x in (live_HD, checkpoint_HD))
    cosine_LC = live @ known.T
    out = []
    for row in cosine_LC:
        best = int(row.argmax())
        others = torch.cat([row[:best], row[best + 1 :]])
        if not float(row[best]) >= _ALIKE or (others.numel() and not float(others.max()) <= float(row[best]) - _UNLIKE):
            return None
        out.append(best)
    return out


def ownership(heads: list[int] | None, own: int, ranks: int) -> Reading:
    """attention.layout:tp_head_ownership: ``[first, end]`` of each rank's query heads, `own` to a rank; a rank whose heads are no range
    has them listed, which equals none."""
    source = "canary: the checkpoint's heads in the first layer, over ranks"
    if heads is None:
        return unknown(f"{source}: a live head is like none of the checkpoint's, or like two")
    parts = [heads[r * own : (r + 1) * own] for r in range(ranks)]
    return read([[p[0], p[-1] + 1] if p == list(range(p[0], p[-1] + 1)) else p for p in parts], source)
