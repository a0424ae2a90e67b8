"""The attention family's knobs as one side was asked for them, and what became of each: what no pin holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlmismatch.engines.logprob_knobs import Outcome, applied, outcome, unsupported
from rlmismatch.engines.protocol import ScorePath, SideConfig

PREFIX: Final = "attention."
# How the rollout's score paths are called on the command line.
FORMS: Final[Mapping[str, ScorePath]] = {
    "full_prefill": "prefill",
    "chunked_prefill": "chunked",
    "paged_prefill": "paged",
    "decode": "decode",
}


def trainer_outcomes(config: SideConfig) -> dict[str, Outcome]:
    """The outcomes of the trainer's knobs: it has one form, no cache, and no knob for splits."""
    value = config.knobs.get(PREFIX + "split_kv_policy")
    if value is None:
        return {}
    one_pass = config.trainer_spec == "local"
    if value == "auto" or (value == "1" and one_pass):
        return {PREFIX + "split_kv_policy": applied(value, "one pass over all keys" if one_pass else "")}
    reason = "Megatron-core's attention makes one pass over all keys" if one_pass else "Transformer Engine takes no number of splits"
    return {PREFIX + "split_kv_policy": unsupported(value, "1" if one_pass else "auto", reason)}


def rollout_outcomes(
    config: SideConfig, *, caching: bool, kv_splits: str | None, cached: Mapping[str, Mapping[str, int]]
) -> dict[str, Outcome]:
    """The outcomes of the rollout's knobs, read back.

    caching: whether the live engine keeps a prefix cache. kv_splits: what its kernels were called with, as the knob has it; None where
    they take no such number. cached: tokens that the requests of each path read from the cache so far.
    """
    out: dict[str, Outcome] = {}
    asked = {k.removeprefix(PREFIX): str(v) for k, v in config.knobs.items() if k.startswith(PREFIX)}
    if "prefix_cache" in asked:
        actual = "on" if caching else "off"
        same = actual == asked["prefix_cache"]
        out[PREFIX + "prefix_cache"] = outcome(
            asked["prefix_cache"], actual, "applied" if same else "fell_back", "kv_cache_manager.enable_caching"
        )
    if "materialization" in asked:
        out[PREFIX + "materialization"] = _forms(asked["materialization"], config, cached)
    if "split_kv_policy" in asked:
        out[PREFIX + "split_kv_policy"] = _splits(asked["split_kv_policy"], config, kv_splits)
    return out


def _forms(asked: str, config: SideConfig, cached: Mapping[str, Mapping[str, int]]) -> Outcome:
    forms = asked.split(",")
    if "paged_prefill" in forms and "paged" in cached and not any(cached["paged"].values()):
        reason = f"no sequence is longer than a page of {config.block_size} tokens, so nothing was read through one: lower --block-size"
        return outcome(asked, ",".join(f for f in forms if f != "paged_prefill"), "fell_back", reason)
    return applied(asked, "steps that the scheduler made, and tokens read from the prefix cache, are checked")


def _splits(asked: str, config: SideConfig, kv_splits: str | None) -> Outcome:
    if asked == kv_splits:
        return applied(asked)
    if config.device == "cpu" and asked in ("2", "4"):
        return unsupported(asked, kv_splits, "vLLM's CPU attention splits keys by load, or not at all")
    if kv_splits is None:
        return unsupported(asked, None, "the kernel that ran takes no number of splits")
    return outcome(asked, kv_splits, "fell_back", "what the kernel was called with")
