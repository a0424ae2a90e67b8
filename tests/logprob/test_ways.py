"""Every way to join vocabulary shards, on four real gloo ranks, against float64; and the pin, bit for bit, over sizes and shard maps."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from rlmismatch.errors import ContractError
from rlmismatch.kernels import logprob
from rlmismatch.pins import logprob_ways
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.logprob_ways import Accum, Downcast, Gather, Reduce, Tiling, Way
from rlmismatch.pins.megatron_logprob import LossSettings, VocabShard, merged_logprob, native_loss
from rlmismatch.transforms import Chain, Step
from tests.logprob.gloo import on_ranks

ROWS, VOCAB, HIDDEN = 24, 1003, 32
WAYS = [Way(reduce=r, gather=g, accum=a, downcast=d) for r, g, a, d in itertools.product(*map(get_args, (Reduce, Gather, Accum, Downcast)))]
FP32_NATS = 3e-6
BF16_NATS = 3e-2
TEMPERATURE = Chain(steps=(Step(name="temperature", value=0.7),))
TOP = Chain(steps=(Step(name="top_k", value=500),))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * 3
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def exact(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def shard_of(tp: TpGroup, width: int) -> tuple[int, slice]:
    start = tp.rank * width
    return start, slice(start, min(start + width, VOCAB))


def run_ways(tp: TpGroup) -> dict[Any, torch.Tensor]:
    logits, targets = operands()
    start, own = shard_of(tp, 256 * 4 // tp.size)
    return {way: logprob_ways.selected(logits[:, own], targets, start=start, way=way, tp=tp) for way in WAYS}


def run_linear(tp: TpGroup) -> dict[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    _, targets = operands()
    start, own = shard_of(tp, 256 * 4 // tp.size)
    out: dict[Any, torch.Tensor] = {
        (block, chunk): logprob_ways.linear_selected(
            hidden, weight[own], targets, start=start, chain=TEMPERATURE, tiling=Tiling(block_size=block, chunk_size=chunk), tp=tp
        )
        for block, chunk in ((7, 5), (64, 24), (4096, 1))
    }
    return {**out, "exact": exact(hidden.double() @ weight.double().T / 0.7, targets)}


def run_pin(tp: TpGroup, padded: int) -> torch.Tensor:
    logits, targets = operands()
    shard = VocabShard(tp=tp, vocab_size=VOCAB, padded_vocab_size=padded)
    padded_logits = torch.nn.functional.pad(logits, (0, padded - VOCAB), value=50.0)
    own = padded_logits[:, shard.start : shard.start + shard.width]
    return merged_logprob(own, targets, VOCAB, chain=TEMPERATURE, shard=shard, impl="reference")


def run_te(tp: TpGroup) -> dict[Any, torch.Tensor]:
    """What Transformer Engine 2.11's loss computes, padding and cut-off tokens masked: as it is, and as the trainer calls it."""
    logits, targets = operands()
    shard = VocabShard(tp=tp, vocab_size=VOCAB, padded_vocab_size=1536)  # the last rank holds padding alone
    own = torch.nn.functional.pad(logits, (0, 1536 - VOCAB))[:, shard.start : shard.start + shard.width]

    def loss(labels: torch.Tensor, logits_SBV: torch.Tensor) -> torch.Tensor:
        x, local = logits_SBV[:, 0], labels[0] - shard.start
        inside = (local >= 0) & (local < shard.width)
        label = x.gather(1, local.where(inside, 0)[:, None])[:, 0].where(inside, -torch.inf)
        top = x.amax(dim=1)
        tops, sums, found = (torch.stack(tp.gathered(t)) for t in (top, (x - top[:, None]).exp().sum(dim=1), label))
        total = (sums * (tops - tops.amax(dim=0)).exp()).sum(dim=0)
        return -(found.amax(dim=0) - tops.amax(dim=0) - total.log())[None]

    raw = own.clone()
    raw[:, shard.real_width :] = -torch.inf
    chains = {"mask": Chain(), "top_k": TOP}
    out: dict[Any, torch.Tensor] = {"raw": -loss(targets[None], raw[:, None])[0]}
    for name, chain in chains.items():
        settings = LossSettings(padding="mask", chain=chain, fusion="te")
        out[name] = -native_loss(loss, targets[None], own[:, None], settings=settings, shard=shard, impl="reference")[0]
    return out


# (ranks, padded vocabulary): the trainer pads to 128 x TP, the rollout to 64 x TP.
MAPS = ((1, 1024), (2, 1024), (4, 1024), (4, 1536), (2, 1280))


def run_all(tp: TpGroup) -> dict[str, dict[Any, torch.Tensor]]:
    """One start of four processes for every test; the smaller sizes are groups of the first ranks."""
    pair = dist.new_group([0, 1])
    pins = {}
    for size, padded in MAPS:
        if tp.rank < size:
            group = {1: None, 2: pair, 4: tp.group}[size]
            pins[size, padded] = run_pin(TpGroup(group=group, size=size, rank=tp.rank), padded)
    return {"ways": run_ways(tp), "linear": run_linear(tp), "pins": pins, "te": run_te(tp)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[Any, torch.Tensor]]]:
    return on_ranks(4, run_all)


