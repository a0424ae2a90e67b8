"""The log-prob family's knobs as one side was asked for them, and what became of each: shared by the adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

import torch

from rlmismatch import float64
from rlmismatch.contract import Evidence, Reading, read
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.transforms import NEUTRAL, Chain, Step, parse_order, parse_texts

PLANTED_TOP_P: Final = 0.8
Status = Literal["applied", "fell_back", "unsupported", "unobservable"]
Outcome = dict[str, Any]
PREFIX: Final = "logprob."
FIXED_MERGE: Final = "allgather_partials_fixed_merge"
# How each way to join shards is called in a contract.
COLLECTIVES: Final[Mapping[str, str]] = {
    "allreduce_partials": "all_reduce of partials",
    "allgather_partials_fixed_merge": "all_gather of partials",
    "allgather_logits": "all_gather of logits",
}
ORDERS: Final[Mapping[str, str]] = {
    "allgather_partials_fixed_merge": "tiles of fixed width by global index",
    "allgather_logits": "one pass over the gathered row",
}
# Knobs that set a step of the chain; the temperature is an option of every command.
_STEPS: Final = ("soft_cap", "logit_scale", "min_p", "top_k", "top_p")
CHAIN_KNOBS: Final = frozenset(PREFIX + name for name in (*_STEPS, "transform_chain", "logprobs_mode"))
# What logprobs_mode raw leaves out: a cap and a scale belong to the model, the rest to sampling.
_SAMPLING: Final = ("temperature", "min_p", "top_k", "top_p")


def outcome(requested: Any, actual: Any, status: Status, reason: str = "") -> Outcome:
    return {"requested": requested, "actual": actual, "status": status, "reason": reason}


def applied(requested: Any, reason: str = "") -> Outcome:
    return outcome(requested, requested, "applied", reason)


def unsupported(requested: Any, actual: Any, reason: str) -> Outcome:
    return outcome(requested, actual, "unsupported", reason)


def chain_of(config: SideConfig) -> Chain:
    """What this side is asked to do to the logits: its temperature and transform knobs, in the order asked for."""
    values = {"temperature": config.temperature, **{name: float(config.knobs.get(PREFIX + name, NEUTRAL[name])) for name in _STEPS}}
    if config.knobs.get(PREFIX + "logprobs_mode") == "raw_logprobs":
        values |= {name: NEUTRAL[name] for name in _SAMPLING}
    order = config.knobs.get(PREFIX + "transform_chain")
    return Chain.of(values, parse_order(order) if order else tuple(NEUTRAL))


def chain_outcomes(config: SideConfig, chain: Chain) -> dict[str, Outcome]:
    """The outcome of every knob that `chain_of` read. A side that drops a step has its own outcome to report."""
    out: dict[str, Outcome] = {}
    for knob in sorted(CHAIN_KNOBS & config.knobs.keys()):
        asked, step = config.knobs[knob], knob.removeprefix(PREFIX)
        if step in _STEPS and chain.value(step) != float(asked):
            out[knob] = unsupported(asked, chain.value(step), "logprobs_mode raw_logprobs leaves sampling out")
        else:
            out[knob] = applied(asked)
    return out


def asked(config: SideConfig, extra: Mapping[str, Any], name: str) -> str | None:
    """The value of ``logprob.NAME`` on this side, an arm's own first; None where nobody asked."""
    value = extra.get(PREFIX + name, config.knobs.get(PREFIX + name))
    return None if value is None else str(value)


def planted_chain(chain: Chain, plants: Collection[str]) -> Chain:
    """`chain` as the planted faults among `plants` leave it."""
    for plant, step in (("temperature_not_applied", "temperature"), ("soft_cap_missing", "soft_cap")):
        if plant in plants:
            chain = chain.without(step)
    if "cap_after_scale" in plants:
        scale = chain.value("logit_scale")
        rest = chain.without("logit_scale")
        chain = Chain(steps=(Step(name="logit_scale", value=scale), *rest.steps))
    if "top_p_renormalised" in plants:
        chain = Chain(steps=(*chain.without("top_p").steps, Step(name="top_p", value=PLANTED_TOP_P)))
    return chain


