"""``--compile``: a rollout of compiled code, measured against its own eager forward, and no claim about pins that never ran there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmismatch.arms import EAGER, NATIVE
from rlmismatch.assemble.scores import ScoreBook
from rlmismatch.evidence import Evidence
from tests.cli_runs import MASK, QUICK, TINY, Done, run

pytestmark = pytest.mark.engines

INERT = {"gemm", "norm", "qk_norm", "rope", "activation"}  # inside what vLLM compiles on a CPU; attention and the head stay outside


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run("probe", "--ckpt", TINY, *MASK, *QUICK, "--compile", "inductor", out=tmp_path_factory.mktemp("compile") / "inductor").exits(
        0
    )


def test_the_mode_is_read_back(compiled: Done) -> None:
    (knob,) = (row for row in compiled.report["knobs"] if row["knob"] == "model.compile")
    assert (knob["side"], knob["requested"], knob["status"]) == ("rollout", "inductor", "applied")
    mode = next(row for row in compiled.report["contract"] if (row["axis"], row["field"]) == ("model.compile", "mode"))
    assert mode["trainer"]["value"] == "eager"
    assert mode["rollout"]["value"] == "compiled DYNAMO_TRACE_ONCE, graphs NONE"


def test_inert_pins_are_named_and_nothing_is_claimed_of_them(compiled: Done) -> None:
    for row in compiled.report["closure"]:
        assert row["unequal"] is None
        named = row["why"].removeprefix("not claimed: compiled code never calls ").split(", ")
        assert set(named) >= INERT
        assert not {"attention", "head_gemm", "logprob"} & set(named)
    (control,) = (row for row in compiled.report["controls"] if row["name"] == "rollout: pins under compilation")
    assert "norm" in control["got"]


def test_what_compilation_moves_is_measured(compiled: Done, tmp_path: Path) -> None:
    rows = [row for row in compiled.report["measures"] if row["axis"] == "model.compile"]
    assert [row["what"].split(":")[0] for row in rows] == ["rollout prefill", "rollout chunked", "rollout decode"]
    assert all(row["value"] > 0 for row in rows)
    eager = run(
        "probe", "--ckpt", TINY, *MASK, "--oracle", "off", "--rollout", str(compiled.folder / "tokens.jsonl"), out=tmp_path / "eager"
    )
    books = [ScoreBook(Evidence(done.folder)) for done in (compiled, eager.exits(0))]
    for path in ("prefill", "decode"):
        aligned = books[0].aligned(books[0].get("rollout", EAGER, path), books[1].get("rollout", NATIVE, path))
        assert aligned is not None
        drift = books[0].summary(aligned)
        assert (drift.unequal, drift.tokens > 0) == (0, True), path


def test_a_pin_that_a_knob_asks_for_did_not_take_effect(tmp_path: Path) -> None:
    done = run("gemm", "--ckpt", TINY, *MASK, *QUICK, "--compile", "inductor", "--kernel", "triton", out=tmp_path / "run").exits(5)
    (knob,) = (row for row in done.report["knobs"] if row["knob"] == "gemm.kernel" and row["side"] == "rollout")
    assert knob["status"] == "fell_back"


def test_a_cpu_captures_no_graph(tmp_path: Path) -> None:
    done = run("probe", "--ckpt", TINY, *MASK, *QUICK, "--compile", "graph", out=tmp_path / "run").exits(5)
    (knob,) = (row for row in done.report["knobs"] if row["knob"] == "model.compile")
    assert (knob["actual"], knob["status"], knob["reason"]) == ("eager", "unsupported", "CPUs capture no graphs")
