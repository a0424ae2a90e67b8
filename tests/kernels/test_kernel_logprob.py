"""Log-probabilities. The chain: a tile is the same in any shard -> merge of any sharding = selected = log_softmax at the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from rlmismatch.errors import ContractError
from rlmismatch.kernels import logprob
from rlmismatch.kernels.common.triton import widen
from rlmismatch.kernels.logprob import Impl, VocabPartials
from tests.kernels.budget import assert_within_budget
from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]
VOCAB = 1100  # 17 tiles and 12 columns


def _targets(rows: int) -> torch.Tensor:
    edges = torch.tensor([0, 63, 64, 575, 576, 639, 640, 1023, 1024, 1099])
    return edges.repeat(-(-rows // 10))[:rows].to(DEVICE)


def _sharded(logits: torch.Tensor, targets: torch.Tensor, width: int, impl: Impl, temperature: float = 1.0) -> list[VocabPartials]:
    return [
        logprob.partials(logits[:, start : start + width], targets, vocab_start=start, vocab_size=VOCAB, impl=impl, temperature=temperature)
        for start in range(0, logits.shape[1], width)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selected_accuracy(randn: Randn, impl: Impl, dtype: torch.dtype, temperature: float) -> None:
    logits, targets = randn(40, 1152, dtype=dtype, scale=4.0), _targets(40)
    real = logits[:, :VOCAB]
    exact = (real.double() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    plain = (real.float() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    actual = logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl, temperature=temperature)
    assert actual.dtype == torch.float32
    assert_within_budget(actual, exact, plain)


def test_sure_tokens_keep_their_digits(randn: Randn, impl: Impl) -> None:
    """At logits of 60 a subtraction of M + L as one number would lose all of a log-prob of -1e-6."""
    logits = randn(30, VOCAB)
    targets = torch.arange(30, device=DEVICE)
    logits[targets, targets] = torch.linspace(14.0, 60.0, 30, device=DEVICE)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    actual = logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl)
    assert (actual <= 0).all()
    # Four ulp of the sum of exponentials, which is 1 and a little; an ulp of M + L would be up to 32 times as much.
    assert (actual.double() - exact).abs().max() <= 4 * 2.0**-23


@pytest.mark.parametrize(("padded", "width"), [(1280, 640), (1152, 576), (1280, 320), (1152, 1152), (1280, 128), (1100, 64)])
def test_shard_boundaries_do_not_enter(randn: Randn, impl: Impl, dtype: torch.dtype, padded: int, width: int) -> None:
    logits, targets = randn(21, padded, dtype=dtype, scale=3.0), _targets(21)
    logits[:, VOCAB:] = torch.nan  # padding rows of the head are never read
    whole = logprob.selected(logits[:, :VOCAB].contiguous(), targets, vocab_size=VOCAB, impl=impl)
    assert whole.isfinite().all()
    assert torch.equal(logprob.merge(_sharded(logits, targets, width, impl), vocab_size=VOCAB, impl=impl), whole)


def test_partials_are_slices_of_the_whole(randn: Randn, impl: Impl) -> None:
    logits, targets = randn(5, 1280), _targets(5)
    (whole,), parts = _sharded(logits, targets, 1280, impl), _sharded(logits, targets, 640, impl)
    assert [p.first_tile for p in parts] == [0, 10]
    assert [p.max_TJ.shape[1] for p in parts] == [10, 8]
    assert torch.equal(torch.cat([p.max_TJ for p in parts], dim=1), whole.max_TJ)
    assert torch.equal(torch.cat([p.sumexp_TJ for p in parts], dim=1), whole.sumexp_TJ)
    assert torch.equal(parts[0].owns_T, targets < 640)
    assert parts[0].target_T[targets >= 640].isnan().all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("columns", [VOCAB, 4096, 9000])
def test_one_launch_has_the_bits_of_tiles_and_fold(randn: Randn, dtype: torch.dtype, columns: int, temperature: float) -> None:
    from rlmismatch.kernels.logprob import triton as kernels

    logits, targets = widen(randn(6, columns + 5, dtype=dtype, scale=3.0)), torch.tensor([0, 63, 64, columns - 1, columns, -1]).to(DEVICE)
    logits[:, columns:] = torch.nan
    fused = torch.full((6,), 7.0, device=DEVICE)
    kernels.fused_rows(logits, targets, fused, columns=columns, temperature=temperature)
    max_T, logsum_T = kernels.normaliser(*kernels.tiles(logits, columns=columns, temperature=temperature))
    target_T = kernels.gather(logits, targets.clamp(0, columns - 1), targets >= 0, temperature=temperature)
    assert torch.equal(fused[:4], kernels.selected(target_T, max_T, logsum_T)[:4])
    assert fused[4:].isnan().all()  # no target there


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_softmax_at_the_target_is_selected(randn: Randn, impl: Impl, dtype: torch.dtype, temperature: float) -> None:
    logits, targets = randn(20, 1152, dtype=dtype, scale=3.0), _targets(20)
    every = logprob.log_softmax(logits, vocab_size=VOCAB, impl=impl, temperature=temperature)
    chosen = logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl, temperature=temperature)
    assert every.shape == (20, VOCAB)
    assert every.dtype == torch.float32
    assert torch.equal(every.gather(1, targets[:, None])[:, 0], chosen)
    sharded = logprob.merge(_sharded(logits, targets, 576, impl, temperature), vocab_size=VOCAB, impl=impl)
    assert torch.equal(sharded, chosen)


def test_log_softmax_accuracy(randn: Randn, impl: Impl) -> None:
    from rlmismatch.kernels.logprob import reference

    logits = randn(6, 300, scale=5.0)
    exact = logits.double().log_softmax(-1)
    assert_within_budget(logprob.log_softmax(logits, vocab_size=300, impl=impl), exact, logits.log_softmax(-1))
    torch.testing.assert_close(reference.log_softmax_fp64(logits, vocab_size=300), exact, rtol=1e-13, atol=1e-13)


def test_a_row_alone_has_the_bits_it_has_in_a_batch(randn: Randn, impl: Impl, dtype: torch.dtype) -> None:
    logits, targets = randn(37, VOCAB, dtype=dtype), _targets(37)
    together = logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl)
    every = logprob.log_softmax(logits, vocab_size=VOCAB, impl=impl)
    for rows in (slice(0, 1), slice(36, 37), slice(5, 22)):
        assert torch.equal(logprob.selected(logits[rows], targets[rows], vocab_size=VOCAB, impl=impl), together[rows])
        assert torch.equal(logprob.log_softmax(logits[rows], vocab_size=VOCAB, impl=impl), every[rows])


def test_large_references_are_cut_without_a_seam(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = randn(11, VOCAB), _targets(11)
    whole = logprob.selected(logits, targets, vocab_size=VOCAB, impl="reference")
    monkeypatch.setattr("rlmismatch.kernels.logprob.reference._BLOCK_ELEMENTS", 3 * VOCAB)
    assert torch.equal(logprob.selected(logits, targets, vocab_size=VOCAB, impl="reference"), whole)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 70000])
def test_small_and_large_vocabularies(randn: Randn, impl: Impl, vocab: int) -> None:
    """70000 columns are more tiles than the fold has lanes."""
    logits = randn(2, vocab)
    targets = torch.tensor([0, vocab - 1], device=DEVICE)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    actual = logprob.selected(logits, targets, vocab_size=vocab, impl=impl)
    torch.testing.assert_close(actual.double(), exact, rtol=4e-7, atol=1e-7)


def test_masked_logits_hold_no_probability(randn: Randn, impl: Impl) -> None:
    logits, targets = randn(4, VOCAB), torch.full((4,), 700, device=DEVICE)
    logits[:, :640] = -torch.inf  # whole tiles and
    logits[:, 1090:] = -torch.inf  # a part of one
    exact = logits.double().log_softmax(-1)[:, 700]
    torch.testing.assert_close(logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl).double(), exact, rtol=4e-7, atol=0.0)
    assert torch.equal(logprob.log_softmax(logits, vocab_size=VOCAB, impl=impl)[:, 0], torch.full((4,), -torch.inf, device=DEVICE))


def test_nan_stays_nan_in_its_row(randn: Randn, impl: Impl) -> None:
    logits, targets = randn(3, VOCAB), _targets(3)
    logits[1, 900] = torch.nan
    assert logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl).isnan().tolist() == [False, True, False]
    merged = logprob.merge(_sharded(logits, targets, 640, impl), vocab_size=VOCAB, impl=impl)
    assert merged.isnan().tolist() == [False, True, False]


def test_strided_logits(randn: Randn, impl: Impl) -> None:
    logits, targets = randn(9, 2 * VOCAB, dtype=torch.bfloat16), _targets(9)
    view = logits[:, ::2]
    assert torch.equal(
        logprob.selected(view, targets, vocab_size=VOCAB, impl=impl),
        logprob.selected(view.contiguous(), targets, vocab_size=VOCAB, impl=impl),
    )


def test_no_rows(impl: Impl) -> None:
    logits, targets = torch.zeros(0, VOCAB, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl).shape == (0,)
    assert logprob.log_softmax(logits, vocab_size=VOCAB, impl=impl).shape == (0, VOCAB)


@pytest.mark.parametrize("target", [-1, -100, VOCAB, 1279])
def test_a_target_outside_the_vocabulary_is_an_error(randn: Randn, impl: Impl, target: int) -> None:
    logits, targets = randn(3, 1280), torch.tensor([5, target, 7], device=DEVICE)
    with pytest.raises(ContractError, match=f"target {target} of row 1") as error:
        logprob.selected(logits, targets, vocab_size=VOCAB, impl=impl)
    assert error.value.slug == "target-outside-vocabulary"
    for start in (0, 640):  # every rank alike, or the others would wait
        with pytest.raises(ContractError, match=f"target {target} of row 1"):
            logprob.partials(logits[:, start : start + 640], targets, vocab_start=start, vocab_size=VOCAB, impl=impl)


@pytest.mark.parametrize(("start", "width"), [(32, 640), (32, 1068), (0, 600), (64, 100)])
def test_a_shard_that_cuts_a_tile_is_refused(randn: Randn, impl: Impl, start: int, width: int) -> None:
    with pytest.raises(ValueError, match="multiples of 64"):
        logprob.partials(randn(2, width), _targets(2), vocab_start=start, vocab_size=VOCAB, impl=impl)


def test_shards_must_tile_the_vocabulary(randn: Randn, impl: Impl) -> None:
    parts = _sharded(randn(3, 1280), _targets(3), 320, impl)
    for wrong in (
        [parts[0], *parts[2:]],
        [parts[0], parts[1], parts[1], *parts[2:]],
        parts[:2],
        parts[1:],
        [parts[1], parts[0], *parts[2:]],
    ):
        with pytest.raises(ContractError) as error:
            logprob.merge(wrong, vocab_size=VOCAB, impl=impl)
        assert error.value.slug == "vocabulary-shards-do-not-tile"


@pytest.mark.parametrize("owners", [0, 2])
def test_a_target_has_one_owner(randn: Randn, impl: Impl, owners: int) -> None:
    parts = _sharded(randn(3, 1280), _targets(3), 640, impl)
    owns = torch.full((3,), owners == 2, device=DEVICE)
    with pytest.raises(ContractError, match=f"{owners} owners") as error:
        logprob.merge([dataclasses.replace(p, owns_T=owns) for p in parts], vocab_size=VOCAB, impl=impl)
    assert error.value.slug == "target-owner-count"


def test_operands_that_do_not_fit_are_refused(randn: Randn, impl: Impl) -> None:
    logits = randn(3, VOCAB)
    with pytest.raises(ValueError, match="do not hold a vocabulary"):
        logprob.selected(logits, _targets(3), vocab_size=VOCAB + 1, impl=impl)
    with pytest.raises(ValueError, match="targets must be 3"):
        logprob.selected(logits, _targets(4), vocab_size=VOCAB, impl=impl)
    with pytest.raises(ValueError, match="targets must be 3"):
        logprob.selected(logits, _targets(3).float(), vocab_size=VOCAB, impl=impl)
    with pytest.raises(ValueError, match="temperature"):
        logprob.selected(logits, _targets(3), vocab_size=VOCAB, impl=impl, temperature=0.0)
