"""The order of a sum over ranks is told from its bits: of gloo's own all-reduce, and of sums whose order is known."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlmismatch.contract import Evidence, Reading
from rlmismatch.engines import collective_order as order
from rlmismatch.pins.collectives import TpGroup
from tests.logprob.gloo import on_ranks

CPU = torch.device("cpu")


def readings(tp: TpGroup) -> dict[str, Reading]:
    def gloo(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=tp.group)
        return x

    def folded(first: int, step: int) -> Reading:
        def fold(x: torch.Tensor) -> torch.Tensor:
            parts = tp.gathered(x)
            total = parts[first]
            for i in range(1, tp.size):
                total = total + parts[(first + i * step) % tp.size]
            return total

        return order.order_of(fold, tp, CPU, "a fold")

    def float64(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(tp.gathered(x)).double().sum(dim=0).float()

    return {
        "gloo": order.order_of(gloo, tp, CPU, "gloo"),
        "rank order": folded(0, 1),
        "own first": folded(tp.rank, 1),
        "downwards": folded(tp.size - 1, -1),
        "float64": order.order_of(float64, tp, CPU, "a float64 sum"),
    }


@pytest.mark.parametrize("ranks", [3, 4])
def test_orders_are_told_apart(ranks: int) -> None:
    found = on_ranks(ranks, readings)
    assert all(f == found[0] for f in found)
    assert {name: reading.value for name, reading in found[0].items()} == {
        "gloo": order.RING_DOWN,
        "rank order": order.RANK_ORDER,
        "own first": order.OWN_FIRST,
        "downwards": None,  # an order that no known backend has
        "float64": None,
    }
    assert found[0]["float64"].evidence is Evidence.UNKNOWN
