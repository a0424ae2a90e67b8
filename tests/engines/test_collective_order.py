"""The order and the dtype of a sum over ranks are told from its bits: of gloo's own collectives, and of sums that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rlmismatch.contract import Evidence, Reading, documented
from rlmismatch.engines import collective_order as order
from rlmismatch.engines.collective_order import AS_SENT, Found, explained
from rlmismatch.pins.collectives import TpGroup
from tests.logprob.gloo import on_ranks

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (96, 1536)
Asked = dict[tuple[str, str], tuple[Reading, Reading]]


def readings(tp: TpGroup) -> Asked:
    def folded(ranks: Sequence[int], hop: torch.dtype) -> order.Collective:
        return lambda x: left(tp.gathered(x), ranks, hop).to(x.dtype)

    def by_size(x: torch.Tensor) -> torch.Tensor:
        return folded(range(tp.size) if x.numel() < 1536 else [(tp.rank + i) % tp.size for i in range(tp.size)], torch.float32)(x)

    up = range(tp.size)
    sums = {
        "gloo": order.all_reduce(tp),
        "rank order, once": folded(up, torch.float32),
        "rank order, every hop": folded(up, torch.bfloat16),
        "own first, once": folded([(tp.rank + i) % tp.size for i in up], torch.float32),
        "downwards": folded(list(up)[::-1], torch.float32),
        "float64": folded(up, torch.float64),
        "by size": by_size,
        "lost": lambda x: x,
        "doubled last bit": lambda x: folded(up, torch.float32)(x) * (1 + 2.0**-6),
    }
    out: Asked = {}
    for name, dtype in DTYPES.items():
        for what, sum_ in sums.items():
            out[name, what] = order.asked(sum_, tp, CPU, what, dtype=dtype, sizes=SIZES)
        out[name, "gloo scattered"] = order.asked(order.reduce_scatter(tp), tp, CPU, "gloo", dtype=dtype, sizes=SIZES, scattered=True)
    return out


def left(parts: Sequence[torch.Tensor], ranks: Sequence[int], hop: torch.dtype) -> torch.Tensor:
    total = parts[ranks[0]].to(hop)
    for i in ranks[1:]:
        total = total + parts[i].to(hop)
    return total


@pytest.fixture(scope="module")
def found() -> Asked:
    everyone = on_ranks(4, readings)
    assert all(f == everyone[0] for f in everyone)
    return dict(everyone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_orders_and_dtypes_are_told_apart(found: Asked, dtype: str) -> None:
    values = {what: tuple(r.value for r in pair) for (d, what), pair in found.items() if d == dtype}
    hop = "float32" if dtype == "float32" else AS_SENT
    assert values["gloo"] == (order.RING_DOWN, hop)
    assert values["gloo scattered"] == (order.RING_DOWN, hop)
    assert values["rank order, once"] == (order.RANK_ORDER, "float32")
    assert values["rank order, every hop"] == (order.RANK_ORDER, AS_SENT if dtype == "bfloat16" else "bfloat16")
    assert values["own first, once"] == (order.OWN_FIRST, "float32")
    assert values["downwards"] == ("ring 3-2-1-0", "float32")  # it has no name
    assert values["by size"][0] == "; ".join(
        f"{name} ({size} elements)" for name, size in ((order.RANK_ORDER, 96), (order.OWN_FIRST, 1536))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_order_or_none_that_is_known_is_not_named(found: Asked, dtype: str) -> None:
    exact = found[dtype, "float64"]
    assert (exact[0].evidence, exact[1].value) == (Evidence.UNKNOWN, "float64")  # every order gives these bits
    assert {r.evidence for r in found[dtype, "doubled last bit"]} == {Evidence.UNKNOWN}
    assert {r.evidence for r in found[dtype, "lost"]} == {Evidence.NOT_APPLICABLE}
    assert all(r.source.endswith("is not the sum of the ranks' operands") for r in found[dtype, "lost"])


def two(tp: TpGroup) -> Asked:
    low = lambda x: left([p.bfloat16() for p in tp.gathered(x)], (0, 1), torch.bfloat16).to(x.dtype)  # noqa: E731
    sums = {"gloo": order.all_reduce(tp), "low": low, "lost": lambda x: x}
    return {(name, what): order.asked(sum_, tp, CPU, what, dtype=dtype) for name, dtype in DTYPES.items() for what, sum_ in sums.items()}


def test_two_ranks_have_a_dtype_and_no_order() -> None:
    found = on_ranks(2, two)[0]
    assert {pair[0].evidence for pair in found.values()} == {Evidence.NOT_APPLICABLE}
    assert {found[name, "gloo"][1].value for name in DTYPES} == {"float32"}
    assert {name: found[name, "low"][1].value for name in DTYPES} == {"float32": "bfloat16", "bfloat16": "float32", "float16": "bfloat16"}
    table, tp = documented("float32", "a table"), TpGroup(group=None, size=2, rank=0)
    assert order.or_one_addition(found["float32", "lost"][1], tp, table) is table
    assert order.or_one_addition(found["float32", "low"][1], tp, table) is not table


# One rank of several, which no one else is asked about: `explained` then speaks of that rank alone.
def only(rank: int) -> TpGroup:
    return TpGroup(group=None, size=1, rank=rank)


class Elsewhere(TpGroup):
    """Takes what is on the engine's device alone, as NCCL does."""

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.device.type == "meta"
        return [torch.ones(x.shape, dtype=x.dtype)]


