"""What a run asks of the live rollout's head and logits, as long as the engine lives: set where vLLM has it, hooked where not.

vLLM caps and scales logits itself (`LogitsProcessor`, in the logits' dtype). Its own processed log-probs hold temperature and
truncation for sampled tokens only: prompt log-probs are raw in every mode. So those are hooked, in float32, as the sampler does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlmismatch.engines import vllm_knobs
from rlmismatch.engines.logprob_knobs import planted_chain
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.logprob_ways import blocks
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.pins.vllm_logprob import engine_steps
from rlmismatch.transforms import Chain


@contextlib.contextmanager
def in_force(live: LiveModel, config: SideConfig) -> Iterator[None]:
    """The run's chain, head dtype and head rows, in force while the context is open. Plants that change the chain are in it."""
    knobs = vllm_knobs.resolve(config, {}, live)
    processor: Any = live.model.logits_processor
    own, hooked = engine_steps(planted_chain(knobs.chain, config.plants))
    before = {name: getattr(processor, name) for name in ("soft_cap", "scale", "head_dtype") if hasattr(processor, name)}
    if own.steps:
        processor.soft_cap = own.value("soft_cap") or None
        processor.scale = own.value("logit_scale")
    head_dtype = torch.float32 if "head_fp32_one_sided" in config.plants else knobs.head_dtype
    if head_dtype is not None:
        processor.head_dtype = head_dtype
    patches = []
    if hooked.steps:
        patches.append(Patch(target=live.sampler, name="compute_logprobs", make=_transformed(hooked), pins=(), label="transforms"))
    if knobs.head_rows is not None:
        target, name = (processor, "_apply_head") if hasattr(processor, "_apply_head") else (live.model.lm_head.quant_method, "apply")
        patches.append(Patch(target=target, name=name, make=_by_rows(knobs.head_rows), pins=(), label="head rows"))
    try:
        with installed(patches):
            yield
    finally:
        for name, value in before.items():
            setattr(processor, name, value)


def _transformed(chain: Chain) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda native: lambda logits: native(chain.apply(logits.float()))


def _by_rows(rows: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def apply(lm_head: Any, x_TH: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.cat([native(lm_head, part_TH, bias) for part_TH in blocks(x_TH, rows)])

        return apply

    return make
