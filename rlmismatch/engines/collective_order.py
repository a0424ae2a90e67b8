"""In which order a live sum over ranks adds, and in which dtype, told from its bits: no backend reports either.

What is asked is a sum of known operands. Those of `asked` reveal the order, even where every addition is exact enough for its result, once
rounded, to hide it. Seen this way on a CPU, gloo's all-reduce is a ring that rounds at every hop, with an order of its own for every chunk
of the operand; vLLM's through shared memory starts at each rank itself, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from rlmismatch.contract import Evidence, Reading, not_applicable, read, unknown
from rlmismatch.pins.collectives import TpGroup

AS_SENT: Final = "as sent"  # every addition is rounded to the dtype in which the operands are sent
RANK_ORDER: Final = "rank order"
OWN_FIRST: Final = "own rank first, then the next ones in turn"
PAIRS: Final = "pairs of ranks, then pairs of pairs"
RING_DOWN: Final = "ring: a chunk a rank, from the rank below the chunk's own down to it"
RING_UP: Final = "ring: a chunk a rank, from the rank above the chunk's own up to it"
TWO: Final = "two ranks: one addition, no order"

_SIZES: Final = (64, 512, 4096)  # elements: a backend may choose its algorithm by size
_PIECE: Final = 16  # elements, on average; an order that falls into smaller pieces was not understood
_NO_SUM: Final = 2.0**-4  # relative; what is further off is no sum of the operands, whatever its order
_LARGE, _SMALL = 2.0**14, 2.0**-13  # both are numbers of float16, and one is lost beside the other in float32

# What is added to what: a rank, or a sum of two.
Tree: TypeAlias = "int | tuple[Tree, Tree]"


Collective: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def all_reduce(tp: TpGroup) -> Collective:
    """torch.distributed's own sum over the ranks of `tp`, in the place of its operand."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=tp.group)
        return x

    return summed


