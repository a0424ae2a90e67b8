"""Window, soft cap, sinks, and the splits of attention. The chain: each form = float64 formula within budget -> splits apart and merged =
one program, bit for bit -> decode, context parallelism and prefill are one arithmetic also where a row spans several splits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmismatch.kernels import attention
from rlmismatch.kernels.attention import SPLIT, AttentionOut, Impl
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
SCALE = 0.3
FORMS: dict[str, dict[str, Any]] = {
    "window 2": {"window": 2},
    "window": {"window": 37},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 100, "soft_cap": 4.0, "sinks": True},
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, randn: Randn) -> dict[str, Any]:
    form = dict(FORMS[request.param])
    if form.pop("sinks", False):
        form["sinks_H"] = randn(4)
    return form


def _qkv(randn: Randn, tokens: int, dtype: torch.dtype = torch.bfloat16, dim: int = 16) -> list[torch.Tensor]:
    return [randn(tokens, heads, dim, dtype=dtype) for heads in (4, 2, 2)]


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype,
    window: int | None = None, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None,
) -> AttentionOut:  # fmt: skip
    """One sequence, unfused, in `dtype`."""
    tokens = len(q)
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(2, dim=1), v.to(dtype).repeat_interleave(2, dim=1)
    score = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    age = torch.arange(tokens, device=DEVICE)[:, None] - torch.arange(tokens, device=DEVICE)
    score = score.masked_fill((age < 0) | (age >= (window or tokens)), -torch.inf)
    if sinks_H is not None:
        score = torch.cat([score, sinks_H.to(dtype)[:, None, None].expand(-1, tokens, 1)], dim=-1)
    return AttentionOut(torch.einsum("hqk,khd->qhd", score.softmax(-1)[..., :tokens], v), score.double().logsumexp(-1))


def _equal(a: AttentionOut, b: AttentionOut) -> bool:
    return torch.equal(a.out_THD, b.out_THD) and torch.equal(a.lse_HT, b.lse_HT)


def _cache(x_NHD: torch.Tensor, block_size: int) -> torch.Tensor:
    """In pages, in order, NaN behind the end."""
    blocks = -(-len(x_NHD) // block_size)
    cache = torch.full((blocks * block_size, *x_NHD.shape[1:]), torch.nan, dtype=x_NHD.dtype, device=DEVICE)
    cache[: len(x_NHD)] = x_NHD
    return cache.view(blocks, block_size, *x_NHD.shape[1:])


def _last_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, impl: Impl, block_size: int = 16, **form: Any) -> AttentionOut:
    """The last `rows` of the sequence, over a paged cache."""
    k_cache, v_cache = _cache(k, block_size), _cache(v, block_size)
    table = torch.arange(len(k_cache), dtype=torch.int32, device=DEVICE)[None]
    return attention.paged(q[-rows:], k_cache, v_cache, table, [0, rows], [len(k)], scale=SCALE, impl=impl, **form)


def test_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, form: dict[str, Any]) -> None:
    q, k, v = _qkv(randn, 150, dtype)
    actual = attention.causal(q, k, v, [0, 150], scale=SCALE, impl=impl, **form)
    exact = _softmax(q, k, v, dtype=torch.float64, **form)
    assert_within_budget(actual.out_THD, exact.out_THD, _softmax(q, k, v, dtype=dtype, **form).out_THD)
    assert (actual.lse_HT.double() - exact.lse_HT).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.lse_HT.abs().max().clamp(min=4)


def test_decode_and_chunks_equal_prefill(randn: Randn, impl: Impl, form: dict[str, Any]) -> None:
    q, k, v = _qkv(randn, 150)
    full = attention.causal(q, k, v, [0, 150], scale=SCALE, impl=impl, **form)
    for end, rows in ((150, 1), (129, 1), (128, 1), (1, 1), (150, 60)):
        part = _last_rows(q[:end], k[:end], v[:end], rows, impl, **form)
        assert torch.equal(part.out_THD, full.out_THD[end - rows : end])
        assert torch.equal(part.lse_HT, full.lse_HT[:, end - rows : end])


def test_a_window_counts_the_rows_own_token(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 20)
    out = attention.causal(q, k, v, [0, 20], scale=SCALE, impl=impl, window=1).out_THD
    assert torch.equal(out, v.repeat_interleave(2, dim=1))
    assert _equal(
        attention.causal(q, k, v, [0, 20], scale=SCALE, impl=impl, window=20), attention.causal(q, k, v, [0, 20], scale=SCALE, impl=impl)
    )


def test_what_a_window_hides_is_not_read(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 300)
    clean = _last_rows(q, k, v, 2, impl, window=40)
    k[:259], v[:259] = torch.nan, torch.nan
    assert _equal(_last_rows(q, k, v, 2, impl, window=40), clean)


def _partials(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, cuts: list[int], impl: Impl, **form: Any
) -> list[attention.Partials]:
    return [
        attention.partials(q[-rows:], k[a:b], v[a:b], q_start=len(q) - rows, kv_start=a, scale=SCALE, impl=impl, **form)
        for a, b in itertools.pairwise(cuts)
    ]


@pytest.mark.parametrize("form_name", ["causal", *FORMS])
def test_partials_merged_equal_one_program(randn: Randn, form_name: str) -> None:
    """The rows of a sequence of three splits, from one rank and from three; decode runs its splits apart by the same two kernels."""
    tokens, rows = 2 * SPLIT + 100, 5
    q, k, v = _qkv(randn, tokens)
    form = dict(FORMS.get(form_name, {}))
    sinks = randn(4) if form.pop("sinks", False) else None
    whole = _last_rows(q, k, v, rows, "triton", sinks_H=sinks, **form)
    for cuts in ([0, tokens], [0, SPLIT, tokens], [0, SPLIT, 2 * SPLIT, tokens]):
        merged = attention.merge(_partials(q, k, v, rows, cuts, "triton", **form), impl="triton", out_dtype=q.dtype, sinks_H=sinks)
        assert _equal(merged, whole), cuts


@pytest.mark.parametrize("windowed", [False, True])
def test_splits_in_programs_of_their_own(randn: Randn, monkeypatch: pytest.MonkeyPatch, windowed: bool) -> None:
    """Sequences of one to three splits in one call, as a decoding engine has them."""
    from rlmismatch.kernels.attention import triton

    lengths = (2 * SPLIT + 3, 5, SPLIT, SPLIT + 1)
    k_cache, v_cache = (randn(200, 16, 2, 16, dtype=torch.bfloat16) for _ in "kv")
    table = torch.randperm(200, generator=torch.Generator().manual_seed(0))[: 4 * 50].view(4, 50).to(DEVICE)
    table = torch.cat([table, table.flip(0)], dim=1)
    q, sinks = randn(7, 4, 16, dtype=torch.bfloat16), randn(4)
    outs = []
    for few in (0, 1 << 30):
        monkeypatch.setattr(triton, "_FEW_PROGRAMS", few)
        outs.append(
            attention.paged(
                q,
                k_cache,
                v_cache,
                table,
                [0, 1, 3, 4, 7],
                lengths,
                scale=SCALE,
                impl="triton",
                window=600 if windowed else None,
                sinks_H=sinks,
            )
        )
    assert _equal(outs[0], outs[1])


def test_partials_and_merge_are_attention(randn: Randn, impl: Impl) -> None:
    """Cuts that are no split's are right as well, to a rounding; out and lse in float32."""
    q, k, v = _qkv(randn, 200, torch.float32)
    exact = _softmax(q, k, v, dtype=torch.float64)
    parts = _partials(q, k, v, 200, [0, 1, 90, 200], impl)
    assert [p.out_JTHD.shape[0] for p in parts] == [1, 1, 1]
    assert torch.equal(parts[1].lse_JHT[0, :, 0], torch.full((4,), -torch.inf, device=DEVICE))  # row 0 sees no key of [1, 90)
    assert torch.equal(parts[1].out_JTHD[0, 0], torch.zeros(4, 16, device=DEVICE))
    merged = attention.merge(parts, impl=impl, out_dtype=torch.float32)
    torch.testing.assert_close(merged.out_THD.double(), exact.out_THD, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(merged.lse_HT.double(), exact.lse_HT, rtol=1e-6, atol=2e-6)


def test_another_split_is_another_order(randn: Randn) -> None:
    tokens = 2 * SPLIT
    q, k, v = _qkv(randn, tokens)
    call = {"q_start": tokens - 3, "kv_start": 0, "scale": SCALE, "impl": "triton"}
    one, four = (attention.partials(q[-3:], k, v, split=split, **call) for split in (tokens, 256))
    assert (one.lse_JHT.shape[0], four.lse_JHT.shape[0]) == (1, 4)
    with pytest.raises(ValueError, match="multiple of 128"):
        attention.partials(q[-3:], k, v, split=100, **call)


def test_a_row_that_sees_nothing(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 8)
    parts = attention.partials(q, k, v, q_start=0, kv_start=600, scale=SCALE, impl=impl)
    sinks = randn(4)
    for part, lse in ((attention.merge([parts], impl=impl, out_dtype=q.dtype), torch.full((4,), -torch.inf, device=DEVICE)),
                      (attention.merge([parts], impl=impl, out_dtype=q.dtype, sinks_H=sinks), sinks)):  # fmt: skip
        assert torch.equal(part.out_THD, torch.zeros_like(q))
        assert torch.equal(part.lse_HT, lse[:, None].expand(4, 8))


def test_an_empty_partial_changes_no_bit(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 40)
    some = attention.partials(q, k, v, q_start=0, kv_start=0, scale=SCALE, impl=impl)
    none = attention.partials(q, k, v, q_start=0, kv_start=512, scale=SCALE, impl=impl)
    alone = attention.merge([some], impl=impl, out_dtype=torch.float32)
    for parts in ([none, some], [some, none]):
        assert _equal(attention.merge(parts, impl=impl, out_dtype=torch.float32), alone)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"window": 0}, "window counts"),
        ({"window": -5}, "window counts"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"soft_cap": float("nan")}, "soft_cap"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"sinks_H": torch.zeros(3, device=DEVICE)}, "as many sinks"),
    ],
)
def test_forms_that_make_no_sense_are_refused(randn: Randn, impl: Impl, form: dict[str, Any], message: str) -> None:
    q, k, v = _qkv(randn, 4)
    with pytest.raises(ValueError, match=message):
        attention.causal(q, k, v, [0, 4], **({"scale": SCALE, "impl": impl} | form))


