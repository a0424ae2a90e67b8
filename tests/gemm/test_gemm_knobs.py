"""What the GEMM family's options become: shared options by another name, an environment, switches, and an outcome each."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from rlmismatch import axes
from rlmismatch.arms import base_pins, engine_knobs
from rlmismatch.commands import options
from rlmismatch.commands.gemm import KNOBS, OTHER_NAMES
from rlmismatch.engines import gemm_flags, gemm_knobs, megatron_model
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError
from rlmismatch.settings import Settings


def config(side: Any = "rollout", device: Any = "cpu", **knobs: str) -> SideConfig:
    return SideConfig(side=side, engine="vllm", ckpt="x", tp=2, device=device, knobs={f"gemm.{k}": v for k, v in knobs.items()})


def given(*arguments: str) -> dict[str, Any]:
    """The options of a command line, other names resolved."""
    seen: dict[str, Any] = {}

    @click.command()
    @options.options(*options.SHARED)
    @options.knob_options("gemm", KNOBS)
    @options.other_names(OTHER_NAMES)
    @click.pass_context
    def command(ctx: click.Context, /, **values: Any) -> None:
        seen.update(options.by_shared_names(ctx, OTHER_NAMES, values))

    done = CliRunner().invoke(command, ["--ckpt", "x", *arguments], standalone_mode=False)
    if done.exception:
        raise done.exception
    return seen


def test_the_familys_names_set_the_shared_options() -> None:
    out = given("--tensor-parallel-size", "2", "--sequence-parallel", "on", "--compute-dtype", "bf16", "--rollout.compute-dtype", "fp32")
    assert (out["trainer_tp"], out["rollout_tp"], out["sp"]) == (2, 2, True)
    assert (out["dtype"], out["trainer_dtype"], out["rollout_dtype"]) == ("bfloat16", None, "float32")
    assert not [name for name in out if name.startswith("other_")]


def test_one_side_may_differ_from_both() -> None:
    out = given("--tensor-parallel-size", "2", "--rollout.tensor-parallel-size", "1")
    assert (out["trainer_tp"], out["rollout_tp"]) == (2, 1)


def test_one_value_given_twice_is_one_setting() -> None:
    assert given("--tensor-parallel-size", "2", "--trainer-tp", "2", "--sp", "--sequence-parallel", "on")["sp"] is True


def test_a_yaml_file_names_options_as_the_command_line_does(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tensor-parallel-size: 2\ntf32: 'off'\ntrainer.tf32: 'on'\nformat: json\nwaive: [a:b]\n")
    out = given("--config", str(file))
    assert (out["trainer_tp"], out["rollout_tp"], out["knob_tf32"], out["trainer_knob_tf32"]) == (2, 2, "off", "on")
    assert (out["format_"], out["waive"]) == ("json", ("a:b",))
    with pytest.raises(UsageError, match="one setting"):
        given("--config", str(file), "--trainer-tp", "1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor-parallel-size", "2", "--trainer-tp", "1"),
        ("--trainer.tensor-parallel-size", "2", "--trainer-tp", "1"),
        ("--sequence-parallel", "off", "--sp"),
        ("--compute-dtype", "fp16", "--dtype", "bfloat16"),
    ],
    ids=" ".join,
)
def test_two_values_for_one_setting_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="one setting, and were given two values") as caught:
        given(*arguments)
    assert caught.value.slug == "option-conflict"


def settings(**knobs: str) -> Settings:
    return Settings(command="gemm", ckpt="x", knobs={k.replace("__", "."): v for k, v in knobs.items()})


def test_a_pin_holds_on_both_sides_and_an_engine_takes_the_rest() -> None:
    both = settings(gemm__kernel="triton", gemm__forward_reduce="rank_order")
    assert base_pins(both) == {"gemm", "forward_reduce"}
    assert engine_knobs(both, "trainer") == {}
    one = settings(trainer__gemm__forward_reduce="rank_order")
    assert base_pins(one) == frozenset()
    assert engine_knobs(one, "trainer") == {"gemm.forward_reduce": "rank_order"}
    assert engine_knobs(one, "rollout") == {}
    other = settings(gemm__forward_reduce="rank_order", trainer__gemm__forward_reduce="all_reduce")
    outcomes = gemm_knobs.sum_outcome(config("trainer", forward_reduce="all_reduce"), tp=2)
    assert engine_knobs(other, "trainer") == {"gemm.forward_reduce": "all_reduce"}
    assert gemm_knobs.under_pin(outcomes, base_pins(other))["gemm.forward_reduce"]["status"] == "fell_back"


def test_each_official_mode_has_its_sides_environment() -> None:
    trainer = gemm_knobs.environment(config("trainer", deterministic_mode="on"))
    assert (trainer["NCCL_ALGO"], trainer["CUBLAS_WORKSPACE_CONFIG"]) == ("Ring", ":4096:8")
    assert gemm_knobs.environment(config("trainer", deterministic_mode="off")) == {}
    assert gemm_knobs.environment(config("rollout", "cuda", batch_invariant="on")) == {"VLLM_BATCH_INVARIANT": "1"}
    assert gemm_knobs.environment(config("rollout", "cpu", batch_invariant="on")) == {}
    symmetric = gemm_knobs.environment(config("rollout", "cuda", all_reduce_backend="symm_mem"))
    assert symmetric == {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":4096:8 (one fixed workspace)"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":16:8 (one fixed workspace)"),
        ("NCCL_ALGO", "Ring", "Ring (one fixed choice)"),
        ("NCCL_ALGO", "Ring,Tree", "Ring,Tree (several allowed)"),
        ("NCCL_PROTO", None, "unset (chosen per call)"),
    ],
)
def test_variables_are_read_with_their_intent(name: str, value: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert gemm_flags.environment_reading(name).value == words


def test_switches_are_set_read_back_and_put_back() -> None:
    before = gemm_flags.tf32_allowed(), gemm_flags.reduced_precision_reading().value
    asked = config(tf32="on", bf16_reduced_precision_reduction="off")
    with gemm_flags.in_force(asked):
        assert (gemm_flags.tf32_reading().value, gemm_flags.reduced_precision_reading().value) == (True, False)
        outcomes = gemm_knobs.flag_outcomes(asked)
        assert {k: (o["actual"], o["status"]) for k, o in outcomes.items()} == {
            "gemm.tf32": ("on", "applied"),
            "gemm.bf16_reduced_precision_reduction": ("off", "applied"),
        }
        torch.backends.cuda.matmul.allow_tf32 = False  # an engine that sets it back
        assert gemm_knobs.flag_outcomes(asked)["gemm.tf32"]["status"] == "fell_back"
    assert (gemm_flags.tf32_allowed(), gemm_flags.reduced_precision_reading().value) == before


def test_tf32_is_read_although_the_newer_switch_was_used() -> None:
    matmul = torch.backends.cuda.matmul
    before = gemm_flags.tf32_allowed()
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32
        assert gemm_flags.tf32_reading().value is True
        assert gemm_flags.matmul_precision_reading().value is None
    finally:
        matmul.allow_tf32 = before


def test_the_dtype_of_products_is_that_of_their_operands() -> None:
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.no_grad(), gemm_flags.product_dtypes() as plain:
        linear(x)
    with torch.no_grad(), gemm_flags.product_dtypes() as cast, torch.autocast("cpu", torch.bfloat16):
        linear(x)
    assert (plain, cast) == ({"float32"}, {"bfloat16"})
    assert gemm_flags.compute_dtype_reading(plain, plain, "float32").value == "float32"
    assert gemm_flags.compute_dtype_reading({"bfloat16"}, {"float32"}, "float32").value == "bfloat16"  # a head that was asked to
    assert gemm_flags.compute_dtype_reading(plain, cast, "float32").value == ["bfloat16", "float32"]
    assert gemm_flags.compute_dtype_reading(set(), plain, "float32").value is None


def test_a_product_that_torch_does_not_see_is_seen_where_it_is_named() -> None:
    """vLLM's batch-invariant mode multiplies by Triton kernels of its own."""
    module = ModuleType("batch_invariant")
    module.matmul_persistent = lambda a, b, bias=None: a  # type: ignore[attr-defined]
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with gemm_flags.product_dtypes() as unseen:
        module.matmul_persistent(x, x)
    with gemm_flags.product_dtypes([(module, "matmul_persistent")]) as seen:
        module.matmul_persistent(x, x)
    assert (unseen, seen) == (set(), {"bfloat16"})