def chain_fields(chain: Reading, penalties: Reading | None = None) -> dict[str, Reading]:
    """The fields of logprob.transform_chain that follow from the chain that was read."""

    def of(value: Callable[[Chain], Any]) -> Reading:
        if chain.evidence is Evidence.UNKNOWN:
            return chain
        return dataclasses.replace(chain, value=value(parse_texts(chain.value)))

    return {
        "transform_chain": chain,
        "temperature_applied": of(lambda c: c.value("temperature")),
        "logprobs_mode": of(lambda c: "processed_logprobs" if any(s.name in _SAMPLING for s in c.steps) else "raw_logprobs"),
        "soft_cap": of(lambda c: c.value("soft_cap")),
        "logit_scale": of(lambda c: c.value("logit_scale")),
        "top_p": of(lambda c: c.value("top_p")),
        "top_k": of(lambda c: int(c.value("top_k"))),
        "min_p": of(lambda c: c.value("min_p")),
        "penalties": penalties or of(lambda _: []),
    }


def merge_order(order: str | None, reduce: str | None, natural: str, out: dict[str, Outcome]) -> str | None:
    """The reduce that the knob merge_order needs, given the one asked for; its outcome goes into `out`. natural: the engine's own."""
    knob = PREFIX + "merge_order"
    effective = reduce or natural
    if order == "global_vocab_shard_index":
        if reduce in (None, FIXED_MERGE):
            out[knob] = applied(order)
            return FIXED_MERGE
        out[knob] = unsupported(order, "nccl_algo", f"{reduce} leaves the order to the collective")
    elif order is not None:
        why = {FIXED_MERGE: "partials are merged by shard index", "allgather_logits": "logits are gathered, nothing is merged"}
        out[knob] = unsupported(order, None, why[effective]) if effective in why else applied(order)
    return reduce


def selected_gather(gather: str, reduce: str) -> Outcome:
    """What became of the knob: under allgather_logits every rank reads the target's logit out of the whole row, and nothing is summed."""
    if reduce == "allgather_logits" and gather != "local_gather":
        return unsupported(gather, "local_gather", "logits are gathered: each rank reads the target's from the whole row")
    return applied(gather)


def under_pin(outcomes: dict[str, Outcome], pins: frozenset[str]) -> dict[str, Outcome]:
    """`outcomes` in an arm whose pin logprob replaces the log-softmax: another way to join shards than the pin's did not take effect."""
    knob = PREFIX + "reduce"
    if "logprob" not in pins or outcomes.get(knob, {}).get("status") != "applied":
        return outcomes
    wanted = outcomes[knob]["requested"]
    status: Status = "applied" if wanted == FIXED_MERGE else "fell_back"
    return {
        **outcomes,
        knob: outcome(wanted, FIXED_MERGE, status, "the pin logprob is in force"),
    }


def trial_targets(logits_TV: torch.Tensor, chain: Chain) -> torch.Tensor:
    """int64 [T]: targets of a trial that no transform of `chain` cuts off: each row's likeliest column, and where nothing is cut the
    second likeliest in every other row, so that a fault that spares the maximum shows too."""
    best_T2 = logits_TV.topk(2, dim=1).indices
    second_T = torch.arange(len(logits_TV)) % 2 * int(chain.elementwise)
    return best_T2.gather(1, second_T[:, None])[:, 0]


def rounding_nats(x_TV: torch.Tensor) -> float:
    """How far two rows' float32 log-probs may lie apart by rounding alone; x_TV: the logits, transforms applied, columns cut off at -inf.

    float32 holds x to 2^-24 of its size. A row's log-prob is rounded at that size four times at most (the division by the temperature,
    the maximum's too, the target minus the maximum, minus the log of the sum), and so is the other row's. Logits of 10 lose 5e-6 so;
    over a temperature of 0.001 they are 1e4 and lose 5e-3, where other chains lie thousands of nats away.
    """
    return 8 * 2.0**-24 * float(x_TV[x_TV.isfinite()].abs().max())


def rows_made_of(logits_TV: torch.Tensor, x_TH: torch.Tensor, weight_VH: torch.Tensor, source: str) -> Reading:
    """Whether row t of `logits_TV` is the head's product of row t of `x_TH`, or of which other one."""
    if not weight_VH.shape[0]:
        return read("one row per scored token", f"{source}: this rank holds padding alone")
    made_TV = float64.matmul(x_TH.double(), weight_VH.double().T)
    distance_TT = torch.stack([(row_V - made_TV).norm(dim=-1) for row_V in logits_TV.double()])
    offsets = {int(best) - t for t, best in enumerate(distance_TT.argmin(dim=1).tolist())}
    if offsets == {0}:
        return read("one row per scored token", source)
    return read(f"logits of other rows, {sorted(offsets)} away", source)
