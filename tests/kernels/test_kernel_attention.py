"""Attention. The chain: dense = float64 formula within budget -> dense = alone = paged (any page order, block size, strides) = chunks =
decode, bit for bit -> full prefill, chunked prefill and decode of an engine see one arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rlmismatch.kernels import attention
from rlmismatch.kernels.attention import AttentionOut, Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
SCALE = 0.3


@dataclass(frozen=True, kw_only=True)
class Cache:
    k_NBHD: torch.Tensor
    v_NBHD: torch.Tensor
    table_SN: torch.Tensor


def _paged(sequences: list[tuple[torch.Tensor, torch.Tensor]], block_size: int, *, seed: int = 0, transposed_k: bool = False) -> Cache:
    """Every sequence's K and V in shuffled pages of a cache whose other slots are NaN; table entries behind the end point nowhere."""
    _, heads, dim = sequences[0][0].shape
    needed = [-(-len(k) // block_size) for k, _ in sequences]
    blocks = sum(needed) + 3
    order = iter(torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist())
    dtype = sequences[0][0].dtype
    k_cache = torch.full((blocks, heads, dim, block_size), torch.nan, dtype=dtype, device=DEVICE).permute(0, 3, 1, 2)
    if not transposed_k:
        k_cache = k_cache.contiguous()
    v_cache = torch.full((blocks, block_size, heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    table = torch.full((len(sequences), max(needed) + 2), -1, dtype=torch.int32, device=DEVICE)
    for s, (k, v) in enumerate(sequences):
        for n in range(needed[s]):
            page = table[s, n] = next(order)
            rows = slice(n * block_size, (n + 1) * block_size)
            k_cache[page, : len(k[rows])], v_cache[page, : len(v[rows])] = k[rows], v[rows]
    return Cache(k_NBHD=k_cache, v_NBHD=v_cache, table_SN=table)


def _qkv(
    randn: Randn, tokens: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    return randn(tokens, heads, dim, dtype=dtype), randn(tokens, kv_heads, dim, dtype=dtype), randn(tokens, kv_heads, dim, dtype=dtype)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = SCALE) -> AttentionOut:
    """One sequence, float64, head by head."""
    tokens, heads, _ = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE), torch.zeros(heads, tokens, dtype=torch.float64, device=DEVICE)
    for h in range(heads):
        kv = h // (heads // k.shape[1])
        score = q[:, h].double() @ k[:, kv].double().T * scale
        score = score + torch.triu(torch.full_like(score, -torch.inf), diagonal=1)
        out[:, h], lse[h] = score.softmax(-1) @ v[:, kv].double(), score.logsumexp(-1)
    return AttentionOut(out_THD=out, lse_HT=lse)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Unfused torch in the model dtype, softmax in float32: what an eager model runs."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(group, 0), v.transpose(0, 1).repeat_interleave(group, 0)
    score = q @ k.transpose(1, 2) * SCALE + torch.full((q.shape[1],) * 2, -torch.inf, dtype=q.dtype, device=DEVICE).triu(1)
    return (score.float().softmax(-1).to(q.dtype) @ v).transpose(0, 1)


def _equal(a: AttentionOut, b: AttentionOut) -> bool:
    return torch.equal(a.out_THD, b.out_THD) and torch.equal(a.lse_HT, b.lse_HT)


def _rows(a: AttentionOut, rows: slice) -> AttentionOut:
    return AttentionOut(out_THD=a.out_THD[rows], lse_HT=a.lse_HT[:, rows])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (9, 3, 24), (2, 2, 16), (3, 1, 128)])
def test_causal_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    q, k, v = _qkv(randn, 70, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    exact = _exact(q, k, v)
    actual = attention.causal(q, k, v, [0, 70], scale=SCALE, impl=impl)
    assert actual.out_THD.dtype == dtype
    assert actual.lse_HT.dtype == torch.float32
    assert actual.out_THD.is_contiguous()
    assert_within_budget(actual.out_THD, exact.out_THD, _plain(q, k, v))
    # The LSE is float32 whatever the operands are: budget from torch's own float32.
    plain = _exact(q, k, v).lse_HT.float()
    assert (actual.lse_HT.double() - exact.lse_HT).abs().max() <= 4 * torch.finfo(torch.float32).eps * plain.abs().max()


def test_weights_are_rounded_to_the_model_dtype_and_their_sum_is_not(randn: Randn, impl: Impl) -> None:
    """Values of alternating sign around a large mean: what is left is the rounding of bfloat16 weights, 2^-9 of the mean of |v|."""
    q, k, _ = _qkv(randn, 64, dtype=torch.bfloat16)
    v = torch.full((64, 2, 32), 256.0, dtype=torch.bfloat16, device=DEVICE)
    v[::2] = -256.0
    exact = _exact(q, k, v)
    actual = attention.causal(q, k, v, [0, 64], scale=SCALE, impl=impl)
    half_ulp = exact.out_THD.abs() * 2.0**-8
    assert ((actual.out_THD.double() - exact.out_THD).abs() <= half_ulp * 1.1 + 256 * 2.0**-9).all()
    assert (actual.lse_HT.double() - exact.lse_HT).abs().max() <= 2.0**-21


def test_reference_in_float64_is_unrounded(randn: Randn) -> None:
    from rlmismatch.kernels.attention import reference

    q, k, v = _qkv(randn, 20)
    out, lse = reference.causal(q, k, v, [0, 20], scale=SCALE, out_dtype=torch.float64)
    exact = _exact(q, k, v)
    torch.testing.assert_close(out, exact.out_THD, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, exact.lse_HT, rtol=1e-13, atol=1e-13)


def test_long_reference_sequences_are_cut_without_a_seam(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _qkv(randn, 50)
    whole = attention.causal(q, k, v, [0, 50], scale=SCALE, impl="reference")
    monkeypatch.setattr("rlmismatch.kernels.attention.reference._QUERY_ROWS", 7)
    assert _equal(attention.causal(q, k, v, [0, 50], scale=SCALE, impl="reference"), whole)


def test_packed_sequences_do_not_see_each_other(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    q, k, v = _qkv(randn, 80, dtype=dtype)
    bounds = [0, 1, 67, 67, 80]
    together = attention.causal(q, k, v, bounds, scale=SCALE, impl=impl)
    for start, end in ((0, 1), (1, 67), (67, 80)):
        rows = slice(start, end)
        alone = attention.causal(q[rows], k[rows], v[rows], [0, end - start], scale=SCALE, impl=impl)
        assert _equal(alone, _rows(together, rows))


def test_a_row_does_not_depend_on_what_comes_later(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 140)
    whole = attention.causal(q, k, v, [0, 140], scale=SCALE, impl=impl)
    for tokens in (1, 63, 64, 65, 129):
        prefix = attention.causal(q[:tokens], k[:tokens], v[:tokens], [0, tokens], scale=SCALE, impl=impl)
        assert _equal(prefix, _rows(whole, slice(0, tokens)))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_paged_equals_dense(randn: Randn, impl: Impl, block_size: int) -> None:
    q, k, v = _qkv(randn, 75)
    dense = attention.causal(q, k, v, [0, 75], scale=SCALE, impl=impl)
    for seed in (1, 2):
        cache = _paged([(k, v)], block_size, seed=seed)
        paged = attention.paged(q, cache.k_NBHD, cache.v_NBHD, cache.table_SN, [0, 75], [75], scale=SCALE, impl=impl)
        assert _equal(paged, dense)


def test_paged_equals_dense_in_every_dtype(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    q, k, v = _qkv(randn, 66, heads=6, kv_heads=2, dim=24, dtype=dtype)
    cache = _paged([(k, v)], 16)
    paged = attention.paged(q, cache.k_NBHD, cache.v_NBHD, cache.table_SN, [0, 66], [66], scale=SCALE, impl=impl)
    assert _equal(paged, attention.causal(q, k, v, [0, 66], scale=SCALE, impl=impl))


@pytest.mark.parametrize("chunk", [1, 8, 33, 64])
def test_chunks_and_decode_equal_full_prefill(randn: Randn, impl: Impl, chunk: int) -> None:
    q, k, v = _qkv(randn, 72)
    full = attention.causal(q, k, v, [0, 72], scale=SCALE, impl=impl)
    cache = _paged([(k, v)], 16)
    # Later tokens lie in the cache already: a chunk must not look at them.
    for start in range(0, 72, chunk) if chunk > 1 else (0, 1, 40, 63, 64, 71):
        end = min(start + chunk, 72)
        part = attention.paged(q[start:end], cache.k_NBHD, cache.v_NBHD, cache.table_SN, [0, end - start], [end], scale=SCALE, impl=impl)
        assert _equal(part, _rows(full, slice(start, end)))


def test_a_mixed_batch_equals_each_sequence_alone(randn: Randn, impl: Impl) -> None:
    """A decode row, a prefill, a chunk behind a cached prefix, and an idle sequence in one call."""
    lengths, queries = [70, 20, 90, 5], [1, 20, 33, 0]
    data = [_qkv(randn, n) for n in lengths]
    full = [attention.causal(q, k, v, [0, n], scale=SCALE, impl=impl) for (q, k, v), n in zip(data, lengths, strict=True)]
    cache = _paged([(k, v) for _, k, v in data], 16)
    q = torch.cat([x[0][n - m :] for x, n, m in zip(data, lengths, queries, strict=True)])
    start = torch.tensor([0, 1, 21, 54, 54], dtype=torch.int32, device=DEVICE)
    out = attention.paged(
        q, cache.k_NBHD, cache.v_NBHD, cache.table_SN, start, torch.tensor(lengths, device=DEVICE), scale=SCALE, impl=impl
    )
    for s, (n, m) in enumerate(zip(lengths, queries, strict=True)):
        assert _equal(_rows(out, slice(int(start[s]), int(start[s]) + m)), _rows(full[s], slice(n - m, n)))


def test_cache_of_any_strides(randn: Randn, impl: Impl) -> None:
    """K stored [D, B] a block, K and V interleaved in one tensor, q a slice of a packed projection: layouts that engines use."""
    q, k, v = _qkv(randn, 40)
    dense = attention.causal(q, k, v, [0, 40], scale=SCALE, impl=impl)
    cache = _paged([(k, v)], 16, transposed_k=True)
    assert cache.k_NBHD.stride(1) == 1
    interleaved = torch.stack([cache.k_NBHD, cache.v_NBHD], dim=1)
    packed_q = torch.cat([q, q], dim=1)[:, :4]
    for k_cache, v_cache in ((cache.k_NBHD, cache.v_NBHD), interleaved.unbind(1)):
        for table in (cache.table_SN, cache.table_SN.T.contiguous().T, cache.table_SN.long()):
            paged = attention.paged(packed_q, k_cache, v_cache, table, [0, 40], [40], scale=SCALE, impl=impl)
            assert _equal(paged, dense)
    packed = torch.cat([q, k, v], dim=1)
    assert _equal(attention.causal(packed[:, :4], packed[:, 4:6], packed[:, 6:], [0, 40], scale=SCALE, impl=impl), dense)


def test_query_heads_read_their_kv_head_by_blocks(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 12, heads=6, kv_heads=3)
    out = attention.causal(q, k, v, [0, 12], scale=SCALE, impl=impl)
    for h in range(6):
        single = attention.causal(q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1], [0, 12], scale=SCALE, impl=impl)
        assert torch.equal(single.out_THD[:, 0], out.out_THD[:, h])
        assert torch.equal(single.lse_HT[0], out.lse_HT[h])


def test_lse_is_natural_and_merges_two_halves(randn: Randn, impl: Impl) -> None:
    """The last row over all keys equals the LSE-weighted mean of the two halves: what a split or context-parallel merge relies on."""
    q, k, v = _qkv(randn, 64, dtype=torch.float32)
    full = attention.causal(q, k, v, [0, 64], scale=SCALE, impl=impl)
    parts = [
        attention.causal(q[-1:].expand(32, -1, -1), k[rows], v[rows], [0, 32], scale=SCALE, impl=impl)
        for rows in (slice(0, 32), slice(32, 64))
    ]
    lse = torch.stack([p.lse_HT[:, -1] for p in parts]).double()
    weight = lse.softmax(dim=0)[..., None]
    merged = (weight * torch.stack([p.out_THD[-1] for p in parts])).sum(dim=0)
    torch.testing.assert_close(merged, full.out_THD[-1].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.logsumexp(0), full.lse_HT[:, -1].double(), rtol=1e-6, atol=1e-6)


def test_large_scores_do_not_overflow(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 70, dtype=torch.float32)
    out = attention.causal(q * 100, k, v, [0, 70], scale=1.0, impl=impl)
    exact = _exact(q * 100, k, v, scale=1.0)
    torch.testing.assert_close(out.lse_HT.double(), exact.lse_HT, rtol=1e-6, atol=1e-3)
    assert out.out_THD.isfinite().all()


def test_padding_rows_attend_to_nothing(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 10)
    cache = _paged([(k, v)], 8)
    padded = torch.cat([q, torch.full_like(q[:3], torch.nan)])
    out = attention.paged(padded, cache.k_NBHD, cache.v_NBHD, cache.table_SN, [0, 10], [10], scale=SCALE, impl=impl)
    assert _equal(_rows(out, slice(0, 10)), attention.causal(q, k, v, [0, 10], scale=SCALE, impl=impl))
    assert torch.equal(out.out_THD[10:], torch.zeros_like(q[:3]))
    assert torch.equal(out.lse_HT[:, 10:], torch.full((4, 3), -torch.inf, device=DEVICE))


def test_no_tokens(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 0)
    out = attention.causal(q, k, v, [0], scale=SCALE, impl=impl)
    assert out.out_THD.shape == (0, 4, 32)
    assert out.lse_HT.shape == (4, 0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_nan_reaches_the_rows_that_see_it(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 10)
    k[6] = torch.nan
    bad = attention.causal(q, k, v, [0, 10], scale=SCALE, impl=impl).out_THD.isnan().all(dim=-1).all(dim=-1)
    assert bad.tolist() == [False] * 6 + [True] * 4


@pytest.mark.parametrize("bounds", [[], [1, 8], [0, 5, 3, 8], [0, 7], [0, 9]])
def test_bounds_that_do_not_cover_the_rows_are_refused(randn: Randn, impl: Impl, bounds: list[int]) -> None:
    q, k, v = _qkv(randn, 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention.causal(q, k, v, bounds, scale=SCALE, impl=impl)


def test_heads_and_dtypes_that_do_not_fit_are_refused(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 8)
    with pytest.raises(ValueError, match="do not fit"):
        attention.causal(q[:, :3], k, v, [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="do not fit"):
        attention.causal(q, k, v[:, :1], [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match=r"k is torch\.float32"):
        attention.causal(q, k.float(), v, [0, 8], scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="8 query and 7 key"):
        attention.causal(q, k[:7], v[:7], [0, 8], scale=SCALE, impl=impl)


def test_a_table_that_lies_is_refused(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 20)
    cache = _paged([(k, v)], 8)

    def call(table: torch.Tensor, bounds: list[int], lengths: list[int]) -> None:
        attention.paged(q[: bounds[-1]], cache.k_NBHD, cache.v_NBHD, table, bounds, lengths, scale=SCALE, impl=impl)

    call(cache.table_SN, [0, 20], [20])
    with pytest.raises(ValueError, match="outside the cache"):
        call(cache.table_SN.masked_fill(cache.table_SN == cache.table_SN[0, 2], -1), [0, 20], [20])
    with pytest.raises(ValueError, match="outside the cache"):
        call(cache.table_SN + 100, [0, 20], [20])
    with pytest.raises(ValueError, match="20 query rows but only 19"):
        call(cache.table_SN, [0, 20], [19])
    with pytest.raises(ValueError, match="reaches only to"):
        call(cache.table_SN, [0, 20], [1000])
    with pytest.raises(ValueError, match="do not fit"):
        call(cache.table_SN, [0, 20], [20, 5])
    with pytest.raises(ValueError, match="ends at 21"):
        attention.paged(q, cache.k_NBHD, cache.v_NBHD, cache.table_SN, [0, 21], [21], scale=SCALE, impl=impl)