def test_head_dims_and_ranges_that_it_cannot_take(randn: Randn, impl: Impl) -> None:
    wide = [randn(4, heads, 257, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="head dim 257"):
        attention.causal(*wide, [0, 4], scale=SCALE, impl=impl)
    q, k, v = _qkv(randn, 4)
    with pytest.raises(ValueError, match="keys are needed"):
        attention.partials(q, k[:0], v[:0], q_start=0, kv_start=0, scale=SCALE, impl=impl)
    with pytest.raises(ValueError, match="at least one"):
        attention.merge([], impl=impl, out_dtype=q.dtype)
    with pytest.raises(ValueError, match="do not fit"):
        attention.merge([attention.Partials(randn(1, 4, 4, 16), randn(1, 4, 5))], impl=impl, out_dtype=q.dtype)


def test_one_token_and_none(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 1)
    out = attention.causal(q, k, v, [0, 0, 1, 1], scale=SCALE, impl=impl)
    assert torch.equal(out.out_THD, v.repeat_interleave(2, dim=1))
    assert attention.causal(q[:0], k[:0], v[:0], [0, 0], scale=SCALE, impl=impl).out_THD.shape == (0, 4, 16)


def test_a_checked_table_is_not_checked_again(randn: Randn, impl: Impl) -> None:
    q, k, v = _qkv(randn, 20)
    k_cache, v_cache = _cache(k, 8), _cache(v, 8)
    table = torch.arange(3, device=DEVICE)[None]
    attention.check_block_table(table, [20], blocks=3, block_size=8)
    with pytest.raises(ValueError, match="outside the cache"):
        attention.check_block_table(table, [20], blocks=2, block_size=8)
    checked, plain = (
        attention.paged(q, k_cache, v_cache, table, [0, 20], [20], scale=SCALE, impl=impl, table_checked=x) for x in (True, False)
    )
    assert _equal(checked, plain)