RAN = {"shm": {"512": 5}}


@pytest.mark.parametrize(
    ("knobs", "ran", "status", "actual"),
    [
        ({"all_reduce_backend": "shm"}, RAN, "applied", "shm"),
        ({"all_reduce_backend": "auto"}, RAN, "applied", "shm"),
        ({"all_reduce_backend": "gloo"}, RAN, "fell_back", "shm"),
        ({"all_reduce_backend": "shm"}, {}, "fell_back", "none"),
        ({"all_reduce_backend": "auto"}, {}, "fell_back", "none"),
        ({"all_reduce_backend": "shm"}, {**RAN, "gloo": {"64": 1}}, "fell_back", "shm, gloo"),
        ({"all_reduce_backend": "custom"}, RAN, "unsupported", "shm"),
        ({"all_reduce_backend": "shm", "forward_reduce": "reduce_scatter"}, {"reduce_scatter": {"8": 1}}, "unsupported", "reduce_scatter"),
    ],
)
def test_what_ran_decides_what_became_of_a_backend(knobs: dict[str, str], ran: Any, status: str, actual: str) -> None:
    (row,) = gemm_knobs.backend_outcome(config(**knobs), ran, tp=2).values()
    assert (row["status"], row["actual"]) == (status, actual)
    assert row["reason"]


