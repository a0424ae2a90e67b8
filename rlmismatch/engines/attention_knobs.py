"""The attention family's knobs as one side was asked for them, and what became of each: shared by the adapters.

``accum_dtype`` and ``downcast_at`` set the arithmetic of the pin, which they hold in every arm: no engine has such a switch. So with one
side's alone the two sides compute differently on purpose, and the contract says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rlmismatch.attention_policies import PARTIAL, Policy
from rlmismatch.contract import Reading, documented, not_applicable, read, unknown
from rlmismatch.engines import attention_candidates, attention_sinks
from rlmismatch.engines.attention_candidates import Candidate
from rlmismatch.engines.logprob_knobs import Outcome, applied, unsupported
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError

PREFIX: Final = "attention."
ACCUM, DOWNCAST, CANDIDATE, BACKWARD = (PREFIX + name for name in ("accum_dtype", "downcast_at", "backend_candidate", "backward_backend"))
_BF16_BLOCK: Final = 16  # keys after which a running sum in bfloat16 is rounded: the depth of one matrix instruction
_PIN: Final = "pins/attention_policy.py: the knob holds the pin in every arm"


@dataclass(frozen=True, kw_only=True)
class AttentionKnobs:
    """What a side's attention knobs ask for. policy: the pin's arithmetic, None for the kernel's own."""

    policy: Policy | None
    outcomes: dict[str, Outcome]


def resolve(config: SideConfig) -> AttentionKnobs:
    """The knobs of one side that stay as they are as long as its engine lives."""
    out: dict[str, Outcome] = {}
    policy: Policy | None = None
    accum, downcast = config.knobs.get(ACCUM), config.knobs.get(DOWNCAST)
    reason = f"the model is {config.dtype}: a cast to it is none to bfloat16" if config.dtype != "bfloat16" else ""
    for knob, value, native in ((ACCUM, accum, "fp32"), (DOWNCAST, downcast, "final_write")):
        if value is None:
            continue
        refused = reason if value != native else ""
        if knob == DOWNCAST and value != native and accum == "bf16":
            refused = "a running sum in bf16 is cast after every block already"
        out[knob] = unsupported(value, native, refused) if refused else applied(value, "arithmetic of the pin, which it holds in every arm")
    if out.get(ACCUM, {}).get("actual") == "bf16":
        policy = Policy(downcast="per_block", block=_BF16_BLOCK)
    elif out.get(DOWNCAST, {}).get("actual") in ("per_partial", "per_block"):
        policy = Policy(downcast=out[DOWNCAST]["actual"], block=PARTIAL)
    sink = config.knobs.get(attention_sinks.KNOB)
    if sink is not None:
        out[attention_sinks.KNOB] = applied(sink, "in every layer; whether it has an effect is the field sinks")
    wanted = config.knobs.get(CANDIDATE)
    if wanted is not None:
        candidate = attention_candidates.find(str(wanted), torch.device(config.device))
        out[CANDIDATE] = unsupported(wanted, None, candidate.why_not) if candidate.why_not else applied(wanted, candidate.version)
    backward = config.knobs.get(BACKWARD)
    if backward is not None:
        if config.cp == 1:
            out[BACKWARD] = applied(backward, "in the measurement of the backward: scoring has none")
        else:
            out[BACKWARD] = unsupported(backward, None, "under context parallelism no backward is measured")
    return AttentionKnobs(policy=policy, outcomes=out)


def check(config: SideConfig, window: int | None) -> None:
    """Refuse a sink that has no place, and a precision that is simulated without a window for a model that has one."""
    attention_sinks.check(config)
    if window is not None and resolve(config).policy is not None:
        raise UsageError(
            "attention-precision-needs-full-attention",
            f"--accum-dtype and --downcast-at are built for full causal attention; this model has a sliding window of {window}",
            where=config.side,
        )


def held_precision(config: SideConfig, fields: dict[str, Reading]) -> dict[str, Reading]:
    """The fields of attention.precision where a knob holds the pin and sets its arithmetic; else as they are."""
    if ACCUM not in config.knobs and DOWNCAST not in config.knobs:
        return fields
    policy = resolve(config).policy
    bf16 = policy is not None and policy.block == _BF16_BLOCK
    return {
        **fields,
        "accum_dtype": documented("bfloat16" if bf16 else "float32", _PIN),
        "downcast_at": documented("final_write" if policy is None or bf16 else policy.downcast, _PIN),
        "backend_policy": documented("the kernel's own" if policy is None else str(policy), _PIN),
    }


def wanted_candidates(config: SideConfig) -> list[Candidate]:
    """The candidate that was asked for, or all; what compiles for minutes at its first call only where backends are to be tried."""
    asked, device = config.knobs.get(CANDIDATE), torch.device(config.device)
    if asked:
        return [attention_candidates.find(asked, device)]
    return [
        attention_candidates.find(name, device) if config.try_backends or name not in attention_candidates.COMPILED else untried(name)
        for name in attention_candidates.NAMES
    ]


def untried(name: str) -> Candidate:
    return attention_candidates.missing(name, "it compiles at its first call: `rlmismatch attention` tries it")


def candidate_facts(config: SideConfig) -> dict[str, str]:
    """Name -> version of each candidate, or why it cannot run here: JSON for the side's provenance."""
    return {c.name: f"not run: {c.why_not}" if c.why_not else c.version for c in wanted_candidates(config)}


def capability_readings(config: SideConfig, device: torch.device) -> dict[str, Reading]:
    """The fields of attention.backend_reuse: of the candidate that was asked to stand in, from trials on this side's device."""
    asked = config.knobs.get(CANDIDATE)
    names = ("backend_candidate", "library_version", "backend_capability")
    if asked is None:
        return dict.fromkeys(names, not_applicable("no other backend was asked to stand in"))
    candidate = attention_candidates.find(str(asked), device)
    if candidate.why_not:
        return {**dict.fromkeys(names, unknown(candidate.why_not)), "backend_candidate": read(asked, "--backend-candidate")}
    if "auto_split_under_invariance_claim" in config.plants:
        candidate = attention_candidates.splitting_by_load(candidate)
    capability = attention_candidates.capability(candidate, device, getattr(torch, config.dtype))
    return {
        "backend_candidate": read(asked, "--backend-candidate"),
        "library_version": read(candidate.version, "version of the installed package"),
        "backend_capability": read(capability, "trial: known operands, twice alone and once in a batch, in every form"),
    }
