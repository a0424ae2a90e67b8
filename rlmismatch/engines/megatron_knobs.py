"""What the log-prob knobs make of the trainer: settings of its loss and head, and the outcome of each knob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

import torch

from rlmismatch.engines import attention_forms, attention_knobs
from rlmismatch.engines.gemm_flags import PREFIX as GEMM
from rlmismatch.engines.logprob_knobs import (
    PREFIX,
    Outcome,
    applied,
    asked,
    chain_of,
    chain_outcomes,
    merge_order,
    outcome,
    selected_gather,
    unsupported,
)
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.logprob_ways import REDUCES, Way
from rlmismatch.pins.megatron_logprob import FIXED_MERGE, NATIVE_WAY, Fusion, HeadSettings, LossSettings

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_IMPLS: Final[Mapping[str, Fusion]] = {
    "mcore_unfused": "none",
    "mcore_native_fused": "native",
    "mcore_te_fused": "te",
    "slime_vocab_parallel": "slime_vocab_parallel",
}


@dataclass(frozen=True, kw_only=True)
class TrainerKnobs:
    """The settings of one arm, and what became of each knob that was asked for."""

    loss: LossSettings
    head: HeadSettings
    outcomes: dict[str, Outcome]


def resolve(config: SideConfig, extra: Mapping[str, Any], *, padded: bool, te_loss: bool) -> TrainerKnobs:
    """The knobs of `config`, with an arm's `extra` ones first.

    padded: whether the vocabulary has padded rows. te_loss: whether Transformer Engine's cross entropy can be called here.
    """
    out: dict[str, Outcome] = {}
    given = {k.removeprefix(PREFIX) for k in (*config.knobs, *extra) if k.startswith(PREFIX)}
    values = {name: asked(config, extra, name) for name in given}
    chain = chain_of(config)
    out |= chain_outcomes(config, chain)
    fusion = _fusion(values, out, te_loss=te_loss, row_chain=not chain.elementwise)
    way = _way(values, out, fusion)
    loss = LossSettings(
        padding=config.vocab_padding_policy if padded else "include",
        chain=chain,
        way=way,
        fusion=fusion,
        block_size=int(values.get("fusion_block_size") or LossSettings.block_size),
        chunk_size=int(values.get("fusion_chunk_size") or LossSettings.chunk_size),
    )
    for name, used in (("fusion_block_size", fusion == "chunked_linear_ce"), ("fusion_chunk_size", fusion in _CHUNKED)):
        if name in values:
            out[PREFIX + name] = applied(values[name]) if used else unsupported(values[name], None, f"the loss {fusion} has no such size")
    head = HeadSettings(dtype=_head_dtype(config, values, out), rows=_rows(config, values, out))
    out |= _backward(values, loss)
    out |= attention_knobs.resolve(config).outcomes
    out |= attention_forms.trainer_outcomes(config)
    unknown = {k: v for k, v in {**config.knobs, **extra}.items() if k not in out and "." in k and not k.startswith(GEMM)}
    out |= {k: unsupported(v, None, "not a knob of the trainer") for k, v in unknown.items()}
    return TrainerKnobs(loss=loss, head=head, outcomes=out)


_CHUNKED: Final = ("chunked_linear_ce", "slime_vocab_parallel")


def _backward(values: Mapping[str, str | None], loss: LossSettings) -> dict[str, Outcome]:
    """Scoring has no backward: these knobs act on the one that is measured. Where Megatron's own is, it rounds where it does."""
    names = ("backward_impl", "grad_downcast_at", "entropy_reduce")
    out = {PREFIX + name: applied(values[name], "in the measurement of the backward") for name in names if values.get(name) is not None}
    asked_at, own = values.get("grad_downcast_at"), "hard_bf16" if loss.fusion == "native" else "final_write"
    if asked_at not in (None, own) and not loss.forward_only and values.get("backward_impl") != "triton":
        reason = "Megatron's loss rounds its gradient itself; --backward-impl triton takes either"
        out[PREFIX + "grad_downcast_at"] = unsupported(asked_at, own, reason)
    if values.get("backward_impl") == "native" and loss.forward_only:
        out[PREFIX + "backward_impl"] = unsupported("native", "triton", "the loss in force is one of ours, which scores without autograd")
    return out


