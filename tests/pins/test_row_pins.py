"""The pins of a row-parallel layer on one rank: one launch, and the bits that any number of ranks give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.kernels import gemm, reduce
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.hooks import OpSwitch, Recorder, installed
from rlmismatch.pins.vllm import VllmPins
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.transforms import Chain

K, N, ROWS = 64, 48, 5


def live(linear: Any) -> LiveModel:
    layer = SimpleNamespace(self_attn=SimpleNamespace(o_proj=linear))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer]))
    tp = TpGroup(group=None, size=1, rank=0)
    return LiveModel(
        model=model,
        sampler=None,
        tp=tp,
        all_reduce=lambda x: x,
        eps=1e-6,
        inv_freq=torch.ones(1),
        num_kv_heads=1,
        vocab_size=8,
        chain=Chain(),
    )


@pytest.mark.parametrize("active", [{"gemm"}, {"gemm", "forward_reduce"}], ids="+".join)
def test_one_rank_needs_one_launch_for_the_bits_of_many(active: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=generator).bfloat16()
    x = torch.randn(ROWS, K, generator=generator).bfloat16()
    linear = SimpleNamespace(weight=weight, forward=lambda x: (x @ weight.T, None))
    parts = [gemm.row_partial(x[:, k : k + K // 4], weight[:, k : k + K // 4], k_total=K, impl="reference") for k in range(0, K, K // 4)]
    expected = reduce.fold(parts, impl="reference", out_dtype=torch.bfloat16)
    switch = OpSwitch(active=frozenset(active), probe="none", recorder=Recorder())
    pins = VllmPins(live(linear), impl="reference", switch=switch)
    monkeypatch.setattr(gemm, "row_partial", None)  # what a second launch would need
    with installed([pins._row(linear, "layers.0.o_proj")]):
        got, bias = linear.forward(x)
    assert torch.equal(got, expected)
    assert bias is None
    assert set(switch.calls) == active
