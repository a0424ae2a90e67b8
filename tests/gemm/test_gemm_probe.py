"""The GEMM probe on products of known behaviour, and sums of real partials on four gloo ranks: every fact counts what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmismatch.engines import gemm_probe
from rlmismatch.engines.gemm_facts import AloneFacts, ReplayFacts, SumFacts, joined, packed, unpacked
from rlmismatch.engines.gemm_faults import split_in_two
from rlmismatch.engines.gemm_probe import Product, Seen, SumSite
from rlmismatch.kernels import gemm, reduce
from rlmismatch.kernels.reduce import reference as reduce_fp64
from rlmismatch.pins.collectives import TpGroup
from tests.logprob.gloo import on_ranks

M, K, N = 70, 64, 24
ALONE = TpGroup(group=None, size=1, rank=0)
NO_SUM = SumSite(tp=ALONE, ways={}, backends={}, decode_rows=4)


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=generator).bfloat16(), torch.randn(N, K, generator=generator).bfloat16()


def replayed(native: Any, **fields: Any) -> dict[tuple[str, ...], ReplayFacts]:
    x, weight = operands()
    product = Product(
        name="qkv", x_MK=x, weight_NK=weight, native=lambda x: native(x, weight), columns={"q": slice(8), "k": slice(8, N)}, **fields
    )
    return unpacked(gemm_probe.tensors([product], NO_SUM, impl="reference", interpreted=False), "replay", ReplayFacts)


def pinned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gemm.linear(x, weight, impl="reference")


def test_the_pin_replayed_is_the_pin_at_every_row_count() -> None:
    facts = replayed(pinned)
    assert set(facts) == {(name, rows) for name in "qk" for rows in ("1", "8", "64", "full")}
    assert {(f.unequal_pin, f.unequal_full, f.largest_full) for f in facts.values()} == {(0.0, 0.0, 0.0)}
    assert {rows: facts["q", rows].count for rows in ("1", "8", "64", "full")} == {"1": 128, "8": 64, "64": 512, "full": 8 * M}
    assert facts["k", "full"].native_error == facts["k", "full"].pin_error > 0


def test_another_kernel_is_not_the_same_kernel_at_another_m() -> None:
    facts = replayed(lambda x, w: pinned(x, w) * 1.02)
    assert all(f.unequal_pin > 0.9 * f.count and f.unequal_full == 0 for f in facts.values())
    assert facts["q", "full"].native_error > 5 * facts["q", "full"].pin_error


def test_the_same_kernel_at_another_m_is_seen_at_that_m() -> None:
    facts = replayed(lambda x, w: split_in_two(pinned, x, w))
    assert facts["q", "1"].unequal_pin == facts["k", "1"].unequal_pin == 0  # a row alone is the pin's
    assert facts["q", "1"].unequal_full > 0
    assert facts["q", "8"].unequal_full == facts["q", "64"].unequal_full == facts["q", "full"].unequal_full == 0
    assert facts["q", "8"].unequal_pin > 0


def test_a_product_that_does_not_repeat_itself_shows_at_full() -> None:
    calls = iter(range(100))
    facts = replayed(lambda x, w: pinned(x, w) + (1 if next(calls) == 1 else 0))
    assert facts["q", "full"].unequal_full == facts["q", "full"].count


def test_columns_that_another_rank_speaks_for_count_nothing() -> None:
    x, weight = operands()
    product = Product(name="k", x_MK=x, weight_NK=weight, native=lambda x: pinned(x, weight), columns={"k": slice(0)})
    found = unpacked(gemm_probe.tensors([product], NO_SUM, impl="reference", interpreted=False), "replay", ReplayFacts)
    assert {f.count for f in found.values()} == {0.0}


def test_rows_are_kept_up_to_a_limit_and_a_silent_product_is_an_error() -> None:
    seen = Seen()
    for _ in range(3):
        seen.add("a", torch.ones(500, 2))
    assert seen.joined("a").shape == (gemm_probe.MAX_ROWS, 2)
    seen.enough = True
    seen.add("b", torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="the product b was hooked and never called"):
        seen.joined("b")


def test_joined_facts_add_up_and_keep_the_largest_and_a_nan() -> None:
    one = SumFacts(count=4, unequal=1, unequal_rounded=0, sum_error=0.5, error=1.0, scale=8.0, largest=0.25)
    two = SumFacts(count=2, unequal=2, unequal_rounded=1, sum_error=0.5, error=1.0, scale=2.0, largest=float("nan"))
    (both,) = unpacked({"sum/x": joined([packed(one), packed(two)], SumFacts)}, "sum", SumFacts).values()
    assert (both.count, both.unequal, both.unequal_rounded, both.scale) == (6, 3, 1, 10)
    assert both.largest != both.largest


def test_tokens_that_move_alone_are_counted() -> None:
    pairs = {"decode": [(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))], "empty": []}
    facts = unpacked(gemm_probe.alone(pairs), "alone", AloneFacts)
    assert facts == {("decode",): AloneFacts(tokens=2, unequal=1, largest=0.5)}


def _sums(tp: TpGroup) -> dict[str, torch.Tensor]:
    x, weight = operands()
    own = slice(tp.rank * K // tp.size, (tp.rank + 1) * K // tp.size)

    def native(rows: torch.Tensor) -> torch.Tensor:
        return gemm.linear(rows, weight[:, own], impl="reference")

    def all_reduce(part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=tp.group)
        return part

    def one_lost(part: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.zeros_like(part) if tp.rank == tp.size - 1 else part)

    ways = {
        "all_reduce": all_reduce,
        "rank_order": lambda part: reduce.fold(tp.gathered(part), impl="reference", out_dtype=part.dtype),
        "bf16": lambda part: sum(tp.gathered(part.bfloat16()), torch.zeros_like(part, dtype=torch.bfloat16)).to(part.dtype),
    }

    def one_rank_wrong(part: torch.Tensor) -> torch.Tensor:
        total = all_reduce(part)
        return total * torch.nan if tp.rank == 2 else total

    backends = {"lost": one_lost, "none": lambda part: None, "wrong on a rank": one_rank_wrong}
    site = SumSite(tp=tp, ways=ways, backends=backends, decode_rows=3)
    product = Product(
        name="o_proj",
        x_MK=x[:, own].contiguous(),
        weight_NK=weight[:, own].contiguous(),
        native=native,
        columns={"o": slice(None)},
        partial=True,
    )
    return gemm_probe.tensors([product, product], site, impl="reference", interpreted=False)


@pytest.fixture(scope="module")
def four() -> list[dict[str, torch.Tensor]]:
    return on_ranks(4, _sums)


def test_every_rank_has_the_same_facts(four: list[dict[str, torch.Tensor]]) -> None:
    for other in four[1:]:
        assert other.keys() == four[0].keys()
        assert all(torch.equal(other[name].nan_to_num(-1), four[0][name].nan_to_num(-1)) for name in other)


def test_sums_by_way_payload_and_rows(four: list[dict[str, torch.Tensor]]) -> None:
    facts = unpacked(four[0], "sum", SumFacts)
    assert set(facts) == {
        (way, payload, rows) for way in ("all_reduce", "rank_order", "bf16") for payload in ("bfloat16", "float32") for rows in ("3", "70")
    }
    for payload in ("bfloat16", "float32"):
        ordered = facts["rank_order", payload, "70"]
        assert (ordered.unequal, ordered.count) == (0, 2 * M * N)
    # Order alone: four float32 partials added along a ring are not those added by halves; what is left of it after rounding is little.
    order = facts["all_reduce", "float32", "70"]
    assert order.unequal > 0
    assert order.unequal_rounded < 0.01 * order.count
    # The dtype of the payload: rounded partials are far further from the product than any order is.
    assert facts["rank_order", "bfloat16", "70"].error > 1000 * order.error
    # The accumulate dtype, told apart from the payload's by the error from what was sent.
    assert facts["bf16", "bfloat16", "70"].sum_error > facts["rank_order", "bfloat16", "70"].sum_error


def test_the_exact_share_of_every_rank_adds_up_to_the_product(four: list[dict[str, torch.Tensor]]) -> None:
    x, weight = operands()
    whole = reduce_fp64.fold([x.double() @ weight.double().T], out_dtype=torch.float64)
    assert unpacked(four[0], "sum", SumFacts)["rank_order", "float32", "70"].scale == pytest.approx(2 * float(whole.abs().sum()))


def test_a_lost_partial_is_far_from_float64_and_a_backend_that_takes_nothing_has_no_fact(four: list[dict[str, torch.Tensor]]) -> None:
    facts = unpacked(four[0], "backend", SumFacts)
    assert {name for name, _ in facts} == {"lost", "wrong on a rank"}
    lost = facts["lost", "70"]
    assert lost.error / lost.scale > 0.1


def test_a_sum_that_is_wrong_on_any_rank_is_wrong(four: list[dict[str, torch.Tensor]]) -> None:
    wrong = unpacked(four[0], "backend", SumFacts)["wrong on a rank", "70"]
    assert math.isnan(wrong.error)
    assert math.isnan(wrong.largest)
    assert wrong.unequal == wrong.count