def _fusion(values: Mapping[str, str | None], out: dict[str, Outcome], *, te_loss: bool, row_chain: bool) -> Fusion:
    fusion: Fusion = "none"
    chosen = ""  # by which of the two knobs
    for name, known in (("trainer_impl", _IMPLS), ("fusion_impl", {f: f for f in get_args(Fusion)[:4]})):
        value = values.get(name)
        if value is None:
            continue
        wanted = known.get(value)
        reason = ""
        if wanted is None:
            reason = f"unknown; one of: {', '.join(known)}"
        elif wanted == "te" and not te_loss:
            reason = "Transformer Engine's cross entropy is not installed, or there is no GPU for it"
        elif wanted == "chunked_linear_ce" and row_chain:
            reason = "a transform that needs the whole row of logits"
        if reason:
            out[PREFIX + name] = unsupported(value, "none", reason)
        else:
            if chosen and wanted != fusion:  # two names of the loss: the second stands, and the first did not take effect
                asked = out[PREFIX + chosen]["requested"]
                out[PREFIX + chosen] = outcome(asked, wanted, "fell_back", f"--{name.replace('_', '-')} {value} is asked for as well")
            fusion, chosen = cast(Fusion, wanted), name
            out[PREFIX + name] = applied(value)
    return fusion


def _way(values: Mapping[str, str | None], out: dict[str, Outcome], fusion: Fusion) -> Way:
    """The way to join shards; `fusion` other than none has its own, and nothing can be turned on it."""
    names = ("reduce", "merge_order", "selected_gather", "accum_dtype", "downcast_at")
    natural = {
        "reduce": NATIVE_WAY.reduce,
        "merge_order": "nccl_algo",
        "selected_gather": NATIVE_WAY.gather,
        "accum_dtype": NATIVE_WAY.accum,
        "downcast_at": NATIVE_WAY.downcast,
    }
    if fusion != "none":
        for name in names:
            value = values.get(name)
            if value is not None:
                same = value == natural[name]
                out[PREFIX + name] = (
                    applied(value) if same else unsupported(value, natural[name], f"the loss {fusion} has its own arithmetic")
                )
        return NATIVE_WAY
    reduce = values.get("reduce")
    if reduce is not None and reduce not in REDUCES:
        out[PREFIX + "reduce"] = unsupported(reduce, NATIVE_WAY.reduce, f"unknown; one of: {', '.join(REDUCES)}")
        reduce = None
    elif reduce is not None:
        out[PREFIX + "reduce"] = applied(reduce)
    reduce = merge_order(values.get("merge_order"), reduce, NATIVE_WAY.reduce, out)
    gather = values.get("selected_gather") or (FIXED_MERGE.gather if reduce == FIXED_MERGE.reduce else NATIVE_WAY.gather)
    way = Way(
        reduce=cast(Any, reduce or NATIVE_WAY.reduce),
        gather=cast(Any, gather),
        accum=cast(Any, values.get("accum_dtype") or "fp32"),
        downcast=cast(Any, values.get("downcast_at") or "final_write"),
    )
    if values.get("selected_gather") is not None:
        out[PREFIX + "selected_gather"] = selected_gather(way.gather, way.reduce)
    for name in ("accum_dtype", "downcast_at"):
        if values.get(name) is not None:
            out[PREFIX + name] = applied(values[name])
    return way


def _head_dtype(config: SideConfig, values: Mapping[str, str | None], out: dict[str, Outcome]) -> torch.dtype | None:
    value = values.get("head_dtype")
    if value is None:
        return None
    out[PREFIX + "head_dtype"] = applied(value)
    wanted = DTYPES[value]
    return None if str(wanted) == f"torch.{config.dtype}" else wanted


def _rows(config: SideConfig, values: Mapping[str, str | None], out: dict[str, Outcome]) -> int | None:
    value = values.get("materialization")
    if value is None:
        return None
    out[PREFIX + "materialization"] = applied(value)
    return {"full_prefill": None, "chunked": config.chunk_size, "last_token_only": 1}[value]
