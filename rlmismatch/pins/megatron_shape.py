"""What the trainer's hooks must know of the run and of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlmismatch.attention_policies import Policy
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.context_parallel import ContextParallel
from rlmismatch.pins.megatron_logprob import HeadSettings, Impl
from rlmismatch.transforms import Chain


@dataclass(frozen=True, kw_only=True)
class TrainerShape:
    """What a hook must know of the run and of the model to read this rank's tensors in global coordinates."""

    impl: Impl
    sp: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    inv_freq: torch.Tensor  # float32 [D / 2], on the device
    chain: Chain  # what the run asks to be done to the logits
    head: HeadSettings = HeadSettings()  # noqa: RUF009 - frozen
    cp: ContextParallel = ContextParallel()  # noqa: RUF009 - frozen
    attention: Policy | None = None  # arithmetic of the pin attention; None: the kernel's own
    window: int | None = None  # tokens that a token sees, itself included
    sink: float | None = None  # logit of every head's sink

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def sinks(self, q_SBHD: torch.Tensor) -> torch.Tensor | None:
        """float32 [Hq of this rank]: one sink logit a head, None where there is none."""
        return None if self.sink is None else q_SBHD.new_full(q_SBHD.shape[2:3], self.sink, dtype=torch.float32)

    def qkv_columns(self, tp: TpGroup) -> dict[str, torch.Tensor]:
        """q, k, v -> which columns of this rank's fused QKV output are its own; over the ranks they ascend by global head."""
        per_group = self.num_heads // self.num_kv_heads + 2
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim // tp.size
        slot = (torch.arange(width, device=self.inv_freq.device) + tp.rank * width) // self.head_dim % per_group
        masks = {"q": slot < per_group - 2, "k": slot == per_group - 2, "v": slot == per_group - 1}
        return {name: mask.nonzero().squeeze(1) for name, mask in masks.items()}
