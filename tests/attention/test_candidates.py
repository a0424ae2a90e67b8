"""Other attention backends on known operands, as far as they run without a GPU; and what the attention knobs ask of a side."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from rlmismatch import attention_policies
from rlmismatch.arms import base_pins, engine_knobs
from rlmismatch.attention_policies import Operands, Policy
from rlmismatch.engines import attention_candidates as candidates
from rlmismatch.engines import attention_knobs
from rlmismatch.engines.attention_candidates import FACTS, FORMS, Candidate
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins import attention_policy
from rlmismatch.settings import Settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def given() -> Operands:
    return next(iter(candidates.synthetic(CPU, torch.bfloat16).values()))


def side(**knobs: str) -> SideConfig:
    return SideConfig(side="trainer", engine="megatron", ckpt="x", knobs={f"attention.{k}": v for k, v in knobs.items()})


@pytest.mark.parametrize("name", ["te", "flash_attn", "flashinfer"])
def test_a_backend_that_cannot_run_says_why_and_nothing_stands_in(name: str, given: Operands) -> None:
    found = candidates.find(name, CPU)
    assert found.why_not.endswith("needs a GPU")
    with pytest.raises(RuntimeError, match="needs a GPU"):
        found.attend("full", [given])
    assert candidates.measure([found], {"x": given}) == ({}, [])


def test_what_compiles_for_minutes_is_tried_where_backends_are_to_be_tried() -> None:
    assert "rlmismatch attention" in attention_knobs.candidate_facts(side())["flashinfer"]
    for config in (replace(side(), try_backends=True), side(backend_candidate="flashinfer")):
        assert attention_knobs.candidate_facts(config)["flashinfer"] == "not run: FlashInfer needs a GPU"


def test_flashinfer_is_not_asked_for_a_head_size_that_it_would_compile_for_in_vain(
    given: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("flashinfer")  # without a single function, as nothing may be called
    module.__spec__ = ModuleSpec("flashinfer", loader=None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    narrow = replace(given, q_THD=given.q_THD[..., :32], k_THD=given.k_THD[..., :32], v_THD=given.v_THD[..., :32])
    tensors, notes = candidates.measure([candidates.find("flashinfer", torch.device("cuda"))], {"narrow": narrow})
    assert tensors == {}
    assert notes == [
        f"backend candidate flashinfer, {form}, narrow: ValueError: no kernel for heads of 32; it has 64, 128, 256" for form in FORMS
    ]


def test_sdpa_is_measured_in_every_form_that_it_has(given: Operands) -> None:
    tensors, notes = candidates.measure([candidates.find("sdpa", CPU)], {"x": given})
    assert sorted(tensors) == [f"backend/sdpa/{form}/x" for form in ("chunked", "decode", "full")]
    assert notes == []
    for facts in tensors.values():
        named = dict(zip(FACTS, facts.tolist(), strict=True))
        assert (named["repeats"], named["batch_invariant"]) == (1.0, 1.0)
        assert named["mean_error"] < 2.0**-7 * named["mean_size"]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_last_rows_of_the_sequence(form: candidates.Form, given: Operands) -> None:
    asked = candidates.rows_of(form, given)
    torch.testing.assert_close(attention_policies.exact(asked), attention_policies.exact(given)[-len(asked.q_THD) :], rtol=0, atol=1e-14)


def test_pages_hold_each_sequence_in_logical_order(given: Operands) -> None:
    other = replace(given, k_THD=given.k_THD + 1, v_THD=given.v_THD - 1)
    k_cache, v_cache, table = candidates.pages([given, other], 16)
    for row, sequence in zip(table, (given, other), strict=True):
        for cache, whole in ((k_cache, sequence.k_THD), (v_cache, sequence.v_THD)):
            assert torch.equal(cache[row.long()].flatten(0, 1)[: len(whole)], whole)
    assert table.flatten().tolist() == sorted(table.flatten().tolist(), reverse=True)


def test_a_backend_that_errs_in_a_form_is_a_note_and_no_number(given: Operands) -> None:
    def attend(form: candidates.Form, sequences: Any) -> list[torch.Tensor]:
        if form == "paged":
            raise NotImplementedError("no pages\nmore words")
        return candidates.find("sdpa", CPU).attend(form, sequences)

    broken = Candidate(name="broken", version="1", attend=attend)
    tensors, notes = candidates.measure([broken], {"x": given})
    assert not [key for key in tensors if "/paged/" in key]
    assert notes == ["backend candidate broken, paged, x: NotImplementedError: no pages"]
    assert candidates.capability(broken, CPU, torch.bfloat16) == "full, chunked, decode; repeatable; batch invariant"


def test_splitting_by_load_is_not_batch_invariant() -> None:
    planted = candidates.splitting_by_load(candidates.find("sdpa", CPU))
    assert candidates.capability(planted, CPU, torch.bfloat16) == "full, chunked, decode; repeatable; not batch invariant"


def test_a_backend_that_never_gives_the_same_bits_is_not_repeatable(given: Operands) -> None:
    turns = iter(range(1000))

    def attend(form: candidates.Form, sequences: Any) -> list[torch.Tensor]:
        return [x.q_THD * 0 + next(turns) for x in sequences]

    assert candidates.capability(Candidate(name="x", version="", attend=attend), CPU, torch.bfloat16).endswith(
        "; not repeatable; not batch invariant"
    )


@pytest.mark.parametrize(
    ("knobs", "policy"),
    [
        ({}, None),
        ({"accum_dtype": "fp32", "downcast_at": "final_write"}, None),
        ({"accum_dtype": "bf16"}, Policy(downcast="per_block", block=16)),
        ({"downcast_at": "per_partial"}, Policy(downcast="per_partial", block=64)),
        ({"downcast_at": "per_block", "accum_dtype": "fp32"}, Policy(downcast="per_block", block=64)),
    ],
)
def test_knobs_set_the_pins_arithmetic(knobs: dict[str, str], policy: Policy | None) -> None:
    resolved = attention_knobs.resolve(side(**knobs))
    assert resolved.policy == policy
    assert {k: o["status"] for k, o in resolved.outcomes.items()} == dict.fromkeys((f"attention.{k}" for k in knobs), "applied")


@pytest.mark.parametrize(
    ("config", "knob"),
    [
        (replace(side(accum_dtype="bf16"), dtype="float32"), "accum_dtype"),
        (side(accum_dtype="bf16", downcast_at="per_partial"), "downcast_at"),
        (side(backend_candidate="flashinfer"), "backend_candidate"),
        (replace(side(backward_backend="native"), cp=2), "backward_backend"),
    ],
)
def test_what_a_side_cannot_take_is_unsupported_with_the_reason(config: SideConfig, knob: str) -> None:
    outcome = attention_knobs.resolve(config).outcomes[f"attention.{knob}"]
    assert outcome["status"] == "unsupported"
    assert outcome["actual"] != outcome["requested"]
    assert outcome["reason"]


def test_an_arithmetic_holds_the_pin_on_both_sides_and_reaches_the_one_it_is_for() -> None:
    one = Settings(command="attention", ckpt="x", knobs={"trainer.attention.accum_dtype": "bf16"})
    assert base_pins(one) == {"attention"}
    assert engine_knobs(one, "trainer") == {"attention.accum_dtype": "bf16"}
    assert engine_knobs(one, "rollout") == {}
    fold = Settings(command="attention", ckpt="x", knobs={"attention.merge_order": "global_block_index"})
    assert base_pins(fold) == {"attention"}
    assert engine_knobs(fold, "trainer") == {}


def test_the_policy_reads_pages_in_logical_order(given: Operands) -> None:
    policy = Policy(downcast="per_block", block=16)
    k_cache, v_cache, table = candidates.pages([given], 16)
    rows, tokens = 40, len(given.k_THD)
    whole = attention_policies.simulate(given, policy)
    (out,) = attention_policy.paged(
        torch.cat([given.q_THD[-rows:], given.q_THD[:3]]), k_cache, v_cache, table, [0, rows], [tokens], scale=given.scale, policy=policy
    )
    assert torch.equal(out[:rows], whole[-rows:])
    assert (out[rows:] == 0).all()  # padding
