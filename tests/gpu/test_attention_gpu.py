"""Attention on real shapes (heads of Qwen3-0.6B and Qwen3-8B): one set of bits a row, and accuracy.

That neither the tile nor the kernel moves a bit is a fact about a card, not a theorem (see test_kernels_gpu.py). The chain: the kernel that
Hopper runs = the one that every GPU runs = every tile of the table = splits apart = paged, chunked and decoded, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmismatch.kernels import attention, attention_backward
from rlmismatch.kernels.attention import AttentionOut
from tests.kernels.budget import assert_within_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),  # Triton 3.9; every launch states its own
]

Randn = Callable[..., torch.Tensor]
BF16 = torch.bfloat16
HEADS = [(16, 8), (32, 8), (9, 3)]
SCALE = 128**-0.5
FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 700},
    "cap": {"soft_cap": 20.0},
    "sinks": {"sinks": True},
    "window, sinks": {"window": 100, "sinks": True},
}


@pytest.fixture
def randn() -> Randn:
    generator = torch.Generator("cuda").manual_seed(20251129)

    def make(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    return make


def _form(name: str, randn: Randn, heads: int) -> dict[str, Any]:
    form = dict(FORMS[name])
    if form.pop("sinks", False):
        form["sinks_H"] = randn(heads, dtype=torch.float32)
    return form


def _qkv(randn: Randn, tokens: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [randn(tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def _paged(k: torch.Tensor, v: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence in shuffled pages of an interleaved cache [blocks, 2, B, Hkv, D] whose other slots are NaN."""
    needed = -(-len(k) // block_size)
    cache = torch.full((needed + 5, 2, block_size, *k.shape[1:]), torch.nan, dtype=k.dtype, device="cuda")
    table = torch.randperm(needed + 5, device="cuda")[:needed].to(torch.int32)
    for n, page in enumerate(table.tolist()):
        rows = slice(n * block_size, (n + 1) * block_size)
        cache[page, 0, : len(k[rows])], cache[page, 1, : len(v[rows])] = k[rows], v[rows]
    return cache[:, 0], cache[:, 1], table[None]


def _assert_rows(part: AttentionOut, whole: AttentionOut, start: int, end: int, *where: object) -> None:
    assert torch.equal(part.out_THD, whole.out_THD[start:end]), (start, end, *where)
    assert torch.equal(part.lse_HT, whole.lse_HT[:, start:end]), (start, end, *where)


# A case compiles a dozen kernels: half a minute, on a GPU's host. So every form with one group, and every group with one form.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "name"), [*((32, 8, name) for name in FORMS), *((*group, "causal") for group in HEADS if group != (32, 8))]
)
def test_one_arithmetic(randn: Randn, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, name: str) -> None:
    """Dense, paged at two block sizes, chunks that use every tile, decode; splits in one program and apart."""
    from rlmismatch.kernels.attention import triton

    tokens = 1500
    q, k, v = _qkv(randn, tokens, heads, kv_heads)
    form = _form(name, randn, heads)
    dense = attention.causal(q, k, v, [0, tokens], scale=SCALE, impl="triton", **form)
    bounds = [0, tokens, tokens + 300, tokens + 300, 2 * tokens]
    two = attention.causal(
        torch.cat([q, q[:300], q[:1200]]), torch.cat([k, k[:300], k[:1200]]), torch.cat([v, v[:300], v[:1200]]), bounds,
        scale=SCALE, impl="triton", **form,
    )  # fmt: skip
    for first, last in itertools.pairwise(bounds):
        rows = AttentionOut(two.out_THD[first:last], two.lse_HT[:, first:last])
        _assert_rows(rows, dense, 0, last - first, "packed")
    for block_size, few in itertools.product((16, 128), (0, 1 << 30)):
        monkeypatch.setattr(triton, "_FEW_PROGRAMS", few)
        cache_k, cache_v, table = _paged(k, v, block_size)
        for start, end in ((0, tokens), (0, 8), (8, 40), (700, 1213), (1, 2), (63, 64), (511, 513), (512, 513), (1024, 1025), (1499, 1500)):
            part = attention.paged(q[start:end], cache_k, cache_v, table, [0, end - start], [end], scale=SCALE, impl="triton", **form)
            _assert_rows(part, dense, start, end, block_size, few)


