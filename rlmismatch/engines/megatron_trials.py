"""What the trainer's live engine does, found by asking it: short trials with known inputs, for what no attribute shows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.engines import logprob_knobs
from rlmismatch.pins.hooks import OpSwitch, Recorder, installed
from rlmismatch.transforms import Chain, candidates

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

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


def loss(engine: MegatronEngine) -> LossBehaviour:
    """Score synthetic logits by the live loss and name the one candidate (padding policy x transforms) that gives its values.

    Rows have different scales and padded columns are large, so that no two candidates differ by a mere constant. The targets are
    each row's likeliest token, which no transform cuts off. Collective.
    """
    shard = engine.shard
    source = "trial: synthetic logits through compute_language_model_loss"
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(_ROWS, shard.padded_vocab_size, generator=generator) * torch.linspace(0.5, 3.0, _ROWS)[:, None]
    logits_TV[:, shard.vocab_size :] = 5.0
    logits_TV = logits_TV.to(getattr(torch, engine.config.dtype))
    targets_T = logits_TV[:, : shard.vocab_size].argmax(dim=1)
    live_T = _live_logprob(engine, logits_TV, targets_T)

    # Where nothing is padded the two policies are one, and both sides call it "mask".
    columns = (
        {"mask": shard.vocab_size} if shard.padded_vocab_size == shard.vocab_size else _both(shard.vocab_size, shard.padded_vocab_size)
    )
    tried: list[tuple[float, float, str, Chain]] = []
    for chain in candidates(logprob_knobs.chain_of(engine.config), engine.native_settings.chain, Chain()):
        for padding, width in columns.items():
            exact_TV = chain.apply(logits_TV[:, :width].double()).log_softmax(-1)
            difference_T = live_T - exact_TV.gather(1, targets_T[:, None])[:, 0]
            tried.append((float(difference_T.max() - difference_T.min()), -float(difference_T.mean()), padding, chain))
    # Of chains that are one function the first stands, which is the one asked for.
    spread, offset, padding, chain = next(t for t in tried if not t[0] > min(x[0] for x in tried) + _SAME_NATS)
    way = engine.native_settings.way
    tolerance = _TOLERANCE_NATS if (way.accum, way.downcast) == ("fp32", "final_write") else _COARSE_NATS
    if spread <= tolerance:
        return LossBehaviour(
            padding=read(padding, source),
            chain=read(chain.texts, source),
            offset=read(offset if abs(offset) > tolerance else 0.0, source),
        )
    nothing = unknown(f"{source}: the values match no known combination of padding policy and transforms")
    return LossBehaviour(padding=nothing, chain=nothing, offset=nothing)


def _live_logprob(engine: MegatronEngine, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """float64 [T] on the CPU: what the live loss makes of given logits. Collective."""
    shard = engine.shard
    own_TV = logits_TV[:, shard.start : shard.start + shard.width].to(engine.device)
    with torch.no_grad(), native_arithmetic(engine):
        # A loss that starts from hidden rows gets rows of the unit matrix, and the logits as the head.
        engine.ops.give_head_input(torch.eye(len(own_TV), dtype=own_TV.dtype, device=engine.device), own_TV.T.contiguous())
        out = engine.gpt.compute_language_model_loss(targets_T[None].to(engine.device), own_TV[:, None].contiguous())
    logprob_T: torch.Tensor = -out[0].cpu().double()
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
