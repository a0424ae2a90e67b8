"""Two runs: every changed fact is named, nothing that is the same is."""

from __future__ import annotations

import dataclasses

from rlmismatch import report
from rlmismatch.contract import FieldComparison, Outcome, Tier, read
from rlmismatch.report import compare
from rlmismatch.report.model import PlantInForce
from tests.report.golden import load


def test_a_report_and_itself_are_identical():
    for case in ("ok", "contract", "not_comparable", "inconclusive"):
        found = compare(load(case), load(case))
        assert found.identical
        assert found.changes == ()
        assert sum(found.same.values()) > 20
        assert "SAME" in report.render_comparison(found, "text")


def test_a_changed_bit_of_a_number_is_found():
    a = load("ok")
    drift = dataclasses.replace(a.ratios[0].drift, mean_abs=a.ratios[0].drift.mean_abs * (1 + 2**-52))
    b = dataclasses.replace(a, ratios=(dataclasses.replace(a.ratios[0], drift=drift), *a.ratios[1:]))
    (change,) = compare(a, b).changes
    assert (change.group, change.name) == ("drift", "trainer/prefill mean_abs")
    assert not compare(a, b).identical


def test_verdict_contract_knobs_and_provenance_changes_are_named():
    found = compare(load("contract"), load("ok"))
    changes = {(c.group, c.name): (c.before, c.after) for c in found.changes}
    assert (found.before.word, found.after.word) == ("CONTRACT", "OK")
    assert changes["contract", "logprob.vocab_padding:vocab_padding_policy @trainer"] == ("include", "mask")
    assert changes["contract", "logprob.vocab_padding:vocab_padding_policy"] == ("differs", "equal")
    assert changes["knobs", "logprob.reduce @rollout"] == ("allgather_logits, unsupported", "allgather_logits, applied")
    assert changes["setup", "trainer tp"] == (2, 1)
    assert changes["axes", "model.norm last"][0] is None
    assert any("padded vocabulary rows" in reason for reason in found.reasons_gone)
    assert "the two runs did not score the same checkpoint" in found.warnings
    back = compare(load("ok"), load("contract"))
    assert back.reasons_new == found.reasons_gone
    swapped = {(c.group, c.name): (c.after, c.before) for c in back.changes}
    assert swapped == changes


def test_an_environment_change_is_provenance():
    a = load("ok")
    b = dataclasses.replace(a, provenance={**a.provenance, "rollout": {**a.provenance["rollout"], "OMP_NUM_THREADS": "2"}})
    (change,) = compare(a, b).changes
    assert (change.group, change.name, change.before, change.after) == ("provenance", "rollout.OMP_NUM_THREADS", "1", "2")


def _with_tokens(digest):
    field = FieldComparison(
        axis="model.tokens",
        field="response_ids",
        tier=Tier.IDENTICAL,
        trainer=read(digest, "x"),
        rollout=read(digest, "x"),
        outcome=Outcome.EQUAL,
        fails=None,
    )
    return dataclasses.replace(load("ok"), contract=(*(c for c in load("ok").contract if c.axis != "model.tokens"), field))


def test_other_tokens_of_the_same_number_are_a_warning():
    assert compare(_with_tokens("aa"), _with_tokens("bb")).warnings == ("the two runs did not score the same tokens",)
    assert compare(_with_tokens("aa"), _with_tokens("aa")).warnings == ()


def test_void_numbers_are_not_compared_and_said_so():
    found = compare(load("not_comparable"), load("contract"))
    assert "the numbers of the first run are void" in found.warnings
    before = {c.name: c.before for c in found.changes if c.group == "drift"}
    assert "trainer/prefill mean_abs" in before
    assert set(before.values()) == {None}


def test_a_plant_is_a_warning_and_a_change():
    a = load("ok")
    b = dataclasses.replace(a, plants=(PlantInForce(id="eps", side="trainer", what="eps is 1e-5"),))
    found = compare(a, b)
    assert found.warnings == ("the second run has a plant in force: eps@trainer",)
    assert [(c.group, c.name) for c in found.changes] == [("setup", "plant eps@trainer")]
