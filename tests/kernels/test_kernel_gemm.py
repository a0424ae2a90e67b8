"""Linear layers. The chain: a row's bits are its own (row test) -> a rank's partial is a subtree (TP test) -> TP1 = TP2 = TP4 = TP8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlmismatch.errors import UsageError
from rlmismatch.kernels import gemm, reduce
from rlmismatch.kernels.gemm import Impl, tiles
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize(("rows", "width", "columns"), [(5, 64, 24), (70, 200, 131)])
def test_linear_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, rows: int, width: int, columns: int) -> None:
    x, weight, bias = randn(rows, width, dtype=dtype), randn(columns, width, dtype=dtype, scale=0.1), randn(columns, dtype=dtype)
    exact = torch.einsum("mk,nk->mn", x.double(), weight.double()) + bias.double()
    actual = gemm.linear(x, weight, bias, impl=impl)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_within_budget(actual, exact, torch.nn.functional.linear(x, weight, bias))


def test_linear_in_float32_from_bfloat16_operands(randn: Randn, impl: Impl) -> None:
    x, weight = randn(4, 96, dtype=torch.bfloat16), randn(8, 96, dtype=torch.bfloat16)
    exact = torch.einsum("mk,nk->mn", x.double(), weight.double())
    actual = gemm.linear(x, weight, impl=impl, out_dtype=torch.float32)
    assert actual.dtype == torch.float32
    assert_within_budget(actual, exact, x.float() @ weight.float().T)


def test_reference_in_float64_is_unrounded(randn: Randn) -> None:
    x, weight = randn(3, 40, dtype=torch.bfloat16), randn(5, 40, dtype=torch.bfloat16)
    exact = torch.einsum("mk,nk->mn", x.double(), weight.double())
    torch.testing.assert_close(gemm.linear(x, weight, impl="reference", out_dtype=torch.float64), exact, rtol=1e-14, atol=1e-14)


def test_bias_is_added_before_the_one_rounding(impl: Impl) -> None:
    # 1 + 2^-8 is a tie that rounds to 1; with the bias in the accumulator it lies above the tie.
    x = torch.tensor([[1.0, 2.0**-8] + [0.0] * 14], dtype=torch.bfloat16, device=DEVICE)
    bias = torch.tensor([2.0**-10], dtype=torch.bfloat16, device=DEVICE)
    assert gemm.linear(x, torch.ones_like(x), bias, impl=impl).item() == 1 + 2.0**-7


def test_a_row_alone_has_the_bits_it_has_in_a_batch(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    x, weight = randn(131, 200, dtype=dtype), randn(37, 200, dtype=dtype)
    together = gemm.linear(x, weight, impl=impl)
    partial = gemm.row_partial(x, weight, k_total=200, impl=impl)
    for rows in (slice(0, 1), slice(63, 64), slice(130, 131), slice(3, 20), slice(60, 131)):
        assert torch.equal(gemm.linear(x[rows], weight, impl=impl), together[rows])
        # Reference partials carry float64 noise; what counts is what is left after the one rounding.
        alone = gemm.row_partial(x[rows], weight, k_total=200, impl=impl)
        assert torch.equal(alone.float(), partial[rows].float())


def test_a_column_shard_has_the_bits_of_the_whole(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    x, weight = randn(9, 100, dtype=dtype), randn(140, 100, dtype=dtype)
    shards = [gemm.linear(x, w, impl=impl) for w in weight.chunk(2)]
    assert torch.equal(torch.cat(shards, dim=-1), gemm.linear(x, weight, impl=impl))


@pytest.mark.parametrize("k_total", [8, 72, 512, 576])
def test_row_parallel_bits_do_not_depend_on_tp(randn: Randn, impl: Impl, dtype: torch.dtype, k_total: int) -> None:
    x, weight = randn(3, k_total, dtype=dtype), randn(5, k_total, dtype=dtype)
    sums = {tp: _row_parallel(x, weight, tp, impl, torch.float32) for tp in (1, 2, 4, 8)}
    for tp in (2, 4, 8):
        assert torch.equal(sums[tp], sums[1]), f"TP{tp}"


def test_row_parallel_order_is_the_tree_over_eight_chunks(randn: Randn) -> None:
    # One column a chunk: every product is exact, so what remains is the order of seven float32 additions.
    x, weight = randn(40, 8, scale=100.0), torch.ones(1, 8, device=DEVICE)
    c = x.unbind(-1)
    tree = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]))
    ascending = ((((((c[0] + c[1]) + c[2]) + c[3]) + c[4]) + c[5]) + c[6]) + c[7]
    assert not torch.equal(tree, ascending)  # or this test could not fail
    assert torch.equal(gemm.row_partial(x, weight, k_total=8, impl="triton")[:, 0], tree)


def test_summing_plain_halves_would_depend_on_tp(randn: Randn) -> None:
    x, weight = randn(3, 512), randn(5, 512)
    halves = [gemm.linear(a, w, impl="triton") for a, w in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)]
    assert not torch.equal(halves[0] + halves[1], gemm.linear(x, weight, impl="triton"))


def test_row_partial_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    x, weight = randn(6, 144, dtype=dtype), randn(11, 144, dtype=dtype)
    exact = torch.einsum("mk,nk->mn", x.double(), weight.double())
    assert_within_budget(_row_parallel(x, weight, 2, impl, dtype), exact, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(("k_total", "chunks"), [(64, 8), (36, 4), (34, 2), (35, 1)])
def test_fewer_chunks_where_eight_do_not_divide_k(randn: Randn, impl: Impl, k_total: int, chunks: int) -> None:
    assert gemm.chunk_count(k_total) == chunks
    x, weight = randn(2, k_total), randn(3, k_total)
    whole = _row_parallel(x, weight, 1, impl, torch.float32)
    for tp in (2, 4, 8):
        if chunks % tp == 0:
            assert torch.equal(_row_parallel(x, weight, tp, impl, torch.float32), whole)
        elif k_total % tp == 0:
            with pytest.raises(UsageError, match=f"K {k_total} has {chunks} chunks"):
                _row_parallel(x, weight, tp, impl, torch.float32)


@pytest.mark.parametrize("k_local", [0, 7, 24, 48, 128])
def test_a_shard_that_is_no_subtree_is_refused(impl: Impl, k_local: int) -> None:
    with pytest.raises(UsageError) as error:
        gemm.row_partial(torch.zeros(1, k_local, device=DEVICE), torch.zeros(2, k_local, device=DEVICE), k_total=64, impl=impl)
    assert error.value.slug == "row-parallel-shard-is-no-subtree"


def test_row_linear_is_the_fold_of_any_number_of_ranks(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    x, weight = randn(2, 3, 144, dtype=dtype), randn(11, 144, dtype=dtype)
    whole = gemm.row_linear(x, weight, impl=impl)
    assert whole.dtype == dtype
    for tp in (1, 2, 8):
        assert torch.equal(_row_parallel(x, weight, tp, impl, dtype), whole), f"TP{tp}"


def test_grad_input_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    dy, weight = randn(2, 4, 40, dtype=dtype), randn(40, 72, dtype=dtype)
    actual = gemm.grad_input(dy, weight, impl=impl)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_within_budget(actual, dy.double() @ weight.double(), dy @ weight)


def test_grad_input_bits_do_not_depend_on_rows_or_shards_of_k(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    dy, weight = randn(20, 40, dtype=dtype), randn(40, 72, dtype=dtype)
    whole = gemm.grad_input(dy, weight, impl=impl)
    assert torch.equal(gemm.grad_input(dy[7:8], weight, impl=impl), whole[7:8])
    assert torch.equal(torch.cat([gemm.grad_input(dy, w, impl=impl) for w in weight.chunk(2, dim=1)], dim=1), whole)


def test_grad_input_of_a_column_parallel_layer_does_not_depend_on_tp(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    dy, weight = randn(6, 48, dtype=dtype), randn(48, 10, dtype=dtype)

    def at(tp: int) -> torch.Tensor:
        shards = zip(dy.chunk(tp, -1), weight.chunk(tp, 0), strict=True)
        return reduce.fold([gemm.grad_input_partial(a, w, n_total=48, impl=impl) for a, w in shards], impl=impl, out_dtype=torch.float32)

    whole = at(1)
    for tp in (2, 4, 8):
        assert torch.equal(at(tp), whole), f"TP{tp}"
    assert_within_budget(whole.to(dtype), dy.double() @ weight.double(), dy @ weight)


def test_grad_weight_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    dy, x = randn(3, 50, 24, dtype=dtype), randn(3, 50, 40, dtype=dtype)
    actual = gemm.grad_weight(dy, x, impl=impl)
    assert actual.dtype == torch.float32
    exact = torch.einsum("btn,btk->nk", dy.double(), x.double())
    assert_within_budget(actual, exact, dy.flatten(0, 1).float().T @ x.flatten(0, 1).float())


def test_grad_weight_bits_do_not_depend_on_shards_or_padding(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    dy, x = randn(150, 24, dtype=dtype), randn(150, 40, dtype=dtype)
    whole = gemm.grad_weight(dy, x, impl=impl)
    assert torch.equal(torch.cat([gemm.grad_weight(d, x, impl=impl) for d in dy.chunk(4, 1)]), whole)
    assert torch.equal(torch.cat([gemm.grad_weight(dy, c, impl=impl) for c in x.chunk(4, 1)], dim=1), whole)
    padded_dy, padded_x = torch.nn.functional.pad(dy, (0, 0, 0, 30)), torch.cat([x, x[:30]])
    assert torch.equal(gemm.grad_weight(padded_dy, padded_x, impl=impl), whole)


def test_grad_weight_of_no_tokens_is_zero(impl: Impl) -> None:
    dw = gemm.grad_weight(torch.zeros(0, 4, device=DEVICE), torch.zeros(0, 6, device=DEVICE), impl=impl)
    assert torch.equal(dw, torch.zeros(4, 6, device=DEVICE))


def test_grad_weight_of_other_tokens_is_refused(impl: Impl) -> None:
    dy = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="tokens differ"):
        gemm.grad_weight(dy, torch.zeros(2, 6, device=DEVICE), impl=impl)
    with pytest.raises(ValueError, match=r"dy is torch\.float32"):
        gemm.grad_weight(dy, torch.zeros(3, 6, dtype=torch.bfloat16, device=DEVICE), impl=impl)


def test_every_shape_has_one_tile_that_fits_the_card() -> None:
    for rows in (1, 16, 17, 32, 33, 47, 48, 55, 56, 64, 65, 256, 257, 1024, 100_000):
        for columns in (64, 1024, 4096, 6144, 24576, 151936):
            for chunks in (1, 2, 4, 8):
                tile = tiles.descriptor_tile(rows, columns, chunks)
                assert tile in tiles.DESCRIPTOR_TILES
                assert chunks == 1 or tile.extra == 0
                assert 2 * tile.stages * (tile.m + tile.n + tile.extra) * tile.k < 227 * 1024


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_a_triton_without_this_gluon_has_no_ring(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Then the descriptor kernel computes what the ring would; a test on the GPU holds that they have the same bits."""
    from rlmismatch.kernels.gemm import triton as kernel

    def missing(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(kernel.importlib, "import_module", missing)
    assert kernel._hopper.__wrapped__() is None


def test_many_rows_have_one_ring_that_fits_the_card() -> None:
    for rows in (65, 256, 257, 512, 100_000):
        for columns in (8, 1024, 4096, 6144, 151936):
            ring = tiles.ring(rows, columns, 512, 8)
            assert ring in tiles.RINGS
            assert 2 * ring.stages * (64 * ring.groups + ring.n) * ring.k + 4 * 64 * ring.groups * ring.n < 227 * 1024
            ring = tiles.ring(rows, columns, 4096, 1)
            if rows * columns > 200 * tiles.PROGRAMS * 128 * 128:
                assert ring is None  # the widest descriptor tile is faster
                continue
            assert ring in tiles.RINGS_OF_ONE
            staged = 2 * 64 * ring.groups * (ring.n + ring.extra)  # in half precision
            assert 2 * ring.stages * (64 * ring.groups + ring.n + ring.extra) * ring.k + staged < 227 * 1024
    assert tiles.ring(256, 4096, 512, 8) != tiles.ring(4096, 4096, 512, 8)
    assert tiles.ring(256, 6144, 4096, 1) != tiles.ring(4096, 6144, 4096, 1)
    for chunks in (1, 8):
        assert tiles.ring(64, 4096, 512, chunks) is None
        assert tiles.ring(4096, 4096, 0, chunks) is None
    assert tiles.ring(4096, 4096, 544, 8) is None  # a block would reach into the next chunk
    assert tiles.ring(4096, 4096, 544, 1) is not None  # beyond the edge there are zeros


def test_any_strides_and_leading_dims(randn: Randn, impl: Impl) -> None:
    x, weight = randn(3, 4, 48, dtype=torch.bfloat16), randn(48, 10, dtype=torch.bfloat16).T
    expected = gemm.linear(x.reshape(12, 48), weight.contiguous(), impl=impl)
    assert torch.equal(gemm.linear(x, weight, impl=impl), expected.view(3, 4, 10))
    assert torch.equal(gemm.linear(x.transpose(0, 1), weight, impl=impl), expected.view(3, 4, 10).transpose(0, 1))
    partial = gemm.row_partial(x, weight, k_total=48, impl=impl)
    assert partial.shape == (3, 4, 10)


def test_no_rows(impl: Impl) -> None:
    x, weight = torch.zeros(0, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE)
    assert gemm.linear(x, weight, impl=impl).shape == (0, 4)
    assert gemm.row_partial(x, weight, k_total=16, impl=impl).shape == (0, 4)


def test_nan_stays_in_its_row(randn: Randn, impl: Impl) -> None:
    x, weight = randn(4, 32), randn(6, 32)
    x[2, 5] = torch.nan
    nan_rows = gemm.linear(x, weight, impl=impl).isnan()
    assert nan_rows[2].all()
    assert not nan_rows[[0, 1, 3]].any()


def test_operands_that_do_not_fit_are_refused(impl: Impl) -> None:
    x = torch.zeros(2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit weight"):
        gemm.linear(x, torch.zeros(4, 17, device=DEVICE), impl=impl)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        gemm.linear(x, torch.zeros(4, 16, dtype=torch.bfloat16, device=DEVICE), impl=impl)
    with pytest.raises(ValueError, match="bias"):
        gemm.linear(x, torch.zeros(4, 16, device=DEVICE), torch.zeros(5, device=DEVICE), impl=impl)


def test_triton_does_not_pretend_to_float64() -> None:
    x = torch.zeros(2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        gemm.linear(x, x, impl="triton", out_dtype=torch.float64)


def _row_parallel(x: torch.Tensor, weight: torch.Tensor, tp: int, impl: Impl, out_dtype: torch.dtype) -> torch.Tensor:
    shards = zip(x.chunk(tp, -1), weight.chunk(tp, -1), strict=True)
    partials = [gemm.row_partial(a, w, k_total=x.shape[-1], impl=impl) for a, w in shards]
    return reduce.fold(partials, impl=impl, out_dtype=out_dtype)
