"""The gradient measures as a pure function of a capture: no number that is none is lost behind one that is, and shares add up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.arms import GRADS
from rlmismatch.assemble import gradients
from rlmismatch.report.model import MeasureRow


def measured(**boundaries: torch.Tensor) -> dict[str, MeasureRow]:
    arm = SimpleNamespace(boundaries=boundaries, notes=[], knobs={})
    book: Any = SimpleNamespace(arms={"trainer": {GRADS: arm}})
    evidence: Any = SimpleNamespace(side=lambda _: SimpleNamespace(config=SimpleNamespace(tp=4, dtype="bfloat16")))
    return {row.what: row for row in gradients.measures(evidence, book)}


def layer(error: float) -> torch.Tensor:
    """One layer's sums of dX: 10 elements of size 1, the engine's squared error, an exact rank order and tree."""
    return torch.tensor([10.0, 1.0, 0.0, 1.0, error, 0.0, 0.0, error], dtype=torch.float64)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_layer_whose_error_is_no_number_is_the_worst(at: int) -> None:
    layers = {f"dgrad/layers.{i}.qkv": layer(math.nan if i == at else 1e-6) for i in range(3)}
    row = measured(**layers)["dX off float64: engine"]
    assert (math.isnan(row.value), row.ok, row.note) == (True, False, f"worst layer, layers.{at}.qkv")


def test_an_honest_sum_is_within_its_limit_and_a_lost_partial_is_not() -> None:
    assert measured(**{"dgrad/layers.0.qkv": layer(1e-6)})["dX off float64: engine"].ok
    assert not measured(**{"dgrad/layers.0.qkv": layer(0.25)})["dX off float64: engine"].ok


def test_shares_of_independent_parts_are_their_sizes_and_add_up() -> None:
    sizes = {"ops": 6.0, "dgrad_reduce": 3.0, "wgrad_accumulate": 1.0}
    names = tuple(sizes)
    sets = [frozenset(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(8)]
    left = {s: sum(size for name, size in sizes.items() if name not in s) for s in sets}
    assert gradients.shares(left, names) == pytest.approx({"ops": 0.6, "dgrad_reduce": 0.3, "wgrad_accumulate": 0.1})
    assert gradients.shares(dict.fromkeys(sets, 0.0), names) == {}
