"""The trainer's live attention, rotary embedding and loader, asked with known inputs: what they were found to do, on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.engines import attention_probe, head_canary, megatron_model, rope_probe
from rlmismatch.engines.attention_probe import Inputs, Operator, Setup
from rlmismatch.engines.rope_probe import Rotation
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


@dataclass(frozen=True, kw_only=True)
class AttentionTrial:
    """One operator a layer; `heads`: checkpoint heads at the first layer's attention by (q, k, v), over all ranks."""

    operators: tuple[Operator, ...]
    reaches_window: bool
    rotation: Rotation
    heads: tuple[list[int] | None, ...]
    calls: tuple[int, ...]  # of each layer's core attention in one forward


def ask(engine: MegatronEngine, *, window: int) -> AttentionTrial:
    """Run the trials. window: the longest one that is set. Collective."""
    longest = min(engine.config.max_model_len, engine.model.max_positions)
    tokens, reaches = attention_probe.trial_tokens(window, longest)
    heads, shape, calls = _heads(engine)
    return AttentionTrial(
        operators=tuple(_operator(engine, layer.self_attention, tokens, shape) for layer in engine.gpt.decoder.layers),
        reaches_window=reaches,
        rotation=_rotation(engine),
        heads=heads,
        calls=calls,
    )


def segments(engine: MegatronEngine) -> Reading:
    """attention.layout:segment_boundaries: whether a sequence is scored alike alone and behind another one. Collective."""
    source = "trial: one sequence scored alone, and after another"
    first, second = (Sequence(id=name, prompt_ids=(1, 2), response_ids=ids) for name, ids in (("a", (2, 1, 1)), ("b", (1, 2))))
    alone, again, behind = (engine.scores(batch)["b"] for batch in ([second], [second], [first, second]))
    if not torch.equal(alone, again):
        return unknown(f"{source}: the trainer does not repeat itself")
    return read("per sequence" if torch.equal(alone, behind) else "none: a sequence sees the one before it", source)


def _operator(engine: MegatronEngine, attention: Any, tokens: int, shape: tuple[int, int]) -> Operator:
    given: dict[Setup, Inputs] = {}
    outs: dict[Setup, torch.Tensor] = {}
    core, cp = attention.core_attention, engine.cp
    prompts: dict[Setup, int] = {"mask": tokens, "scores": attention_probe.SCORE_TOKENS}
    # Dropout, where a fault has left it on, is another axis' matter.
    training = core.training
    core.eval()
    try:
        for setup, prompt in prompts.items():
            padding = -prompt % cp.multiple
            given[setup] = x = attention_probe.inputs(
                setup,
                prompt=prompt,
                decode=padding,
                heads=shape[0],
                kv_heads=shape[1],
                dim=engine.model.head_dim,
                scale=engine.model.head_dim**-0.5,
                dtype=getattr(torch, engine.config.dtype),
                device=engine.device,
            )
            local = engine.config.trainer_spec == "local" and cp.size == 1
            with torch.no_grad():
                out = core(
                    *(cp.own(t)[:, None].contiguous() for t in (x.q_THD, x.k_THD, x.v_THD)),
                    megatron_model.causal_mask(prompt + padding, engine.device) if local else None,
                    attn_mask_type=attention.attn_mask_type,
                )
            outs[setup] = cp.whole(out[:, 0].contiguous()).view_as(x.q_THD)
    finally:
        core.train(training)
    return attention_probe.read_operator(
        outs["mask"],
        slice(0, tokens),
        tokens,
        scores=given["scores"],
        scores_out_THD=outs["scores"],
        score_rows=slice(0, attention_probe.SCORE_TOKENS),
    )


def _rotation(engine: MegatronEngine) -> Rotation:
    """What the frequencies that the model makes and the function that its attention calls make of unit vectors."""
    from megatron.core.transformer import attention as megatron_attention

    gpt, cp = engine.gpt, engine.cp
    rotary = gpt.rotary_pos_emb
    tokens = rope_probe.TOKENS + -rope_probe.TOKENS % cp.multiple
    x_TDD = rope_probe.unit_vectors(engine.model.head_dim, tokens, dtype=getattr(torch, engine.config.dtype), device=engine.device)
    with torch.no_grad():
        out = megatron_attention.apply_rotary_pos_emb(
            cp.own(x_TDD)[:, None], rotary(tokens), config=gpt.config, cp_group=gpt.decoder.layers[0].self_attention.pg_collection.cp
        )
    inv_freq = rotary.inv_freq
    if rotary.seq_len_interpolation_factor is not None:
        inv_freq = inv_freq / rotary.seq_len_interpolation_factor
    return rope_probe.read_rotation(cp.whole(out[:, 0].contiguous()), inv_freq)


def _heads(engine: MegatronEngine) -> tuple[tuple[list[int] | None, ...], tuple[int, int], tuple[int, ...]]:
    """The checkpoint heads of the first layer by (q, k, v), before RoPE; this rank's query and key/value heads at its attention; and how
    often each layer's attention was called in that forward.
    """
    from megatron.core.transformer import attention as megatron_attention

    before_rope: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    cores = [layer.self_attention.core_attention for layer in engine.gpt.decoder.layers]
    calls = [0] * len(cores)

    def rotated(native: Callable[..., Any]) -> Callable[..., Any]:
        def apply(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before_rope.append(t[0, 0].clone())
            return native(t, *args, **kwargs)

        return apply

    def attend(index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                calls[index] += 1
                values.append(value[0, 0].clone())
                return native(query, key, value, *args, **kwargs)

            return forward

        return make

    hooks = [
        Patch(target=megatron_attention, name="apply_rotary_pos_emb", make=rotated, pins=(), label="trial: heads"),
        *(Patch(target=core, name="forward", make=attend(i), pins=(), label="trial: heads") for i, core in enumerate(cores)),
    ]
    with installed(hooks):
        engine.forward([head_canary.TOKEN] * 2, labels=None)
    # Megatron rotates Q, then K, of one layer after the other. Of all context-parallel ranks the first holds a real token.
    first = [engine.cp.ranks.gathered(x.contiguous())[0] for x in (*before_rope[:2], values[0])]
    known = head_canary.of_checkpoint(engine.checkpoint)
    whole = [torch.cat(engine.tp.gathered(x.contiguous())) for x in first]
    return tuple(head_canary.named(x, k) for x, k in zip(whole, known, strict=True)), (len(first[0]), len(first[1])), tuple(calls)
