"""The log-sum-exp of attention as kernels export it, on the attention probe's captured operands: ours, and torch's fused one.

Everything lands among the probe's tensors (`attention_capture`):

    lse/SOURCE/layers.I [T, Hq]   float32, nats or whatever the kernel makes of them; SOURCE: native, pin, sdpa
    lse/SOURCE/masked []          what a row that sees no key gets
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from rlmismatch.engines.attention_capture import layers_kept
from rlmismatch.kernels import attention
from rlmismatch.pins.collectives import TpGroup

_NATIVE: Final = "lse"  # Seen's name for what an engine's own kernel exported


def exported(
    seen: Mapping[str, torch.Tensor], *, num_layers: int, scale: float, impl: attention.Impl, tp: TpGroup
) -> dict[str, torch.Tensor]:
    """The tensors above, heads of all ranks side by side. seen: this rank's captures, `attention_capture.Seen`. Collective."""
    own: dict[str, torch.Tensor] = {}
    for layer in layers_kept(num_layers):
        q, k, v = (seen[f"layers.{layer}.{name}"].contiguous() for name in ("q", "k", "v"))
        own[f"lse/pin/layers.{layer}"] = attention.causal(q, k, v, [0, len(q)], scale=scale, impl=impl).lse_HT.T
        sdpa = _sdpa(q, k, v, scale)
        if sdpa is not None:
            own[f"lse/sdpa/layers.{layer}"] = sdpa.T
        native = seen.get(f"layers.{layer}.{_NATIVE}")
        if native is not None:
            own[f"lse/native/layers.{layer}"] = native
    out = {name: torch.cat(tp.gathered(x.float().contiguous()), dim=1).cpu() for name, x in own.items()}
    first = [seen[f"layers.0.{name}"][:1].contiguous() for name in ("q", "k", "v")]
    out["lse/pin/masked"] = _pin_masked(first, scale, impl)
    if first[0].device.type == "cpu":
        out["lse/sdpa/masked"] = _sdpa_masked(first, scale)
    return out


def _sdpa(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float) -> torch.Tensor | None:
    """[Hq, T] of the flash kernel behind torch's scaled_dot_product_attention; None where it has no kernel for these operands."""
    on_cpu = q_THD.device.type == "cpu"
    if not on_cpu and q_THD.dtype is torch.float32:
        return None
    group = q_THD.shape[1] // k_THD.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD.repeat_interleave(group, 1), v_THD.repeat_interleave(group, 1)))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu if on_cpu else torch.ops.aten._scaled_dot_product_flash_attention
    try:
        lse_1HT: torch.Tensor = kernel(q, k, v, 0.0, True, scale=scale)[1]
    except RuntimeError:  # a head dim or a GPU that it has no kernel for
        return None
    return lse_1HT[0, :, : len(q_THD)]


def _pin_masked(row_1HD: list[torch.Tensor], scale: float, impl: attention.Impl) -> torch.Tensor:
    """Of a query whose keys all come later."""
    parts = attention.partials(*row_1HD, q_start=0, kv_start=attention.SPLIT, scale=scale, impl=impl)
    return parts.lse_JHT.flatten()[0].cpu()


def _sdpa_masked(row_1HD: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Of a query whose one key a mask hides: only the CPU's kernel takes a mask."""
    q, k, v = (x[:, :1].transpose(0, 1)[None] for x in row_1HD)
    hidden = torch.full((1, 1), -torch.inf, dtype=q.dtype)
    lse_111: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=hidden, scale=scale)[
        1
    ]
    return lse_111.flatten()[0].float()