def test_what_the_ranks_exchange_is_on_the_device_that_they_share() -> None:
    parts = partials(2)
    tp = Elsewhere(group=None, size=1, rank=0)
    assert explained(left(parts, (0, 1), torch.float32).bfloat16(), parts, tp, torch.device("meta"), scattered=False) is not None
    assert order.on_every_rank(True, tp, torch.device("meta"))


def partials(ranks: int, dtype: torch.dtype = torch.bfloat16, count: int = 512) -> list[torch.Tensor]:
    return [torch.randn(count, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(ranks)]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_operands_that_reveal_nothing_are_explained_by_several_orders(ranks: int) -> None:
    parts = partials(ranks)
    found = explained(left(parts, range(ranks), torch.float32).bfloat16(), parts, only(0), CPU, scattered=False)
    assert found == Found(order=order.RANK_ORDER, acc_dtype="float32", several=True)
    parts = order.revealing(ranks, 512, torch.bfloat16)
    found = explained(left(parts, range(ranks), torch.float32).bfloat16(), parts, only(1), CPU, scattered=False)
    assert found == Found(order=order.RANK_ORDER, acc_dtype="float32")


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_ring_that_rounds_at_every_hop_is_named_whatever_its_chunks(ranks: int) -> None:
    parts = partials(ranks)
    pieces = []
    for piece in range(ranks):
        own = slice(piece * 512 // ranks, (piece + 1) * 512 // ranks)
        pieces.append(left([p[own] for p in parts], [(piece - 1 - i) % ranks for i in range(ranks)], torch.bfloat16))
    assert explained(torch.cat(pieces), parts, only(0), CPU, scattered=False) == Found(order=order.RING_DOWN, acc_dtype=AS_SENT)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_tree_of_pairs_is_no_ring(ranks: int) -> None:
    level = parts = order.revealing(ranks, 512, torch.float32)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    assert explained(level[0], parts, only(2), CPU, scattered=False) == Found(order=order.PAIRS, acc_dtype="float32")


def test_a_ring_that_has_no_name_is_spelt_out() -> None:
    parts = partials(4, torch.float32)
    found = explained(left(parts, (2, 3, 0, 1), torch.float32), parts, only(0), CPU, scattered=True)
    assert found == Found(order="ring 2-3-0-1", acc_dtype="float32")


def test_several_rings_one_behind_the_other_are_said_once() -> None:
    parts = order.revealing(4, 960, torch.bfloat16)
    chunks = [[(i % 4 + k) % 4 for k in range(4)] for i in range(12)]  # three rings, from each chunk's own rank upwards
    pieces = [left([p[80 * i : 80 * i + 80] for p in parts], ranks, torch.float32).bfloat16() for i, ranks in enumerate(chunks)]
    found = explained(torch.cat(pieces), parts, only(0), CPU, scattered=False)
    assert found == Found(order="ring 0-1-2-3, 1-2-3-0, 2-3-0-1, 3-0-1-2, 3 times over", acc_dtype="float32")


def test_pieces_of_a_few_elements_explain_nothing() -> None:
    parts = order.revealing(4, 960, torch.bfloat16)
    pieces = [left([p[8 * i : 8 * i + 8] for p in parts], [(i + k) % 4 for k in range(4)], torch.float32).bfloat16() for i in range(120)]
    assert explained(torch.cat(pieces), parts, only(0), CPU, scattered=False) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_float32_partials_added_in_bfloat16_are_found(ranks: int) -> None:
    parts = partials(ranks, torch.float32)
    found = explained(left(parts, range(ranks), torch.bfloat16).float(), parts, only(0), CPU, scattered=True)
    assert found is not None
    assert found.acc_dtype == "bfloat16"


def test_a_partial_is_no_sum_and_an_order_that_is_not_known_is_unknown() -> None:
    parts = partials(4)
    assert not order.is_sum(parts[1], parts)
    assert not order.is_sum(torch.full_like(parts[0], torch.nan), parts)
    across = left(parts, (0, 2, 1, 3), torch.bfloat16)
    assert order.is_sum(across, parts)
    assert explained(across, parts, only(0), CPU, scattered=False) is None
