"""What the trainer's live engine does, found by asking it: short trials with known inputs, for what no attribute shows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.engines import logprob_knobs
from rlmismatch.engines.logprob_knobs import rounding_nats, rows_made_of, trial_targets
from rlmismatch.engines.logprob_plants import owner_twice
from rlmismatch.pins.hooks import OpSwitch, Recorder, installed
from rlmismatch.transforms import Chain, candidates

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine
    from rlmismatch.pins.megatron_logprob import VocabShard

_ROWS: Final = 8
_TOLERANCE_NATS: Final = 1e-4  # float32 log-softmax over 1e5 columns is good to 1e-5; the candidates lie 1e-2 and more apart
_SAME_NATS: Final = 1e-7
_COARSE_NATS: Final = 5e-2  # where a knob asks for sums or partials in bf16


@dataclass(frozen=True, kw_only=True)
class LossBehaviour:
    """How the live loss treats logits. `offset` is a constant, in nats, by which its log-sum-exp is too large."""

    padding: Reading  # include | mask
    chain: Reading
    offset: Reading
    single_owner: Reading
    columns: Reading  # of the real vocabulary that the denominator counts


def loss(engine: MegatronEngine) -> LossBehaviour:
    """Score synthetic logits by the live loss and name the one candidate (padding policy x transforms) that gives its values.

    Rows have different scales and padded columns are large, so that no two candidates differ by a mere constant. The targets
    are likely tokens, which no transform cuts off. Collective.
    """
    shard = engine.shard
    source = "trial: synthetic logits through compute_language_model_loss"
    logits_TV = synthetic_logits(shard).to(getattr(torch, engine.config.dtype))
    targets_T = trial_targets(logits_TV[:, : shard.vocab_size], engine.native_settings.chain)
    live_T = _live_logprob(engine, logits_TV, targets_T)

    # Where nothing is padded the two policies are one, and both sides call it "mask".
    columns = (
        {"mask": shard.vocab_size} if shard.padded_vocab_size == shard.vocab_size else _both(shard.vocab_size, shard.padded_vocab_size)
    )
    tried: list[tuple[float, float, bool, str, Chain, float]] = []
    for chain in candidates(logprob_knobs.chain_of(engine.config), engine.native_settings.chain, Chain()):
        for padding, width in columns.items():
            x_TV = chain.apply(logits_TV[:, :width].double())
            exact_T = x_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
            for single in (True, False):
                difference_T = live_T - (exact_T if single else exact_T + owner_twice(x_TV, targets_T))
                spread, offset = float(difference_T.max() - difference_T.min()), -float(difference_T.mean())
                tried.append((spread, offset, single, padding, chain, rounding_nats(x_TV)))
    # Of chains that are one function the first stands, which is the one asked for.
    spread, offset, single, padding, chain, lost = next(t for t in tried if not t[0] > min(x[0] for x in tried) + _SAME_NATS)
    way = engine.native_settings.way
    exact = (way.accum, way.downcast) == ("fp32", "final_write")
    # Absolute where logits are of ordinary size, and what rounding takes of large ones.
    tolerance = (_TOLERANCE_NATS if exact else _COARSE_NATS) + lost
    count = _counted_columns if exact else _counted_at_boundaries
    if engine.native_settings.chain.elementwise:
        # Of what rounding alone may be, nothing stands in equal logits.
        counted = count(engine, offset if spread <= tolerance and abs(offset) > lost else 0.0)
    else:
        counted = read(shard.vocab_size, "config.json: a truncated distribution has no equal columns to count")
    if spread <= tolerance:
        return LossBehaviour(
            padding=read(padding, source),
            chain=read(chain.texts, source),
            offset=read(offset if abs(offset) > tolerance else 0.0, source),
            single_owner=read(single, source),
            columns=counted,
        )
    nothing = unknown(f"{source}: the values match no known combination of padding policy, transforms and owners")
    return LossBehaviour(padding=nothing, chain=nothing, offset=nothing, single_owner=nothing, columns=counted)


def synthetic_logits(shard: VocabShard) -> torch.Tensor:
    """float32 [T, V of the padded vocabulary] on the CPU: rows of different scales, padded columns large."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(_ROWS, shard.padded_vocab_size, generator=generator) * torch.linspace(0.5, 3.0, _ROWS)[:, None]
    logits_TV[:, shard.vocab_size :] = 5.0
    return logits_TV


def _counted_columns(engine: MegatronEngine, offset: float) -> Reading:
    """How many columns of the real vocabulary the live denominator counts, from equal logits in all of them. Collective.

    Each counts as one unless a rank lacks a row of the head or two ranks have it. offset: what the log-sum-exp is too large by anyway.
    """
    shard = engine.shard
    logits_TV = torch.zeros(_ROWS, shard.padded_vocab_size, dtype=getattr(torch, engine.config.dtype))
    logits_TV[:, shard.vocab_size :] = -1e4
    if engine.native_settings.chain.value("soft_cap"):
        return read(shard.vocab_size, "config.json: a cap makes padded columns look like others, so they were not counted")
    targets_T = torch.arange(1, _ROWS + 1) % shard.vocab_size
    live_T = _live_logprob(engine, logits_TV, targets_T)
    return read(round(float(torch.exp(-live_T.mean() - offset))), "trial: equal logits through compute_language_model_loss")