def test_a_fallback_says_why_what_was_asked_for_did_not_run() -> None:
    (row,) = gemm_knobs.backend_outcome(config(all_reduce_backend="gloo"), RAN, tp=2, idle="vLLM disabled it").values()
    assert row["reason"] == "shm: 512 to 512 bytes; gloo: vLLM disabled it"
    (row,) = gemm_knobs.backend_outcome(
        config(all_reduce_backend="gloo"), {**RAN, "gloo": {"64": 1}}, tp=2, idle="vLLM disabled it"
    ).values()
    assert "disabled" not in row["reason"]


@pytest.mark.parametrize(("v2", "v3", "why"), [(False, False, "no flash-attn is installed"), (True, False, None), (False, True, None)])
def test_megatrons_batch_invariant_mode_needs_transformer_engines_flash_attention(
    monkeypatch: pytest.MonkeyPatch, v2: bool, v3: bool, why: str | None
) -> None:
    """Where it is asked for without, Transformer Engine has no attention left, and says so in its first forward."""
    utils = ModuleType("utils")
    utils.FlashAttentionUtils = SimpleNamespace(is_installed=v2, v3_is_installed=v3)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.attention.dot_product_attention.utils", utils)
    asked = dataclasses.replace(config(batch_invariant="on"), trainer_spec="te")
    refused = megatron_model.no_batch_invariance(asked)
    assert (why in refused) if why else refused == ""
    assert megatron_model.batch_invariant(asked) is not bool(why)
    local = config(batch_invariant="on")
    assert "stand in for Transformer Engine's" in megatron_model.no_batch_invariance(local)
    assert not megatron_model.batch_invariant(local)


def test_what_cannot_be_had_is_unsupported_with_a_reason() -> None:
    refused = gemm_knobs.mode_outcome(config(batch_invariant="on"), "batch_invariant", live=False, refused="no kernels for it")
    assert refused["gemm.batch_invariant"] == {"requested": "on", "actual": "off", "status": "unsupported", "reason": "no kernels for it"}
    off = gemm_knobs.mode_outcome(config(batch_invariant="off"), "batch_invariant", live=False, refused="no kernels for it")
    assert off["gemm.batch_invariant"]["status"] == "applied"
    assert gemm_knobs.sum_outcome(config(forward_reduce="all_reduce"), tp=1)["gemm.forward_reduce"]["status"] == "unsupported"
    assert gemm_knobs.not_for(config(colour="blue"), {}, "rollout")["gemm.colour"]["status"] == "unsupported"


def test_every_knob_leads_to_its_axis_with_the_tables_values() -> None:
    for knob in KNOBS:
        axis = axes.axis_of_knob(f"gemm.{knob.name}")
        assert axis is not None, knob.name
        values = next(v for k, v in axis.knobs.items() if k.endswith(f".{knob.name}"))
        assert knob.values == "|".join(values)
