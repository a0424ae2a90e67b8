"""Attribution on the real engines, on the fixture that is large enough for GEMM pins to show.

The chain: all pins close the gap exactly; so some smallest set does; it is run as it stands, and without each of its members; the
shares are taken over it alone, and add up to the whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlmismatch import assemble, capture
from rlmismatch.tokens import read_rollout
from tests.cli_runs import MID, Done

pytestmark = pytest.mark.engines


@pytest.fixture(params=["attributed", "attributed_tp2", "attributed_unequal_tp"])
def done(request: pytest.FixtureRequest) -> Done:
    run: Done = request.getfixturevalue(request.param)
    return run


def found(done: Done) -> dict[str, Any]:
    info: dict[str, Any] = done.report["attribution"]
    return info


def players(done: Done) -> dict[str, dict[str, Any]]:
    return {p["pin"]: p for p in found(done)["players"]}


def test_the_fix_set_closes_the_gap_and_no_member_can_be_dropped(done: Done) -> None:
    info = found(done)
    assert info["proved"] is True
    assert info["native_mean_abs"] > 1e-3
    whole, *drops = info["proof"]
    assert (whole["pins"], whole["dropped"], whole["unequal"]) == (info["fix_set"], "", 0)
    assert whole["tokens"] == done.report["header"]["tokens"] > 0
    assert [d["dropped"] for d in drops] == info["fix_set"]
    for drop in drops:
        assert drop["pins"] == [pin for pin in info["fix_set"] if pin != drop["dropped"]]
        assert drop["unequal"] > 0
        assert drop["mean_abs"] > 0


def test_norms_rope_and_attention_carry_the_drift_on_this_cpu(done: Done) -> None:
    assert {"norm", "qk_norm", "rope", "attention", "logprob"} <= set(found(done)["fix_set"])


def test_the_sum_over_ranks(attributed: Done, attributed_tp2: Done, attributed_unequal_tp: Done) -> None:
    """TP1: there is none. TP2 on both sides: two bf16 partials have one sum, whoever adds them. Against TP1 one side rounds none."""
    assert "forward_reduce" not in players(attributed)
    assert "forward_reduce (TP1 on both sides" in found(attributed)["note"]
    assert players(attributed_tp2)["forward_reduce"]["role"] == "zero set"
    assert players(attributed_unequal_tp)["forward_reduce"]["role"] == "fix set"
    assert players(attributed_unequal_tp)["forward_reduce"]["share"] > 0.01


def test_the_shares_add_up(done: Done) -> None:
    shares = {pin: p["share"] for pin, p in players(done).items() if p["share"] is not None}
    assert set(shares) == set(found(done)["fix_set"])
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)
    method = found(done)["shares_method"]
    assert method == "exact" if len(shares) <= 6 else "sampled" in method
    for pin in shares:
        interval = players(done)[pin]["share_interval"]
        assert interval["low"] <= shares[pin] <= interval["high"]


def test_the_zero_set_brings_back_exactly_nothing(done: Done) -> None:
    """Released last, with every other pin in force."""
    info = found(done)
    assert info["zero_set"]
    assert {players(done)[pin]["last"] for pin in info["zero_set"]} == {0.0}
    assert not set(info["zero_set"]) & set(info["fix_set"])
    assert {pin: p["last"] for pin, p in players(done).items() if pin in info["fix_set"] and not p["last"]} == {}


def test_nothing_remains_with_every_pin_in_force(done: Done) -> None:
    assert found(done)["remainder_mean_abs"] == 0
    assert [(row["unequal"], row["tokens"] > 0) for row in done.report["closure"]] == [(0, True)] * 3


def test_the_first_divergence_is_an_operation_on_equal_inputs(done: Done) -> None:
    rows = done.report["first_divergence"]
    (first,) = [row for row in rows if row["first"]]
    assert (first["boundary"], first["pin"]) == ("layers.0.input_norm", "norm")
    assert 0 < first["unequal"] <= first["count"]
    assert first["max_abs"] > 0
    assert first["trainer_error"] is not None
    assert first["rollout_error"] is not None
    assert {row["pin"] for row in rows if row["unequal"]} >= {"norm", "qk_norm", "rope", "attention"}


def test_the_report_says_how_to_run_it_again(attributed: Done) -> None:
    assert attributed.report["reproduce"].startswith(f"rlmismatch probe --attribute --ckpt {MID} ")


@pytest.mark.parametrize("arm", ["boundary", "local"])
def test_an_operation_that_one_side_never_saw_is_no_pass(attributed: Done, arm: str, tmp_path: Path) -> None:
    """An empty list of errors has no error in it."""
    folder = tmp_path / "run"
    shutil.copytree(attributed.folder, folder)
    assert assemble.report(folder).verdict.exit_code == 0
    sequences = read_rollout(folder / "tokens.jsonl")
    result = capture.read_arms(folder, "rollout")[arm]
    result.boundaries = {name: x for name, x in result.boundaries.items() if not name.endswith(".attention")}
    result.local = [e for e in result.local if e.pin != "attention"]
    capture.write_arm(folder, "rollout", result, sequences[:1] if arm == "boundary" else sequences)
    judged = assemble.report(folder).verdict
    assert (judged.word, judged.exit_code) == ("INCONCLUSIVE", 5)
    assert "attention" in judged.reasons[0].text
    for path in (folder / "rollout/arms").glob(f"{arm}.*"):
        path.unlink()
    assert assemble.report(folder).verdict.exit_code == 5
