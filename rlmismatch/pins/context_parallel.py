"""Which tokens a context-parallel rank holds, and attention over them with the K and V of all ranks.

Shapes: S tokens of the padded sequence, s = S / CP of them on one rank, Hq / Hkv this rank's heads, D head dim. A rank's rows ascend by
position, so its tokens are at most two runs of neighbours; each is a sequence of its own to the paged kernel, over one page that holds
K and V of all tokens. A row's bits are those of CP1: the kernel folds KV tiles at absolute positions, whoever computed the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import torch

from rlmismatch.pins.collectives import TpGroup

Partition = Literal["zigzag", "contiguous"]
PARTITIONS: Final[tuple[Partition, ...]] = get_args(Partition)
_ONE_RANK: Final = TpGroup(group=None, size=1, rank=0)


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """The ranks that share one sequence, and how: ``zigzag`` gives rank r the chunks r and 2 CP - 1 - r, ``contiguous`` one run each."""

    ranks: TpGroup = field(default=_ONE_RANK)
    partition: Partition = "zigzag"

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return 1 if self.size == 1 else 2 * self.size

    def runs(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """[start, end) of each run of positions that `rank` (default: this one) holds of a sequence of `length`, ascending."""
        rank = self.ranks.rank if rank is None else rank
        if length % self.multiple:
            raise ValueError(f"{length} tokens cannot be cut into {self.multiple} equal chunks")
        if self.partition == "contiguous" or self.size == 1:
            step = length // self.size
            return [(rank * step, (rank + 1) * step)]
        chunk = length // (2 * self.size)
        return [(c * chunk, (c + 1) * chunk) for c in (rank, 2 * self.size - 1 - rank)]

    def positions(self, length: int, rank: int | None = None) -> torch.Tensor:
        """int64 [length / CP]: the positions of a rank's rows, in their order."""
        return torch.cat([torch.arange(start, end) for start, end in self.runs(length, rank)])

    def own(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of a whole sequence along `dim`."""
        return x if self.size == 1 else x.index_select(dim, self.positions(x.shape[dim]).to(x.device))

    def whole(self, x_s: torch.Tensor) -> torch.Tensor:
        """[S, ...] in order of position, from every rank's rows [s, ...]. Collective."""
        if self.size == 1:
            return x_s
        length = x_s.shape[0] * self.size
        order = torch.cat([self.positions(length, rank) for rank in range(self.size)])
        return torch.cat(self.ranks.gathered(x_s)).index_select(0, order.argsort().to(x_s.device))

    def attend(
        self, paged: Callable[..., Any], q_sHD: torch.Tensor, k_sHD: torch.Tensor, v_sHD: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        """[s, Hq, D]: causal attention of this rank's rows over every rank's K and V. Collective.

        paged: `kernels.attention.paged` or its float64 reference; the first of what it returns is the output. settings: its keywords.
        """
        k_1SHD, v_1SHD = self.whole(k_sHD)[None], self.whole(v_sHD)[None]
        runs = self.runs(k_1SHD.shape[1])
        bounds = [0]
        for start, end in runs:
            bounds.append(bounds[-1] + end - start)
        table = torch.zeros((len(runs), 1), dtype=torch.int32, device=q_sHD.device)
        out: torch.Tensor = paged(q_sHD, k_1SHD, v_1SHD, table, bounds, [end for _, end in runs], **settings)[0]
        return out
