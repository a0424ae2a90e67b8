"""The GEMM on real shapes (Qwen3-0.6B and Qwen3-8B): the same bits whatever the rows, tile, way of loading or shards, and accuracy.

The chain: every tile equals the simplest kernel (tile tests) -> a row's bits are its own at every M (row tests) -> a rank's share is a
subtree (TP tests). The first link is a fact about a card, not a theorem; these tests are the proof for the card they run on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmismatch.kernels import gemm, reduce
from rlmismatch.kernels.gemm.tiles import DESCRIPTOR_TILES, RINGS, RINGS_OF_ONE, Ring, Tile
from tests.kernels.budget import assert_within_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),  # Triton 3.9; every launch states its own
]

Randn = Callable[..., torch.Tensor]
BF16 = torch.bfloat16
ROWS = (1, 2, 16, 17, 32, 33, 63, 64, 65, 128, 256, 257, 513, 1024)
# (K, N): qkv, gate_up and o, down of the two models, and the head
COLUMN_SHAPES = [(1024, 4096), (1024, 6144), (4096, 6144), (4096, 24576), (4096, 151936)]
ROW_SHAPES = [(2048, 1024), (3072, 1024), (4096, 4096), (12288, 4096)]


@pytest.fixture
def randn() -> Randn:
    generator = torch.Generator("cuda").manual_seed(20251129)

    def make(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    return make


def _simplest(x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **how: Any) -> torch.Tensor:
    """The product through pointers, one small tile, every chunk apart."""
    from rlmismatch.kernels.gemm import triton as kernel

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_has_tma", lambda: False)
        patch.setattr(kernel, "pointer_tile", lambda *_: Tile(m=32, n=32, k=32, warps=4, stages=1))
        return kernel._product(x, weight, how.get("bias"), chunks=how.get("chunks", 1), out_dtype=how.get("out_dtype", x.dtype))


def test_this_card_loads_through_descriptors() -> None:
    """Or the tile tests would compare the pointer kernel with itself."""
    from rlmismatch.kernels.gemm import triton as kernel

    assert kernel._has_tma()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tile", DESCRIPTOR_TILES, ids=str)
def test_every_tile_has_the_bits_of_the_simplest_kernel(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, tile: Tile, dtype: torch.dtype
) -> None:
    from rlmismatch.kernels.gemm import triton as kernel

    launched = []
    by_descriptor = kernel._by_descriptor
    monkeypatch.setattr(kernel, "descriptor_tile", lambda *_: tile)
    monkeypatch.setattr(kernel, "ring", lambda *_: None)
    monkeypatch.setattr(kernel, "_by_descriptor", lambda *a, **k: launched.append(k["tile"]) or by_descriptor(*a, **k))
    for rows, columns in ((1, 520), (17, 1048), (33, 136), (49, 520), (300, 1048), (1000, 136)):  # rows that end within a block, too
        x, weight, bias = randn(rows, 4096, dtype=dtype), randn(columns, 4096, dtype=dtype), randn(columns, dtype=dtype)
        if tile.count == 1:
            assert torch.equal(gemm.linear(x, weight, bias, impl="triton"), _simplest(x, weight, monkeypatch, bias=bias))
            wide = gemm.linear(x, weight, impl="triton", out_dtype=torch.float32)
            assert torch.equal(wide, _simplest(x, weight, monkeypatch, out_dtype=torch.float32))
        if tile.extra == 0:
            for chunks in (2, 4, 8):
                part = kernel.row_partial(x, weight, chunks=chunks)
                assert torch.equal(part, _simplest(x, weight, monkeypatch, chunks=chunks, out_dtype=torch.float32)), chunks
    assert launched
    assert set(launched) == {tile}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_every_ring_has_the_bits_of_the_simplest_kernel(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, ring: Ring, dtype: torch.dtype
) -> None:
    """Tiles that the edge cuts, more tiles than programs, chunks of one step and of many, a weight of either direction, rounded and not."""
    from rlmismatch.kernels.gemm import triton_hopper

    # Few widths of a chunk: the simplest kernel is compiled for each.
    cases = [(65, 520, 4096, (2, 4, 8)), (1000, 136, 4096, (8,)), (3000, 2048, 2048, (4,)), (300, 1048, 512, (8,)), (300, 1048, 2560, (8,))]
    for rows, columns, width, counts in cases:
        x, weight = randn(rows, width, dtype=dtype), randn(columns, width, dtype=dtype)
        for chunks in counts:
            expected = _simplest(x, weight, monkeypatch, chunks=chunks, out_dtype=torch.float32)
            for w in (weight, weight.T.contiguous().T):
                joined = triton_hopper.joined(x, w, ring=ring, chunks=chunks, out_dtype=torch.float32)
                assert torch.equal(joined, expected), (rows, columns, width, chunks)
            rounded = triton_hopper.joined(x, weight, ring=ring, chunks=chunks, out_dtype=dtype)
            assert torch.equal(rounded, expected.to(dtype)), (rows, columns, width, chunks)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("ring", RINGS_OF_ONE, ids=str)
def test_every_ring_of_one_sum_has_the_bits_of_the_simplest_kernel(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, ring: Ring, dtype: torch.dtype
) -> None:
    """Blocks that the edges cut, rows that two blocks share, more tiles than programs, K that no block divides, either direction."""
    from rlmismatch.kernels.gemm import triton_hopper

    for rows, columns, width in ((65, 520, 4096), (64, 136, 1032), (1000, 136, 4096), (3000, 2048, 2048), (300, 1048, 2560), (127, 8, 96)):
        x, weight = randn(rows, width, dtype=dtype), randn(columns, width, dtype=dtype)
        expected = _simplest(x, weight, monkeypatch)
        padded = torch.full((rows, width + 8), float("nan"), dtype=dtype, device="cuda")[:, :width].copy_(x)  # rows that lie apart
        for left, w in ((x, weight), (x, weight.T.contiguous().T), (padded, weight)):
            out = triton_hopper.one_sum(left, w, ring=ring)
            assert torch.equal(out, expected), (rows, columns, width)


def test_many_rows_without_a_bias_take_the_ring(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmismatch.kernels.gemm import triton as kernel

    x, weight = randn(256, 4096), randn(520, 4096)
    biased = gemm.linear(x, weight, torch.zeros(520, dtype=BF16, device="cuda"), impl="triton")
    for way in ("_by_descriptor", "_by_pointer"):
        monkeypatch.setattr(kernel, way, lambda *a, **k: pytest.fail("not through the ring"))
    assert torch.equal(gemm.linear(x, weight, impl="triton"), biased)
    gemm.grad_input(x, randn(4096, 520), impl="triton")


def test_a_row_parallel_sum_of_many_rows_takes_the_ring(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmismatch.kernels.gemm import triton as kernel

    for way in ("_by_descriptor", "_by_pointer"):
        monkeypatch.setattr(kernel, way, lambda *a, **k: pytest.fail("not through the ring"))
    x, weight = randn(256, 4096), randn(520, 4096)
    gemm.row_linear(x, weight, impl="triton")
    gemm.row_partial(x, weight, k_total=8192, impl="triton")
    gemm.grad_input_partial(x, randn(4096, 520), n_total=4096, impl="triton")


def test_every_pointer_tile_of_float32_has_the_bits_of_the_simplest(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (1, 16, 17, 300):
        x, weight = randn(rows, 1032, dtype=torch.float32), randn(520, 1032, dtype=torch.float32)
        assert torch.equal(gemm.linear(x, weight, impl="triton"), _simplest(x, weight, monkeypatch))
        part = gemm.row_partial(x, weight, k_total=1032, impl="triton")
        assert torch.equal(part, _simplest(x, weight, monkeypatch, chunks=8))


@pytest.mark.parametrize(("width", "columns"), COLUMN_SHAPES)
def test_linear_rows_have_the_same_bits_at_every_m(randn: Randn, width: int, columns: int) -> None:
    x, weight = randn(4096, width), randn(columns, width, scale=0.02)
    whole = gemm.linear(x, weight, impl="triton")
    for rows in ROWS:
        assert torch.equal(gemm.linear(x[-rows:], weight, impl="triton"), whole[-rows:]), f"M={rows}"
    assert torch.equal(gemm.linear(x, weight, impl="triton"), whole)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_row_alone_and_in_batches(randn: Randn, dtype: torch.dtype) -> None:
    x, weight = randn(4096, 2048, dtype=dtype), randn(3072, 2048, dtype=dtype, scale=0.02)
    alone = gemm.linear(x[:1], weight, impl="triton")
    shared = gemm.row_partial(x[:1], weight, k_total=2048, impl="triton")
    for rows in (2, 17, 128, 257, 4096):
        assert torch.equal(gemm.linear(x[:rows], weight, impl="triton")[:1], alone), rows
        assert torch.equal(gemm.row_partial(x[:rows], weight, k_total=2048, impl="triton")[:1], shared), rows


def test_any_strides_and_any_width(randn: Randn) -> None:
    """What no descriptor can load has the bits of what one can."""
    x, weight = randn(200, 1040), randn(264, 1040)
    expected = gemm.linear(x, weight, impl="triton")
    assert torch.equal(gemm.linear(x.T.contiguous().T, weight.T.contiguous().T, impl="triton"), expected)
    off_by_one = torch.empty(200 * 1040 + 1, dtype=BF16, device="cuda")[1:].view(200, 1040).copy_(x)
    assert torch.equal(gemm.linear(off_by_one, weight, impl="triton"), expected)
    assert torch.equal(gemm.linear(x, weight[:261], impl="triton"), expected[:, :261])
    padded = torch.zeros(200, 1043, dtype=BF16, device="cuda")
    padded[:, :1040] = x
    assert torch.equal(gemm.linear(padded, torch.nn.functional.pad(weight, (0, 3)), impl="triton"), expected)


@pytest.mark.parametrize(("width", "columns"), COLUMN_SHAPES[:4])
def test_linear_is_no_less_accurate_than_cublas(randn: Randn, width: int, columns: int) -> None:
    x, weight = randn(300, width), randn(columns, width, scale=0.02)
    exact = x.double() @ weight.double().T
    plain = torch.nn.functional.linear(x, weight)
    assert_within_budget(gemm.linear(x, weight, impl="triton"), exact, plain)
    assert_within_budget(gemm.row_linear(x, weight, impl="triton"), exact, plain)
    in_float32 = gemm.linear(x, weight, impl="triton", out_dtype=torch.float32)
    assert_within_budget(in_float32.bfloat16(), exact, plain)


def test_float32_linear_is_not_tf32(randn: Randn) -> None:
    x, weight = randn(64, 1024, dtype=torch.float32), randn(256, 1024, dtype=torch.float32)
    exact = x.double() @ weight.double().T
    plain = torch.nn.functional.linear(x, weight)  # IEEE float32: torch's default
    errors = [(y.double() - exact).abs().max() for y in (gemm.linear(x, weight, impl="triton"), plain)]
    # One accumulator over all of K rounds more often than cuBLAS's blocks do; TF32 would be off by about 1000 times as much.
    assert errors[0] < 8 * errors[1]


@pytest.mark.parametrize("rows", [1, 64, 200, 700])
@pytest.mark.parametrize(("width", "columns"), ROW_SHAPES)
def test_row_parallel_bits_do_not_depend_on_tp(randn: Randn, width: int, columns: int, rows: int) -> None:
    x, weight = randn(rows, width), randn(columns, width, scale=0.02)

    def at(tp: int) -> torch.Tensor:
        shards = zip(x.chunk(tp, -1), weight.chunk(tp, -1), strict=True)
        partials = [gemm.row_partial(a, w, k_total=width, impl="triton") for a, w in shards]
        return reduce.fold(partials, impl="triton", out_dtype=torch.float32)

    whole = at(1)
    for tp in (2, 4, 8):
        assert torch.equal(at(tp), whole), f"TP{tp}"
    assert torch.equal(gemm.row_linear(x, weight, impl="triton"), whole.bfloat16())
    assert_within_budget(whole.bfloat16(), x.double() @ weight.double().T, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 64, 257, 2048])
def test_grad_input(randn: Randn, rows: int) -> None:
    dy, weight = randn(rows, 6144), randn(6144, 4096, scale=0.02)
    whole = gemm.grad_input(dy, weight, impl="triton")
    assert torch.equal(whole, gemm.linear(dy, weight.T.contiguous(), impl="triton"))
    assert torch.equal(torch.cat([gemm.grad_input(dy, w, impl="triton") for w in weight.chunk(2, dim=1)], dim=1), whole)
    assert torch.equal(gemm.grad_input(dy[:1], weight, impl="triton"), whole[:1])
    assert_within_budget(whole, dy.double() @ weight.double(), dy @ weight)
    sums = []
    for tp in (1, 2, 4, 8):
        shards = zip(dy.chunk(tp, -1), weight.chunk(tp, 0), strict=True)
        shares = [gemm.grad_input_partial(a, w, n_total=6144, impl="triton") for a, w in shards]
        sums.append(reduce.fold(shares, impl="triton", out_dtype=BF16))
        assert torch.equal(sums[-1], sums[0]), f"TP{tp}"


@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_grad_weight(randn: Randn, tokens: int) -> None:
    dy, x = randn(tokens, 3072), randn(tokens, 2048)
    whole = gemm.grad_weight(dy, x, impl="triton")
    assert whole.dtype == torch.float32
    assert torch.equal(torch.cat([gemm.grad_weight(d.contiguous(), x, impl="triton") for d in dy.chunk(8, 1)]), whole)
    assert torch.equal(torch.cat([gemm.grad_weight(dy, c.contiguous(), impl="triton") for c in x.chunk(4, 1)], dim=1), whole)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 60)) for t in (dy, x)]
    assert torch.equal(gemm.grad_weight(*padded, impl="triton"), whole)
    assert_within_budget(whole.bfloat16(), dy.double().T @ x.double(), dy.T @ x)
