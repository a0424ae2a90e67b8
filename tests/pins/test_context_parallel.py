"""Which tokens a context-parallel rank holds, and attention over them, without any rank: the exchange is done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlmismatch.kernels import attention
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.context_parallel import PARTITIONS, ContextParallel, Partition


class ByHand(TpGroup):
    """Ranks whose data are all here: what each of them would send, by the tensor that this one sends."""

    def __init__(self, size: int, rank: int, sent: dict[int, list[torch.Tensor]]) -> None:
        super().__init__(group=None, size=size, rank=rank)
        object.__setattr__(self, "sent", sent)

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = self.sent[id(x)]  # type: ignore[attr-defined]
        return parts


def rank_of(size: int, rank: int, partition: Partition) -> ContextParallel:
    return ContextParallel(ranks=TpGroup(group=None, size=size, rank=rank), partition=partition)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_is_held_once(partition: Partition, size: int) -> None:
    held = [rank_of(size, rank, partition).positions(16 * size) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(16 * size))
    assert {len(x) for x in held} == {16}
    assert all(bool((x.diff() > 0).all()) for x in held)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert [rank_of(2, rank, "zigzag").runs(8) for rank in range(2)] == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    assert [rank_of(2, rank, "contiguous").runs(8) for rank in range(2)] == [[(0, 4)], [(4, 8)]]


def test_a_length_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4 equal chunks"):
        rank_of(2, 0, "zigzag").positions(6)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_attention_of_every_rank_has_the_bits_of_one(partition: Partition, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = 24 * size
    q, k, v = (torch.randn(tokens, heads, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    settings: dict[str, Any] = {"scale": 32**-0.5, "impl": "reference"}
    whole = attention.causal(q, k, v, [0, tokens], **settings).out_THD
    for rank in range(size):
        cp = rank_of(size, rank, partition)
        own = [cp.own(x) for x in (k, v)]
        sent = {id(mine): [rank_of(size, r, partition).own(x) for r in range(size)] for mine, x in zip(own, (k, v), strict=True)}
        exchange = ContextParallel(ranks=ByHand(size, rank, sent), partition=partition)
        out = exchange.attend(attention.paged, cp.own(q), *own, **settings)
        assert torch.equal(out, cp.own(whole))