@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_the_hopper_kernel_has_the_bits_of_the_portable_one(randn: Randn, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from rlmismatch.kernels.attention import triton

    if not triton.is_hopper():
        pytest.skip("no Hopper GPU")
    for heads, kv_heads in HEADS:
        form = _form(name, randn, heads)
        for bounds in ([0, 1], [0, 128], [0, 511], [0, 1300, 1300, 1301, 2900], [0, 4096]):
            q, k, v = (x[:, :-1] for x in _qkv(randn, bounds[-1], heads + 1, kv_heads + 1))  # a slice of wider rows
            v[bounds[-2] :] *= 1 if len(bounds) == 2 else torch.nan  # the last sequence's are no one else's business
            hopper = attention.causal(q, k, v, bounds, scale=SCALE, impl="triton", **form)
            with monkeypatch.context() as patch:
                patch.setattr(triton, "is_hopper", lambda: False)
                portable = attention.causal(q, k, v, bounds, scale=SCALE, impl="triton", **form)
            end = bounds[-1] if len(bounds) == 2 else bounds[-2]
            _assert_rows(AttentionOut(hopper.out_THD[:end], hopper.lse_HT[:, :end]), portable, 0, end, heads, bounds)


def test_no_tile_moves_a_bit(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight warps over 16 rows are left out, as `_tile` leaves them out: they share a row's keys otherwise, and add it in another order."""
    from rlmismatch.kernels.attention import triton

    monkeypatch.setattr(triton, "is_hopper", lambda: False)
    q, k, v = _qkv(randn, 1100)
    outs = []
    for tile in ((16, 4, 1), (16, 4, 2), (16, 1, 2), (64, 4, 2), (64, 4, 1), (128, 8, 2)):
        monkeypatch.setattr(triton, "_tile", lambda *_, tile=tile: tile)
        outs.append(attention.causal(q, k, v, [0, 1100], scale=SCALE, impl="triton"))
        _assert_rows(outs[-1], outs[0], 0, 1100, tile)


def test_partials_of_context_parallel_ranks(randn: Randn) -> None:
    """Each rank folds the splits that it holds; all of them merged, in order, are the whole row."""
    tokens, rows = 2048, 100
    q, k, v = _qkv(randn, tokens)
    whole = attention.causal(q, k, v, [0, tokens], scale=SCALE, impl="triton")
    parts = [
        attention.partials(q[-rows:], k[a : a + 1024], v[a : a + 1024], q_start=tokens - rows, kv_start=a, scale=SCALE, impl="triton")
        for a in (0, 1024)
    ]
    _assert_rows(attention.merge(parts, impl="triton", out_dtype=BF16), whole, tokens - rows, tokens)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_accuracy(randn: Randn, dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = _qkv(randn, 200, 8, 2, head_dim, dtype)
    actual = attention.causal(q, k, v, [0, 200], scale=SCALE, impl="triton")
    exact = attention.causal(q.double(), k.double(), v.double(), [0, 200], scale=SCALE, impl="reference")
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=SCALE, enable_gqa=True
    )
    assert_within_budget(actual.out_THD, exact.out_THD, plain[0].transpose(0, 1))
    assert (actual.lse_HT - exact.lse_HT).abs().max() < 1e-5


@pytest.mark.parametrize("name", FORMS)
def test_accuracy_of_every_form(randn: Randn, name: str) -> None:
    tokens, dtype = 1500, BF16
    q, k, v = _qkv(randn, tokens, 8, 2)
    form = _form(name, randn, 8)
    actual = attention.causal(q, k, v, [0, tokens], scale=SCALE, impl="triton", **form)
    exact = attention.causal(q.double(), k.double(), v.double(), [0, tokens], scale=SCALE, impl="reference", **form)
    rounded = attention.causal(q, k, v, [0, tokens], scale=SCALE, impl="reference", **form)
    error = (actual.out_THD.double() - exact.out_THD).square().mean().sqrt()
    assert error <= 1.25 * (rounded.out_THD.double() - exact.out_THD).square().mean().sqrt() + 2.0**-9 * exact.out_THD.abs().mean(), dtype
    assert (actual.lse_HT - exact.lse_HT).abs().max() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_backward_is_one_arithmetic(randn: Randn, heads: int, kv_heads: int) -> None:
    tokens = 1100
    q, k, v = _qkv(randn, tokens, heads, kv_heads)
    dout = randn(tokens, heads, 128)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, bounds: list[int]) -> Any:
        out, lse = attention.causal(q, k, v, bounds, scale=SCALE, impl="triton", window=600)
        return attention_backward.causal_backward(q, k, v, out, lse, dout, bounds, scale=SCALE, impl="triton", window=600)

    alone = run(q, k, v, dout, [0, tokens])
    again = run(q, k, v, dout, [0, tokens])
    packed = run(*(torch.cat([x[:77], x, x[:300]]) for x in (q, k, v, dout)), [0, 77, 77 + tokens, 377 + tokens])
    for a, b, c in zip(alone[:3], again[:3], packed[:3], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c[77 : 77 + tokens])


@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_the_hopper_backward_has_the_bits_of_the_portable_one(randn: Randn, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Heads that are a slice of wider rows; three times, since its programs race for their turns."""
    from rlmismatch.kernels.attention_backward import triton

    if not triton.is_hopper():
        pytest.skip("no Hopper GPU")
    for heads, kv_heads in ((32, 8), (4, 1)):
        form = _form(name, randn, heads)
        for bounds in ([0, 64], [0, 511], [0, 1300, 1300, 1301, 2900], [0, 4096]):
            q, k, v = (x[:, :-1] for x in _qkv(randn, bounds[-1], heads + 1, kv_heads + 1))
            dout = randn(bounds[-1], heads, 128)
            out, lse = attention.causal(q, k, v, bounds, scale=SCALE, impl="triton", **form)
            if len(bounds) > 2:  # the last sequence's operands are no one else's business
                for x in (q, k, v, dout):
                    x[bounds[-2] :] = torch.nan

            def run(q=q, k=k, v=v, out=out, lse=lse, dout=dout, bounds=bounds, form=form) -> Any:  # type: ignore[no-untyped-def]
                return attention_backward.causal_backward(q, k, v, out, lse, dout, bounds, scale=SCALE, impl="triton", **form)

            hopper = [run() for _ in range(3)]
            with monkeypatch.context() as patch:
                patch.setattr(triton, "is_hopper", lambda: False)
                portable = run()
            end = bounds[-1] if len(bounds) == 2 else bounds[-2]
            for a, *others in zip(portable[:3], *(h[:3] for h in hopper), strict=True):
                assert all(torch.equal(a[:end], b[:end]) for b in others), (heads, bounds)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_backward_accuracy(randn: Randn, dtype: torch.dtype, head_dim: int) -> None:
    tokens = 300
    q, k, v = _qkv(randn, tokens, 8, 2, head_dim, dtype)
    dout = randn(tokens, 8, head_dim, dtype=dtype)
    out, lse = attention.causal(q, k, v, [0, tokens], scale=SCALE, impl="triton")
    actual = attention_backward.causal_backward(q, k, v, out, lse, dout, [0, tokens], scale=SCALE, impl="triton")

    def torchs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().to(dtype).transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE, enable_gqa=True)
        return torch.autograd.grad(y, leaves, dout.to(dtype).transpose(0, 1)[None])

    for ours, exact, plain in zip(actual[:3], torchs(torch.float64), torchs(dtype), strict=True):
        assert_within_budget(ours, exact[0].transpose(0, 1), plain[0].transpose(0, 1))
