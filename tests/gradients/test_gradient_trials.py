"""Which order and dtype of a sum over ranks explain a result: known sums, and one that is none."""

from __future__ import annotations

import pytest
import torch

from rlmismatch.engines.gradient_trials import AS_SENT, explained


def partials(ranks: int, dtype: torch.dtype = torch.bfloat16, count: int = 512) -> list[torch.Tensor]:
    return [torch.randn(count, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(ranks)]


def left(parts: list[torch.Tensor], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = parts[order[0]].to(dtype)
    for i in order[1:]:
        total = total + parts[i].to(dtype)
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rank_order_in_float32(ranks: int) -> None:
    parts = partials(ranks)
    assert explained(left(parts, tuple(range(ranks)), torch.float32), parts, sp=False) == ("by rank", "float32")


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_ring_that_rounds_at_every_hop_is_named_piece_by_piece(ranks: int) -> None:
    parts = partials(ranks)
    pieces = []
    for piece in range(ranks):
        order = tuple((piece - 1 - i) % ranks for i in range(ranks))
        own = slice(piece * 512 // ranks, (piece + 1) * 512 // ranks)
        pieces.append(left([p[own] for p in parts], order, torch.bfloat16))
    found = explained(torch.cat(pieces), parts, sp=False)
    assert found is not None
    assert found[1] == AS_SENT
    assert found[0].startswith("ring ")


def test_a_float32_ring_is_float32() -> None:
    parts = partials(4, torch.float32)
    found = explained(left(parts, (2, 3, 0, 1), torch.float32), parts, sp=True)
    assert found == ("ring 2-3-0-1", "float32")


@pytest.mark.parametrize("ranks", [2, 4])
def test_float32_partials_added_in_bfloat16_are_found(ranks: int) -> None:
    parts = partials(ranks, torch.float32)
    low = [p.bfloat16() for p in parts]
    found = explained(left(low, tuple(range(ranks)), torch.bfloat16).float(), parts, sp=True)
    assert found is not None
    assert found[1] == "bfloat16"


def test_a_partial_is_no_sum() -> None:
    parts = partials(4)
    assert explained(parts[1], parts, sp=False) == ("", "none")


def test_an_order_that_is_not_known_is_unknown() -> None:
    parts = partials(4)
    assert explained(left(parts, (0, 2, 1, 3), torch.bfloat16), parts, sp=False) is None
