"""The weight table is invertible, and deals each head to one rank; no engine is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fixtures.recipes import FIXTURES, VARIANTS
from rlmismatch.checkpoint import ModelConfig
from rlmismatch.engines.megatron_weights import parameters, shard, unshard
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.megatron_shape import TrainerShape
from rlmismatch.transforms import Chain

MODELS = {name: r.config for name, r in {**FIXTURES, **VARIANTS}.items()}


def ranks(tp: int) -> list[TpGroup]:
    return [TpGroup(group=None, size=tp, rank=rank) for rank in range(tp)]  # type: ignore[arg-type]  # no collective is run


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_unshard_gives_back_every_logical_tensor(name: str, tp: int) -> None:
    model = MODELS[name]
    tensors = {
        key: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + i
        for i, (key, shape) in enumerate(model.tensor_shapes().items())
    }
    rows = model.padded_vocab_size(tp)
    seen = []
    for parameter in parameters(model, te=False):
        sources = [tensors[key] for key in parameter.sources]
        parts = [shard(parameter.kind, sources, model, tp=rank, vocab_rows=rows) for rank in ranks(tp)]
        back = unshard(parameter.kind, parts, model)
        assert [torch.equal(a, b) for a, b in zip(sources, back, strict=True)] == [True] * len(sources), parameter.name
        seen += parameter.sources
    assert sorted(seen) == sorted(tensors)


def test_te_names_keep_the_norms_in_the_linears() -> None:
    model = MODELS["tiny-qwen3"]
    local, te = ({p.sources: p.name for p in parameters(model, te=flag)} for flag in (False, True))
    assert local.keys() == te.keys()
    moved = {name for sources, name in te.items() if name != local[sources]}
    layers = range(model.num_layers)
    assert moved == {f"decoder.layers.{i}.{x}.layer_norm_weight" for i in layers for x in ("self_attention.linear_qkv", "mlp.linear_fc1")}


def qkv_of(model: ModelConfig, tp: int) -> list[dict[str, torch.Tensor]]:
    shape = TrainerShape(
        impl="reference",
        sp=False,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        eps=1e-6,
        inv_freq=model.rope.inv_freq(model.head_dim),
        chain=Chain(),
    )
    return [shape.qkv_columns(rank) for rank in ranks(tp)]


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 1), (2, 2), (2, 4), (1, 2), (8, 4)])
def test_qkv_columns_join_to_heads_in_order(kv_heads: int, tp: int) -> None:
    """Also with more ranks than kv heads, where a rank's rows cut through a group."""
    model = dataclasses.replace(MODELS["tiny-qwen3"], num_kv_heads=kv_heads)
    heads = {"q": model.num_heads, "k": kv_heads, "v": kv_heads}
    # Row r of tensor x holds the number (x, r), so that the fused matrix shows where each row went.
    sources = [torch.arange(n * model.head_dim, dtype=torch.float32) + 1e4 * i for i, n in enumerate(heads.values())]
    parts = [shard("qkv", sources, model, tp=rank, vocab_rows=0) for rank in ranks(tp)]
    for i, name in enumerate(heads):
        joined = torch.cat([part[columns[name]] for part, columns in zip(parts, qkv_of(model, tp), strict=True)])
        assert torch.equal(joined, sources[i])