@pytest.fixture(scope="module")
def four(ranks: list[dict[str, dict[Any, torch.Tensor]]]) -> list[dict[Any, torch.Tensor]]:
    return [rank["ways"] for rank in ranks]


def test_every_way_is_equal_on_all_ranks(four: list[dict[Any, torch.Tensor]]) -> None:
    for way in WAYS:
        assert all(torch.equal(rank[way], four[0][way]) for rank in four[1:]), way


@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w.reduce}-{w.gather}-{w.accum}-{w.downcast}")
def test_every_way_against_float64(four: list[dict[Any, torch.Tensor]], way: Way) -> None:
    error = (four[0][way].double() - exact(*operands())).abs().max()
    low = way.accum == "bf16" or way.downcast == "per_partial"
    assert error <= (BF16_NATS if low else FP32_NATS)
    if low:
        assert error > 10 * FP32_NATS  # the knob does something


def test_the_owners_logit_is_copied_or_summed_to_the_same_bits(four: list[dict[Any, torch.Tensor]]) -> None:
    for way in WAYS:
        other = Way(reduce=way.reduce, gather="local_gather", accum=way.accum, downcast=way.downcast)
        assert torch.equal(four[0][way], four[0][other])


def test_a_nan_is_never_scored() -> None:
    logits, targets = operands()
    logits[3, 7] = torch.nan
    alone = TpGroup(group=None, size=1, rank=0)
    for way in WAYS:
        out = logprob_ways.selected(logits, targets, start=0, way=way, tp=alone)
        assert out[3].isnan()
        assert out[:3].isfinite().all()


def test_a_shard_of_padding_alone_adds_nothing_to_a_fused_linear_loss() -> None:
    maxima, sums, logits = logprob_ways._online(torch.ones(2, 4), torch.ones(0, 4), torch.zeros(2, dtype=torch.long), Chain(), 8)
    assert (maxima.tolist(), sums.tolist(), logits.tolist()) == ([-torch.inf] * 2, [0.0] * 2, [0.0] * 2)


def test_transformer_engines_loss_is_a_number_where_a_shard_holds_no_token(ranks: list[dict[str, dict[Any, torch.Tensor]]]) -> None:
    logits, targets = operands()
    kept = exact(TOP.apply(logits), targets)
    cut = kept == -torch.inf
    assert 0 < int(cut.sum()) < ROWS
    for te in (rank["te"] for rank in ranks):
        assert te["raw"].isnan().all()  # or nothing below is shown
        assert (te["mask"].double() - exact(logits, targets)).abs().max() <= FP32_NATS
        assert torch.equal(te["top_k"] == -torch.inf, cut)
        assert (te["top_k"].double() - kept)[~cut].abs().max() <= FP32_NATS


@pytest.mark.parametrize("target", [-100, 10_000])
def test_a_target_that_no_rank_owns_is_an_error_never_a_score(target: int) -> None:
    logits, targets = operands()
    targets[2] = target
    alone = TpGroup(group=None, size=1, rank=0)
    for way in WAYS:
        with pytest.raises(ContractError, match=f"target {target} of row 2 lies in the vocabulary shards of 0 ranks"):
            logprob_ways.selected(logits, targets, start=0, way=way, tp=alone)
    with pytest.raises(ContractError, match="of 0 ranks"):
        logprob_ways.linear_selected(
            torch.zeros(1, 2),
            torch.zeros(3, 2),
            torch.tensor([target]),
            start=0,
            chain=Chain(),
            tiling=Tiling(block_size=1, chunk_size=1),
            tp=alone,
        )


def test_a_fused_linear_loss_is_float64s_for_every_tiling(ranks: list[dict[str, dict[Any, torch.Tensor]]]) -> None:
    for linear in (rank["linear"] for rank in ranks):
        assert len(linear) == 4
        for key in set(linear) - {"exact"}:
            assert (linear[key].double() - linear["exact"]).abs().max() <= 1e-5  # logits up to 30: half an ulp of them is 1e-6
    with pytest.raises(ValueError, match="needs the row"):
        logprob_ways.linear_selected(
            torch.zeros(1, 2),
            torch.zeros(3, 2),
            torch.zeros(1, dtype=torch.long),
            start=0,
            chain=Chain(steps=(Step(name="top_k", value=2),)),
            tiling=Tiling(block_size=1, chunk_size=1),
            tp=TpGroup(group=None, size=1, rank=0),
        )


def test_the_pin_gives_one_set_of_bits_over_sizes_and_both_engines_shard_maps(ranks: list[dict[str, dict[Any, torch.Tensor]]]) -> None:
    logits, targets = operands()
    whole = logprob.selected(logits, targets, vocab_size=VOCAB, impl="reference", temperature=0.7)
    for size, padded in MAPS:
        for rank in ranks[:size]:
            assert torch.equal(rank["pins"][size, padded], whole), (size, padded)
