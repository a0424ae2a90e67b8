"""The KV cache layouts that the attention pin reads, each written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.errors import EnvironmentUnfitError
from rlmismatch.pins.hooks import installed
from rlmismatch.pins.vllm_attention import PagedCache

BLOCKS, BLOCK, HEADS, DIM = 3, 4, 2, 8


class _Impl:
    def __init__(self) -> None:
        self.writes = 0

    def do_kv_cache_update(self, *args: Any) -> str:
        self.writes += 1
        return "native"


def layer(isa: str | None) -> Any:
    fields = {} if isa is None else {"isa": isa}
    return SimpleNamespace(impl=_Impl(), head_size=DIM, **fields)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [blocks, block, heads, dim] with no two elements alike."""
    k = torch.arange(BLOCKS * BLOCK * HEADS * DIM, dtype=torch.float32).view(BLOCKS, BLOCK, HEADS, DIM)
    return k, -k - 1


def test_cpu_cache_holds_keys_transposed_and_values_plain() -> None:
    k_NBHD, v_NBHD = rows()
    cache = torch.empty(BLOCKS, HEADS, BLOCK, 2 * DIM)
    memory = cache.view(BLOCKS, HEADS, 2, BLOCK * DIM)
    memory[:, :, 0] = k_NBHD.permute(0, 2, 3, 1).reshape(BLOCKS, HEADS, -1)
    memory[:, :, 1] = v_NBHD.transpose(1, 2).reshape(BLOCKS, HEADS, -1)
    k, v = PagedCache().views(layer("vec"), cache)
    assert torch.equal(k, k_NBHD)
    assert torch.equal(v, v_NBHD)
    assert k.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()  # a view, not a copy


def test_flash_attention_cache_holds_both_plain() -> None:
    k_NBHD, v_NBHD = rows()
    k, v = PagedCache().views(layer(None), torch.stack([k_NBHD, v_NBHD], dim=1))
    assert torch.equal(k, k_NBHD)
    assert torch.equal(v, v_NBHD)


def test_a_layout_that_is_not_known_is_refused() -> None:
    with pytest.raises(EnvironmentUnfitError, match="_Impl keeps a KV cache of") as caught:
        PagedCache().views(layer(None), torch.empty(2, BLOCKS, BLOCK, HEADS, DIM))
    assert caught.value.slug == "kv-cache-layout-unknown"


def test_packed_keys_are_kept_as_rows_when_they_are_written() -> None:
    k_NBHD, v_NBHD = rows()
    attn, paged = layer("amx"), PagedCache()
    cache = torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), torch.nan)  # what the packed cache holds must not matter
    slots = torch.tensor([9, 2, -1, 7])  # the third row is padding
    key, value = (x.view(-1, HEADS, DIM)[slots].flatten(1) for x in (k_NBHD, v_NBHD))
    with installed(paged.write_hook(attn, pins=("attention",), label="a")):
        assert attn.impl.do_kv_cache_update(attn, key, value, cache, slots) == "native"
    k, v = paged.views(attn, cache)
    for slot in (9, 2, 7):
        assert torch.equal(k[slot // BLOCK, slot % BLOCK], k_NBHD.view(-1, HEADS, DIM)[slot])
        assert torch.equal(v[slot // BLOCK, slot % BLOCK], v_NBHD.view(-1, HEADS, DIM)[slot])
    assert attn.impl.writes == 1


def test_a_cache_that_can_be_read_needs_no_hook() -> None:
    assert PagedCache().write_hook(layer("vec"), pins=(), label="a") == ()
    assert PagedCache().write_hook(layer(None), pins=(), label="a") == ()
