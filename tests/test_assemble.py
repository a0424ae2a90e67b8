"""What assembling a report asks of the process that does it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch import assemble, axes, capture, contract
from rlmismatch.arms import NATIVE, base_pins
from rlmismatch.assemble import notes, rows
from rlmismatch.engines.protocol import Arm, ArmResult
from rlmismatch.evidence import Evidence
from rlmismatch.settings import Settings, parse_declarations


def test_a_report_is_assembled_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def judged(folder: Path, **overrides: Any) -> Any:
        seen.append(torch.get_num_threads())
        raise RuntimeError("no run")

    monkeypatch.setattr(assemble, "_report", judged)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="no run"):
            assemble.report(Path("run"))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("knobs", "more", "trainer", "rollout"),
    [
        ({"attention": "on"}, {}, "", ""),
        ({"attention": "off"}, {}, "", ""),
        ({"attention": "on", "attention.merge_order": "global_block_index"}, {}, "another knob holds", "another knob holds"),
        ({"attention": "on", "attention.accum_dtype": "fp32"}, {}, "another knob holds", "another knob holds"),
        ({"attention": "on"}, {"cp": 2}, "no attention but the pin", ""),
        ({"attention": "on"}, {"cp": 2, "trainer_spec": "te"}, "", ""),
    ],
)
def test_a_knob_that_wants_the_engines_own_operation_did_not_take_effect_where_the_pin_is_held(
    knobs: dict[str, str], more: dict[str, Any], trainer: str, rollout: str
) -> None:
    settings = Settings(command="attention", ckpt="x", knobs=knobs, **more)
    pins = base_pins(settings)
    evidence: Any = SimpleNamespace(settings=settings, base_pins=pins)
    native = ArmResult(arm=Arm(id=NATIVE, pins=pins), calls=dict.fromkeys(pins, 1))
    book: Any = SimpleNamespace(arms={side: {NATIVE: native} for side in ("trainer", "rollout")})
    found = {row.side: row for row in rows.knobs(evidence, book) if row.knob == "attention"}
    for side, words in (("trainer", trainer), ("rollout", rollout)):
        assert (found[side].status, found[side].actual) == (("fell_back", "pinned") if words else ("applied", knobs["attention"]))
        assert words in found[side].reason


def test_an_override_that_is_empty_is_one_all_the_same(tmp_path: Path) -> None:
    """--fail-on "" reports drift and fails for nothing that is optional; options that were not given leave the run's own."""
    settings = Settings(command="probe", ckpt="c", budget=("mean_abs=0.5",), waive=("model.norm:eps",))
    capture.write_json(tmp_path / "run.json", {"settings": settings.to_json()})
    judged = Evidence(tmp_path, overrides={"fail_on": "", "budget": (), "waive": ()}).settings
    assert (judged.fail_on, judged.budget, judged.waive) == ("", settings.budget, settings.waive)
    assert Evidence(tmp_path, overrides={"fail_on": None}).settings == settings


def _judged(*, waive: tuple[str, ...] = (), declare: tuple[str, ...] = ()) -> Evidence:
    """Four fields of a run: one that differs, one that nobody knows, one that is equal, one that one side does not have."""
    settings = Settings(command="probe", ckpt="c", waive=waive, declare=declare)
    given: dict[str, dict[str, dict[str, contract.Reading]]] = {
        "trainer": {"model.norm": {"eps": contract.read(1e-5, "x"), "norm_dtype": contract.unknown("x")}},
        "rollout": {"model.norm": {"eps": contract.read(1e-6, "x"), "norm_dtype": contract.read("float32", "x")}},
    }
    given["trainer"]["gemm.runtime_flags"] = {"tf32": contract.read(False, "x"), "batch_invariant": contract.not_applicable("x")}
    given["rollout"]["gemm.runtime_flags"] = dict(given["trainer"]["gemm.runtime_flags"])
    declared = parse_declarations(declare)
    sides = {side: contract.declare(readings, declared[side]) for side, readings in given.items()}
    fields = {name: tuple(f for f in axes.by_id(name).fields if f.name in given["trainer"][name]) for name in given["trainer"]}
    evidence = Evidence(Path("run"))
    vars(evidence)["settings"] = settings
    vars(evidence)["comparisons"] = contract.compare(
        sides["trainer"][0],
        sides["rollout"][0],
        fields,
        waivers=waive,
        contradictions=(*sides["trainer"][1], *sides["rollout"][1]),
    )
    return evidence


def test_every_waiver_is_printed_with_what_it_did() -> None:
    assert list(notes.waivers(_judged())) == []
    assert list(notes.waivers(_judged(waive=("model.norm:eps", "gemm.runtime_flags:tf32", "model.mode:training")))) == [
        "waived: model.norm:eps (trainer 1e-05, rollout 1e-06)",
        "a waiver had nothing to act on: gemm.runtime_flags:tf32 (equal)",
        "a waiver had nothing to act on: model.mode:training (not compared)",
    ]


def test_every_declaration_is_printed_with_what_it_did() -> None:
    assert list(notes.declarations(_judged())) == []
    said = (
        "model.norm:norm_dtype=float32",  # what the trainer does not know
        "rollout.model.norm:norm_dtype=float32",
        "model.norm:eps=2",  # a contradiction, which is a reason of the verdict
        "gemm.runtime_flags:tf32=false",
        "gemm.runtime_flags:batch_invariant=true",
    )
    assert list(notes.declarations(_judged(declare=said))) == [
        "declared: trainer.model.norm:norm_dtype = float32",
        "a declaration had nothing to act on: rollout.model.norm:norm_dtype=float32 (read as float32)",
        "a declaration had nothing to act on: gemm.runtime_flags:tf32=false (read as false)",
        "a declaration had nothing to act on: gemm.runtime_flags:batch_invariant=true (not applicable)",
    ]


def test_what_other_options_declare_is_told_from_the_persons_own() -> None:
    evidence = _judged(declare=("trainer.model.norm:norm_dtype=float32",))
    vars(evidence)["settings"] = Settings(command="probe", ckpt="c")
    assert list(notes.declarations(evidence)) == ["declared: trainer.model.norm:norm_dtype = float32, by this run's other options"]
