"""What assembling a report asks of the process that does it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch import assemble, capture
from rlmismatch.arms import base_pins
from rlmismatch.assemble import rows
from rlmismatch.evidence import Evidence
from rlmismatch.settings import Settings


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
    evidence: Any = SimpleNamespace(settings=settings, base_pins=base_pins(settings))
    for side, words in (("trainer", trainer), ("rollout", rollout)):
        why = rows._held_anyway("attention", knobs["attention"], side, evidence)  # type: ignore[arg-type]
        assert bool(why) == bool(words)
        assert words in why


def test_an_override_that_is_empty_is_one_all_the_same(tmp_path: Path) -> None:
    """--fail-on "" reports drift and fails for nothing that is optional; options that were not given leave the run's own."""
    settings = Settings(command="probe", ckpt="c", budget=("mean_abs=0.5",), waive=("model.norm:eps",))
    capture.write_json(tmp_path / "run.json", {"settings": settings.to_json()})
    judged = Evidence(tmp_path, overrides={"fail_on": "", "budget": (), "waive": ()}).settings
    assert (judged.fail_on, judged.budget, judged.waive) == ("", settings.budget, settings.waive)
    assert Evidence(tmp_path, overrides={"fail_on": None}).settings == settings
