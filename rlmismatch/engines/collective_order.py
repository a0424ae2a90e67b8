"""In which order a live collective adds the ranks' operands, found by asking it: float32 sums depend on the order, so their bits tell it.

No backend reports its order. Seen this way on a CPU, gloo's all-reduce is a ring: every chunk of the operand has an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.pins.collectives import TpGroup

_SIZES: Final = (64, 512, 4096)  # elements: a backend may choose its algorithm by size
RANK_ORDER: Final = "rank order"
OWN_FIRST: Final = "own rank first, then the next ones in turn"
PAIRS: Final = "pairs of ranks, then pairs of pairs"
RING_DOWN: Final = "ring: a chunk a rank, from the rank below the chunk's own down to it"
RING_UP: Final = "ring: a chunk a rank, from the rank above the chunk's own up to it"


def order_of(all_reduce: Callable[[torch.Tensor], torch.Tensor], tp: TpGroup, device: torch.device, what: str) -> Reading:
    """The order of `all_reduce`, a sum over the ranks of `tp` that returns its result, for float32; unknown if none known gives its bits.

    what: who is asked, for the reading's source. Collective; three ranks or more, as two have no order.
    """
    source = f"trial: order-revealing operands through {what}"
    found = {_name(all_reduce, tp, device, size) for size in _SIZES}
    if len(found) == 1 and None not in found:
        return read(found.pop(), source)
    return unknown(f"{source}: its bits are those of no one known order")


def _name(all_reduce: Callable[[torch.Tensor], torch.Tensor], tp: TpGroup, device: torch.device, size: int) -> str | None:
    """The first order that gives the bits of every element on every rank."""
    generator = torch.Generator().manual_seed(size)
    # Terms of different sizes, so that hardly two orders give the same bits.
    operands = [torch.randn(size, generator=generator) * 100 ** torch.rand(size, generator=generator) for _ in range(tp.size)]
    live = all_reduce(operands[tp.rank].clone().to(device)).cpu()
    fits = [_fits(name, operands, live, tp.rank) for name in _NAMES]
    everywhere = torch.stack(tp.gathered(torch.tensor(fits, dtype=torch.uint8, device=device))).amin(dim=0).tolist()
    return next((name for name, fit in zip(_NAMES, everywhere, strict=True) if fit), None)


_NAMES: Final = (RANK_ORDER, OWN_FIRST, PAIRS, RING_DOWN, RING_UP)


def _fits(name: str, operands: Sequence[torch.Tensor], live: torch.Tensor, rank: int) -> bool:
    ranks = len(operands)
    if name == RANK_ORDER:
        return torch.equal(_added(operands, range(ranks)), live)
    if name == OWN_FIRST:
        return torch.equal(_added(operands, [(rank + i) % ranks for i in range(ranks)]), live)
    if name == PAIRS:
        return torch.equal(_in_pairs(operands), live)
    step = -1 if name == RING_DOWN else 1
    orders = ([(chunk + step * (i + 1)) % ranks for i in range(ranks)] for chunk in range(ranks))
    return _in_chunks([_added(operands, order) == live for order in orders])


def _added(operands: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    total = operands[order[0]]
    for rank in order[1:]:
        total = total + operands[rank]
    return total


def _in_pairs(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    level = list(operands)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=False)] + level[len(level) // 2 * 2 :]
    return level[0]


def _in_chunks(matches: Sequence[torch.Tensor]) -> bool:
    """Whether the elements fall into consecutive chunks, chunk c in the c-th order, none of them empty. Where they end is the backend's own
    affair."""
    chunk, sizes = 0, [0] * len(matches)
    for i in range(matches[0].numel()):
        while chunk < len(matches) and not matches[chunk][i]:
            chunk += 1
        if chunk == len(matches):
            return False
        sizes[chunk] += 1
    return min(sizes) > 0
