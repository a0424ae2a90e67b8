"""Exchange between the tensor-parallel ranks by torch.distributed alone, always in rank order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class TpGroup:
    """The TP ranks of one side. An engine's own communicator may refuse float64; torch.distributed does not."""

    group: dist.ProcessGroup | None  # None: one rank
    size: int
    rank: int

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, rank 0 first; shapes and dtypes must be equal on all ranks. One rank: `x` itself."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
