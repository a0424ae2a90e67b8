"""The live objects of a loaded vLLM engine on one rank, as the pins, the plants and the read-back share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlmismatch.pins.collectives import TpGroup
from rlmismatch.transforms import Chain


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """What the pins need of a loaded engine on one rank; constants come from the checkpoint, so that a pin heals a plant."""

    model: Any  # the CausalLM module
    sampler: Any
    tp: TpGroup  # for tensors on the engine's device
    all_reduce: Callable[[torch.Tensor], torch.Tensor]  # the engine's own, as its row-parallel layers call it
    eps: float
    inv_freq: torch.Tensor  # float32 [D / 2], on the engine's device
    num_kv_heads: int  # of the whole model
    vocab_size: int
    chain: Chain  # what this side is asked to do to the logits
    window: int | None = None  # tokens that a token sees, itself included
    sink: float | None = None  # logit of every head's sink
    _weights: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> Sequence[Any]:
        layers: Sequence[Any] = self.model.model.layers
        return layers

    @property
    def head_shard_width(self) -> int:
        """Vocabulary columns of a rank, padding included; rank r's logits start at column r times this."""
        return int(self.model.lm_head.num_embeddings_per_partition)

    @property
    def kv_copies(self) -> int:
        """How many neighbouring ranks hold one and the same KV head: more than 1 where TP is above the number of KV heads."""
        return max(1, self.tp.size // self.num_kv_heads)

    @property
    def owns_kv_heads(self) -> bool:
        """Whether this rank speaks for its KV heads: the first of their holders does."""
        return self.tp.rank % self.kv_copies == 0

    def weight(self, linear: Any) -> torch.Tensor:
        """The rank's weight [N, K] that a linear layer computes with. On the CPU that is a packed copy, whatever stands in `weight`."""
        if not hasattr(linear, "cpu_linear"):
            weight: torch.Tensor = linear.weight.detach()
            return weight
        if id(linear) not in self._weights:
            unit = torch.eye(linear.input_size_per_partition, dtype=linear.params_dtype)
            # One product with 1 and the rest with 0: exact, whatever order the packed kernel adds in.
            self._weights[id(linear)] = linear.cpu_linear(unit, linear.weight, None).t().contiguous()
        return self._weights[id(linear)]
