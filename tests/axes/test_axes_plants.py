"""What the table calls built is what the adapters can put in, side by side."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from rlmismatch import axes
from rlmismatch.engines import megatron_plants, vllm_plants


@pytest.mark.parametrize(("side", "known"), [("trainer", megatron_plants.PLANTS), ("rollout", vllm_plants.PLANTS)])
def test_built_plants(side: str, known: Collection[str]) -> None:
    assert {p.id for a in axes.ALL for p in a.plants if p.built and side in p.sides} == set(known)
