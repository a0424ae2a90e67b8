"""What the log-prob knobs make of the rollout: the way its shards are joined, its head, and the outcome of each knob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from rlmismatch.engines import attention_knobs, vllm_compile
from rlmismatch.engines.gemm_flags import PREFIX as GEMM
from rlmismatch.engines.logprob_knobs import (
    PREFIX,
    Outcome,
    applied,
    asked,
    chain_of,
    chain_outcomes,
    merge_order,
    selected_gather,
    unsupported,
)
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.logprob_ways import REDUCES, Way
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.pins.vllm_logprob import NATIVE_WAY
from rlmismatch.transforms import Chain

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class RolloutKnobs:
    """The settings of one arm, and what became of each knob that was asked for."""

    chain: Chain
    way: Way
    head_dtype: torch.dtype | None  # None: the engine's own
    head_rows: int | None  # rows a GEMM; None: as the engine's step has them
    outcomes: dict[str, Outcome]


def resolve(config: SideConfig, extra: Mapping[str, Any], live: LiveModel, attention: Mapping[str, Outcome] | None = None) -> RolloutKnobs:
    """The knobs of `config`, with an arm's `extra` ones first. attention: what became of the attention family's."""
    given = {k.removeprefix(PREFIX) for k in (*config.knobs, *extra) if k.startswith(PREFIX)}
    values = {name: asked(config, extra, name) for name in given}
    chain = chain_of(config)
    out = {**chain_outcomes(config, chain), **(attention or {})}
    way = _way(values, out, live)
    head_dtype, rows = None, None
    if values.get("head_dtype") is not None:
        wanted = DTYPES[str(values["head_dtype"])]
        own = getattr(torch, config.dtype)
        if hasattr(live.model.logits_processor, "head_dtype"):
            head_dtype = wanted
            out[PREFIX + "head_dtype"] = applied(values["head_dtype"], "logits_processor.head_dtype")
        elif wanted == own:
            out[PREFIX + "head_dtype"] = applied(values["head_dtype"], "the model's dtype")
        else:
            out[PREFIX + "head_dtype"] = unsupported(values["head_dtype"], config.dtype, "this version has no dtype of the head's own")
    if values.get("materialization") is not None:
        rows = {"full_prefill": None, "chunked": config.chunk_size, "last_token_only": 1}[str(values["materialization"])]
        out[PREFIX + "materialization"] = applied(values["materialization"], "rows of the head's GEMM; steps are as each path has them")
    out |= vllm_compile.outcomes(config)
    out |= attention_knobs.resolve(config).outcomes
    unknown = {k: v for k, v in {**config.knobs, **extra}.items() if k not in out and "." in k and not k.startswith(GEMM)}
    out |= {k: unsupported(v, None, "not a knob of the rollout") for k, v in unknown.items()}
    return RolloutKnobs(chain=chain, way=way, head_dtype=head_dtype, head_rows=rows, outcomes=out)


def _way(values: Mapping[str, str | None], out: dict[str, Outcome], live: LiveModel) -> Way:
    reduce = values.get("reduce")
    if reduce is not None and reduce not in REDUCES:
        out[PREFIX + "reduce"] = unsupported(reduce, NATIVE_WAY.reduce, f"unknown; one of: {', '.join(REDUCES)}")
        reduce = None
    elif reduce is not None:
        out[PREFIX + "reduce"] = applied(reduce, "one shard" if live.tp.size == 1 else "")
    reduce = merge_order(values.get("merge_order"), reduce, NATIVE_WAY.reduce, out) or NATIVE_WAY.reduce
    way = Way(
        reduce=cast(Any, reduce),
        gather=cast(Any, values.get("selected_gather") or NATIVE_WAY.gather),
        accum=cast(Any, values.get("accum_dtype") or "fp32"),
        downcast=cast(Any, values.get("downcast_at") or "final_write"),
    )
    if values.get("selected_gather") is not None:
        one = live.tp.size == 1
        out[PREFIX + "selected_gather"] = applied(way.gather, "one shard") if one else selected_gather(way.gather, way.reduce)
    for name in ("accum_dtype", "downcast_at"):
        if values.get(name) is not None:
            out[PREFIX + name] = applied(values[name])
    return way