def reduce_scatter(tp: TpGroup) -> Collective:
    """torch.distributed's own reduce-scatter over the ranks of `tp`: [N] -> this rank's slice of the sum, [N / ranks]."""

    def summed(x_N: torch.Tensor) -> torch.Tensor:
        own_n = x_N.new_empty(x_N.numel() // tp.size)
        dist.reduce_scatter_tensor(own_n, x_N, group=tp.group)
        return own_n

    return summed


def backend_of(tp: TpGroup) -> str:
    """Who sums for the ranks of `tp`: gloo, nccl."""
    return str(dist.get_backend(tp.group))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What explains a sum on every rank. several: other orders explain it as well, and `order` is but the first of them."""

    order: str
    acc_dtype: str
    several: bool = False


def asked(
    collective: Collective,
    tp: TpGroup,
    device: torch.device,
    what: str,
    *,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = _SIZES,
    scattered: bool = False,
) -> tuple[Reading, Reading]:
    """(order, dtype of the running sum) of `collective`, which takes [N] of `dtype` and returns its sum over the ranks of `tp`.

    what: who is asked, for the readings' source. sizes: the N to ask with, multiples of the ranks where scattered: a rank then gets its
    slice of the sum. Both are not applicable where what is returned is no sum, and unknown where no known order gives its bits; two ranks
    have no order. Collective.
    """
    source = f"trial: order-revealing operands through {what}"
    found = {}
    for size in sizes:
        operands = revealing(tp.size, size, dtype)
        live = collective(operands[tp.rank].clone().to(device)).cpu()
        parts = [x.chunk(tp.size)[tp.rank] for x in operands] if scattered else operands
        if not on_every_rank(is_sum(live, parts), tp, device):
            none = not_applicable(f"{source}: what it returns is not the sum of the ranks' operands")
            return none, none
        found[size] = explained(live, parts, tp, device, scattered=scattered)
    acc = _by_size({n: None if f is None else f.acc_dtype for n, f in found.items()}, source)
    if tp.size == 2:
        return not_applicable(TWO), acc
    return _by_size({n: None if f is None or f.several else f.order for n, f in found.items()}, source), acc


def or_one_addition(acc_dtype: Reading, tp: TpGroup, documented: Reading) -> Reading:
    """`acc_dtype`, or for two ranks whose partials did not meet, what one addition of two is by the engine's source.

    That partials are lost is no dtype: the measure of the sum's error finds it, and names the fault.
    """
    return documented if acc_dtype.evidence is Evidence.NOT_APPLICABLE and tp.size == 2 else acc_dtype


def _by_size(values: dict[int, str | None], source: str) -> Reading:
    """One value for all sizes; each with its size where they differ; unknown where one has none."""
    if None in values.values():
        return unknown(f"{source}: its bits are those of no one known order")
    distinct = set(values.values())
    return read(distinct.pop() if len(distinct) == 1 else "; ".join(f"{v} ({n} elements)" for n, v in values.items()), source)


def revealing(ranks: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """[size] of `dtype` for each rank, the same on every rank, by whose sum two orders hardly ever agree.

    Every other element holds terms of different sizes, which show where a sum is rounded. Each of the rest holds a large term, its negative
    and small ones: whatever is added before the two have met is lost, so what is left names the ranks behind them.
    """
    generator = torch.Generator().manual_seed(size)
    terms = [torch.randn(size, generator=generator) * 100 ** torch.rand(size, generator=generator) for _ in range(ranks)]
    small = [_SMALL * (1 + torch.rand(size, generator=generator)) for _ in range(ranks)]
    pairs = list(permutations(range(ranks), 2))
    index = torch.arange(size)
    which = torch.div(index, 2, rounding_mode="floor") % len(pairs)
    for rank in range(ranks):
        plus = torch.tensor([pair[0] == rank for pair in pairs])[which]
        minus = torch.tensor([pair[1] == rank for pair in pairs])[which]
        cancelling = torch.where(plus, _LARGE, torch.where(minus, -_LARGE, small[rank]))
        terms[rank] = torch.where(index % 2 == 1, cancelling, terms[rank])
    return [x.to(dtype) for x in terms]


def is_sum(live: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether `live` is a sum of `parts` at all, in any order and dtype."""
    exact = torch.stack([p.double() for p in parts]).sum(dim=0)
    return float((live.double() - exact).norm()) <= _NO_SUM * float(exact.norm())


def explained(live: torch.Tensor, parts: Sequence[torch.Tensor], tp: TpGroup, device: torch.device, *, scattered: bool) -> Found | None:
    """The order and the dtype of the running sum that give every element of `live`, on every rank; None if none that is known does.

    live: this rank's [N], or its slice where scattered. parts: every rank's operand, sliced alike. Collective.
    """
    ranks, sent = len(parts), live.dtype
    named = _named(ranks, scattered=scattered)
    for hop in dict.fromkeys((torch.float32, sent, torch.bfloat16, torch.float64)):
        fits = [_in_chunks([_added(tree, parts, hop).to(sent) == live for tree in by_rank[tp.rank]]) for by_rank in named.values()]
        names = [name for name, fit in zip(named, _all_ranks(fits, tp, device), strict=True) if fit]
        if names:
            return Found(order=names[0], acc_dtype=_dtype_word(hop, sent), several=len(names) > 1)
    for hop in dict.fromkeys((torch.float32, sent, torch.bfloat16)):
        own = _pieces(live, parts, hop)
        everyone = _objects(own, tp)
        if None not in everyone:
            orders = everyone if scattered or len(set(everyone)) > 1 else everyone[:1]
            return Found(order="; ".join(map(str, orders)), acc_dtype=_dtype_word(hop, sent))
    return None


def _dtype_word(hop: torch.dtype, sent: torch.dtype) -> str:
    return AS_SENT if hop is sent and sent is not torch.float32 else str(hop).removeprefix("torch.")


def _named(ranks: int, *, scattered: bool) -> dict[str, list[list[Tree]]]:
    """Name -> rank -> what is added in each chunk of what the rank gets. Of names that come to one order here, the first."""
    everyone = range(ranks)
    own_first = [[_chain((rank + i) % ranks for i in everyone)] for rank in everyone]
    rings = {
        name: [_chain((chunk + step * (i + 1)) % ranks for i in everyone) for chunk in everyone]
        for name, step in ((RING_DOWN, -1), (RING_UP, 1))
    }
    every: dict[str, list[list[Tree]]] = {
        RANK_ORDER: [[_chain(everyone)]] * ranks,
        OWN_FIRST: own_first,
        PAIRS: [[_in_pairs(everyone)]] * ranks,
        **{name: [[chunks[rank]] if scattered else chunks for rank in everyone] for name, chunks in rings.items()},
    }
    out: dict[str, list[list[Tree]]] = {}
    seen: set[Any] = set()
    for name, by_rank in every.items():
        key = tuple(tuple(map(_unordered, trees)) for trees in by_rank)
        if key not in seen:
            seen.add(key)
            out[name] = by_rank
    return out


def _chain(order: Iterable[int]) -> Tree:
    return reduce(lambda total, rank: (total, rank), order)  # type: ignore[arg-type, return-value]


def _in_pairs(ranks: Iterable[int]) -> Tree:
    level: list[Tree] = [*ranks]
    while len(level) > 1:
        level = [*zip(level[::2], level[1::2], strict=False), *level[len(level) // 2 * 2 :]]
    return level[0]


def _unordered(tree: Tree) -> Any:
    """A key that is the same for a + b and b + a."""
    return tree if isinstance(tree, int) else frozenset(map(_unordered, tree))


def _added(tree: Tree, parts: Sequence[torch.Tensor], hop: torch.dtype) -> torch.Tensor:
    """The sum, rounded to `hop` at every addition."""
    if isinstance(tree, int):
        return parts[tree].to(hop)
    return _added(tree[0], parts, hop) + _added(tree[1], parts, hop)


def _in_chunks(matches: Sequence[torch.Tensor]) -> bool:
    """Whether the elements fall into consecutive chunks, chunk c in the c-th order, none of them empty. Where they end is the backend's own
    affair."""
    start = 0
    for match in matches:
        end = start + _first_miss(match[start:])
        if end == start:
            return False
        start = end
    return start == matches[0].numel()


def _first_miss(match: torch.Tensor) -> int:
    misses = (~match).nonzero()
    return int(misses[0]) if len(misses) else match.numel()


def _pieces(live: torch.Tensor, parts: Sequence[torch.Tensor], hop: torch.dtype) -> str | None:
    """The fewest pieces of `live`, left to right, each explained by one turn round the ranks; None if it takes too many.

    A backend that runs several rings beside each other, one behind the other in the operand, repeats itself: that is said once.
    """
    ranks = len(parts)
    rings = [tuple((start + step * i) % ranks for i in range(ranks)) for step in (1, -1) for start in range(ranks)]
    matches = {ring: _added(_chain(ring), parts, hop).to(live.dtype) == live for ring in rings}
    out: list[str] = []
    at = 0
    while at < live.numel():
        lengths = {ring: _first_miss(match[at:]) for ring, match in matches.items()}
        best = max(lengths, key=lambda ring: lengths[ring])
        if not lengths[best] or len(out) > live.numel() // _PIECE:
            return None
        out.append("-".join(map(str, best)))
        at += lengths[best]
    period = next(n for n in range(1, len(out) + 1) if len(out) % n == 0 and out == out[:n] * (len(out) // n))
    again = f", {len(out) // period} times over" if period < len(out) else ""
    return f"ring {', '.join(out[:period])}{again}"


def on_every_rank(fit: bool, tp: TpGroup, device: torch.device) -> bool:
    """Whether it holds on every rank of `tp`. Collective."""
    return _all_ranks([fit], tp, device)[0]


def _all_ranks(fits: Sequence[bool], tp: TpGroup, device: torch.device) -> list[bool]:
    """Of each, whether it holds on every rank. Collective."""
    return torch.stack(tp.gathered(torch.tensor(fits, dtype=torch.uint8, device=device))).amin(dim=0).bool().tolist()


def _objects(own: str | None, tp: TpGroup) -> list[str | None]:
    everyone: list[str | None] = [None] * tp.size
    if tp.size == 1:
        return [own]
    dist.all_gather_object(everyone, own, group=tp.group)
    return everyone