def _counted_at_boundaries(engine: MegatronEngine, offset: float) -> Reading:
    """`_counted_columns` where sums or partials are rounded to bfloat16, which cannot count to a thousand. Collective.

    Each rank's first row with 15 on either side is counted alone, which is exact in bfloat16; rows between boundaries count as one.
    """
    shard, rows, expected = engine.shard, [], []
    for rank in range(shard.tp.size):
        columns = range(max(0, rank * shard.width - 15), min(shard.vocab_size, rank * shard.width + 16))
        if rank * shard.width < shard.vocab_size:
            row_V = torch.full((shard.padded_vocab_size,), -1e4)
            row_V[columns.start : columns.stop] = 0.0
            rows.append(row_V)
            expected.append(columns)
    logits_TV = torch.stack(rows).to(getattr(torch, engine.config.dtype))
    live_T = _live_logprob(engine, logits_TV, torch.tensor([columns.stop - 1 for columns in expected]))
    found = [round(float(n)) - len(columns) for n, columns in zip(torch.exp(-live_T - offset), expected, strict=True)]
    return read(shard.vocab_size + sum(found), "trial: equal logits around every shard boundary through compute_language_model_loss")


def _live_logprob(engine: MegatronEngine, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """float64 [T] on the CPU: what the live loss makes of given logits. Collective."""
    shard = engine.shard
    own_TV = logits_TV[:, shard.start : shard.start + shard.width].to(engine.device)
    with torch.no_grad(), native_arithmetic(engine):
        out = []
        for t in range(len(own_TV)):  # one row a call, as decode has it: what mixes rows is another trial's
            # A loss that starts from hidden rows gets a row of the unit matrix, and the logits as the head.
            engine.ops.give_head_input(torch.eye(1, dtype=own_TV.dtype, device=engine.device), own_TV[t : t + 1].T.contiguous())
            labels_11 = targets_T[None, t : t + 1].to(engine.device)
            out.append(engine.gpt.compute_language_model_loss(labels_11, own_TV[t : t + 1, None].contiguous())[0])
    logprob_T: torch.Tensor = -torch.cat(out).cpu().double()
    return logprob_T


def native_arithmetic(engine: MegatronEngine) -> contextlib.AbstractContextManager[Any]:
    """The engine as its native arm runs it: no pin, and every knob of the run in force."""
    switch = OpSwitch(active=frozenset(), probe="none", recorder=Recorder())
    return installed(engine.ops.patches(switch, engine.native_settings))


def _both(real: int, padded: int) -> dict[str, int]:
    return {"mask": real, "include": padded}


def head_dtype(engine: MegatronEngine) -> Reading:
    """dtype of the logits of a forward over two tokens. Collective."""
    with native_arithmetic(engine):
        logits = engine.forward([0, 0], labels=None)
    return read(str(logits.dtype).removeprefix("torch."), "trial: dtype of GPTModel's logits")


def head_rows(engine: MegatronEngine) -> Reading:
    """Which hidden row each row of logits is made of, from unequal rows through the live head. Collective."""
    source = "trial: four unequal rows through output_layer"
    head = engine.gpt.shared_embedding_or_output_weight() if engine.live_tied else engine.gpt.output_layer.weight
    weight_VH = head.detach()[: engine.shard.real_width]
    x_TBH = torch.randn(4, 1, weight_VH.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_VH)
    with torch.no_grad(), native_arithmetic(engine):
        logits_TV = engine.gpt.output_layer._forward_impl(
            input=x_TBH, weight=head.detach(), bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=False,
            sequence_parallel=False, tp_group=engine.tp.group, grad_output_buffer=None,
        )[:, 0, : weight_VH.shape[0]]  # fmt: skip
    return rows_made_of(logits_TV, x_TBH[:, 0], weight_VH, source)


def attention_backend(engine: MegatronEngine) -> Reading:
    """The class that ran, and for TE, which chooses per shape, the backend that it chose for a forward over two tokens. Collective."""
    core = engine.gpt.decoder.layers[0].self_attention.core_attention
    if engine.config.trainer_spec == "local":
        return read(type(core).__name__, "type(core_attention)")
    engine.forward([0, 0], labels=None)
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as chosen

    ran = [name for name in ("flash_attention", "fused_attention", "unfused_attention") if chosen[f"use_{name}"]]
    return read(f"{type(core).__name__}: {', '.join(ran) or 'none'}", "trial: transformer_engine's choice for two tokens")


def pad_rows(engine: MegatronEngine) -> Reading:
    """What the padded rows of the live head hold, over all ranks: ``zeros``, or their largest magnitude. Collective."""
    head = engine.gpt.embedding.word_embeddings if engine.live_tied else engine.gpt.output_layer
    rows = head.weight.detach()[engine.shard.real_width :].abs().float()
    own = rows.max() if rows.numel() else torch.zeros((), device=engine.device)
    largest = max(float(x) for x in engine.tp.gathered(own.reshape(1)))
    return read("zeros" if largest == 0.0 else f"up to {largest:.3g}", "head weight rows beyond the real vocabulary")


def qk_norm_acts(engine: MegatronEngine) -> Reading:
    """Whether the live q/k norms change a vector that is not normalised, in every layer."""
    weight = engine.gpt.decoder.layers[0].self_attention.linear_qkv.weight
    x_SBHD = torch.full((1, 1, 1, engine.model.head_dim), 3.0, dtype=weight.dtype, device=engine.device)
    norms = [n for layer in engine.gpt.decoder.layers for n in (layer.self_attention.q_layernorm, layer.self_attention.k_layernorm)]
    with torch.no_grad():
        acts = {not torch.equal(norm(x_SBHD), x_SBHD) for norm in norms}
    source = "trial: a constant vector through every q_layernorm and k_layernorm"
    return read(acts.pop(), source) if len(acts) == 1 else unknown(f"{source}: some act and some do not")
