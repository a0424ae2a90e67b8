"""What the log-prob knobs become: settings of a side, and an outcome each; nothing that was asked for is lost or coerced."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlmismatch import axes
from rlmismatch.commands import options
from rlmismatch.commands.logprob import KNOBS
from rlmismatch.engines import logprob_knobs, megatron_knobs
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError
from rlmismatch.pins.logprob_ways import Way
from rlmismatch.pins.megatron_logprob import FIXED_MERGE, NATIVE_WAY, HeadSettings, LossSettings
from rlmismatch.settings import Settings


def config(temperature: float = 1.0, **knobs: str) -> SideConfig:
    named = {f"logprob.{k}": v for k, v in knobs.items()}
    return SideConfig(side="trainer", engine="megatron", ckpt="x", temperature=temperature, knobs=named, vocab_padding_policy="mask")


def resolved(**knobs: str) -> megatron_knobs.TrainerKnobs:
    return megatron_knobs.resolve(config(**knobs), {}, padded=True, te_loss=False)


def statuses(knobs: megatron_knobs.TrainerKnobs) -> dict[str, str]:
    return {k.removeprefix("logprob."): o["status"] for k, o in knobs.outcomes.items()}


def test_nothing_asked_for_is_megatrons_own_behaviour() -> None:
    out = resolved()
    assert (out.loss, out.head, out.outcomes) == (LossSettings(padding="mask"), HeadSettings(), {})


@pytest.mark.parametrize(
    ("knobs", "way"),
    [
        ({"reduce": "allgather_partials_fixed_merge"}, FIXED_MERGE),
        ({"merge_order": "global_vocab_shard_index"}, FIXED_MERGE),
        ({"reduce": "allgather_logits"}, Way(reduce="allgather_logits", gather="masked_sum_allreduce")),
        ({"selected_gather": "local_gather"}, Way(reduce="allreduce_partials", gather="local_gather")),
        ({"accum_dtype": "bf16"}, Way(reduce="allreduce_partials", gather="masked_sum_allreduce", accum="bf16")),
        ({"merge_order": "nccl_algo"}, NATIVE_WAY),
    ],
)
def test_ways(knobs: dict[str, str], way: Way) -> None:
    out = resolved(**knobs)
    assert out.loss.way == way
    assert statuses(out) == dict.fromkeys(knobs, "applied")


@pytest.mark.parametrize(
    ("knobs", "refused"),
    [
        ({"reduce": "guess"}, "reduce"),
        ({"reduce": "allgather_logits", "merge_order": "global_vocab_shard_index"}, "merge_order"),
        ({"reduce": "allgather_partials_fixed_merge", "merge_order": "nccl_algo"}, "merge_order"),
        ({"fusion_impl": "te"}, "fusion_impl"),
        ({"trainer_impl": "mcore_te_fused"}, "trainer_impl"),
        ({"fusion_impl": "native", "reduce": "allgather_logits"}, "reduce"),
        ({"fusion_impl": "chunked_linear_ce", "top_k": "5"}, "fusion_impl"),
        ({"fusion_block_size": "64"}, "fusion_block_size"),
        ({"logprobs_mode": "raw_logprobs", "top_p": "0.8"}, "top_p"),
        ({"grad_downcast_at": "hard_bf16"}, "grad_downcast_at"),
        ({"fusion_impl": "native", "grad_downcast_at": "final_write"}, "grad_downcast_at"),
        ({"reduce": "allgather_logits", "backward_impl": "native"}, "backward_impl"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_what_the_trainer_cannot_take_is_unsupported_with_a_reason(knobs: dict[str, str], refused: str) -> None:
    out = resolved(**knobs)
    assert {k for k, s in statuses(out).items() if s != "applied"} == {refused}
    assert out.outcomes[f"logprob.{refused}"]["reason"]
    assert out.loss.fusion in ("none", "native")


def test_of_two_names_of_the_loss_the_one_that_lost_did_not_take_effect() -> None:
    out = resolved(trainer_impl="mcore_native_fused", fusion_impl="none")
    assert out.loss.fusion == "none"
    assert statuses(out) == {"trainer_impl": "fell_back", "fusion_impl": "applied"}
    assert "--fusion-impl none" in out.outcomes["logprob.trainer_impl"]["reason"]
    assert statuses(resolved(trainer_impl="mcore_native_fused", fusion_impl="native")) == {
        "trainer_impl": "applied",
        "fusion_impl": "applied",
    }


def test_nothing_is_summed_where_logits_are_gathered() -> None:
    assert statuses(resolved(reduce="allgather_logits", selected_gather="masked_sum_allreduce"))["selected_gather"] == "unsupported"
    assert statuses(resolved(reduce="allgather_logits", selected_gather="local_gather"))["selected_gather"] == "applied"
    assert statuses(resolved(reduce="allreduce_partials", selected_gather="masked_sum_allreduce"))["selected_gather"] == "applied"


def test_every_knob_of_the_command_belongs_to_an_axis_of_the_family() -> None:
    owners = {knob.name: axes.axis_of_knob(f"logprob.{knob.name}") for knob in KNOBS}
    assert {name for name, axis in owners.items() if axis is None or axis.family != "logprob"} == set()


def test_head_knobs() -> None:
    assert resolved(head_dtype="fp32", materialization="last_token_only").head == HeadSettings(dtype=torch.float32, rows=1)
    assert resolved(head_dtype="bf16", materialization="full_prefill").head == HeadSettings()
    assert resolved(materialization="chunked").head == HeadSettings(rows=config().chunk_size)


def test_rounding_grows_with_the_logits_and_knows_no_column_that_is_cut_off() -> None:
    x_TV = torch.tensor([[10.0, -2.0, -math.inf], [1.0, -10.0, 0.0]])
    assert logprob_knobs.rounding_nats(x_TV) < 1e-5
    assert logprob_knobs.rounding_nats(x_TV / 0.001) == pytest.approx(1000 * logprob_knobs.rounding_nats(x_TV))
    # What it stands for: two float32 rows against float64, over a temperature.
    logits_TV = torch.randn(2000, 300, generator=torch.Generator().manual_seed(0)) * 3
    lost_TV = (logits_TV / 0.001).log_softmax(-1).double() - (logits_TV.double() / 0.001).log_softmax(-1)
    lost_T = lost_TV.gather(1, logits_TV.topk(2, dim=1).indices)[:, 1]
    assert 1e-4 < float(lost_T.max() - lost_T.min()) < logprob_knobs.rounding_nats(logits_TV.double() / 0.001)


def test_the_chain_is_temperature_and_transforms_in_the_order_asked_for() -> None:
    asked = {"soft_cap": "30", "logit_scale": "0.5", "transform_chain": "logit_scale,soft_cap,temperature"}
    assert logprob_knobs.chain_of(config(0.6, **asked)).texts == ["logit_scale(0.5)", "soft_cap(30)", "temperature(0.6)"]
    assert logprob_knobs.chain_of(config(0.6, soft_cap="30", top_k="5", logprobs_mode="raw_logprobs")).texts == ["soft_cap(30)"]


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        ("temperature_not_applied", ["soft_cap(30)", "logit_scale(0.5)"]),
        ("soft_cap_missing", ["logit_scale(0.5)", "temperature(0.6)"]),
        ("cap_after_scale", ["logit_scale(0.5)", "soft_cap(30)", "temperature(0.6)"]),
        ("top_p_renormalised", ["soft_cap(30)", "logit_scale(0.5)", "temperature(0.6)", "top_p(0.8)"]),
        ("eps", ["soft_cap(30)", "logit_scale(0.5)", "temperature(0.6)"]),
    ],
)
def test_plants_change_the_chain(plant: str, expected: list[str]) -> None:
    chain = logprob_knobs.chain_of(config(0.6, soft_cap="30", logit_scale="0.5"))
    assert logprob_knobs.planted_chain(chain, {plant}).texts == expected


def test_a_transform_without_its_place_in_the_order_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves out soft_cap"):
        logprob_knobs.chain_of(config(soft_cap="30", transform_chain="temperature"))


def test_under_the_pin_another_reduce_fell_back() -> None:
    for reduce, status in (("allgather_partials_fixed_merge", "applied"), ("allgather_logits", "fell_back")):
        outcomes = resolved(reduce=reduce).outcomes
        assert logprob_knobs.under_pin(outcomes, frozenset({"logprob"}))["logprob.reduce"]["status"] == status
        assert logprob_knobs.under_pin(outcomes, frozenset({"norm"})) == outcomes


def given(**values: Any) -> dict[str, Any]:
    names = [f"{side}knob_{k.name}" for k in KNOBS for side in (("", "trainer_", "rollout_") if k.side == "each" else ("",))]
    return {**dict.fromkeys(names), **values}


def test_options_become_knobs_of_both_sides_or_of_one() -> None:
    values = given(knob_head_dtype="bf16", trainer_knob_head_dtype="fp32", knob_trainer_impl="slime_vocab_parallel", knob_top_k=5, tp=2)
    knobs, rest = options.split_knobs("logprob", KNOBS, values)
    assert {k: v for k, v in knobs.items() if v is not None} == {
        "logprob.head_dtype": "bf16",
        "trainer.logprob.head_dtype": "fp32",
        "trainer.logprob.trainer_impl": "slime_vocab_parallel",
        "logprob.top_k": "5",
    }
    assert rest == {"tp": 2}
    settings = Settings(command="logprob", ckpt="x", knobs={k: v for k, v in knobs.items() if v is not None})
    assert settings.knobs_of("trainer") == {
        "logprob.head_dtype": "fp32",
        "logprob.trainer_impl": "slime_vocab_parallel",
        "logprob.top_k": "5",
    }
    assert settings.knobs_of("rollout") == {"logprob.head_dtype": "bf16", "logprob.top_k": "5"}
    assert settings.knobs_of("oracle") == {"logprob.head_dtype": "bf16", "logprob.top_k": "5"}
