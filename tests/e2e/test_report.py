"""``rlmismatch report`` on real runs: the same report without an engine, another judgement, and no trust in what was touched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlmismatch.report import Report, render
from tests.cli_runs import ROOT, Done

pytestmark = pytest.mark.engines

# `python -c` with the engines, and what judges with them, out of reach.
WITHOUT_ENGINES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "megatron", "transformers", "triton"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
sys.argv = ["rlmismatch", *sys.argv[1:]]
from rlmismatch.cli import main
main()
"""


def again(*options: str, python: tuple[str, ...] = (sys.executable, "-m", "rlmismatch")) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, "report", *options], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(attributed: Done, tmp_path: Path) -> Path:
    """The run's folder, to be touched."""
    return Path(shutil.copytree(attributed.folder, tmp_path / "copy"))


def refused(folder: Path, slug: str) -> str:
    done = again(str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error[{slug}]" in done.stderr
    assert done.stderr.count("error[") == 1
    return done.stderr


@pytest.mark.parametrize("form", ["console", "text", "json", "markdown", "html", "junit"])
def test_it_is_the_runs_own_report_and_imports_no_engine(attributed: Done, form: str) -> None:
    done = again(str(attributed.folder), "--format", form, python=(sys.executable, "-c", WITHOUT_ENGINES))
    assert done.returncode == 0, done.stderr
    assert done.stdout == render(Report.from_json(attributed.report), form)
    assert done.stderr == ""


def test_the_runs_own_report_is_in_its_folder(attributed: Done) -> None:
    assert json.loads((attributed.folder / "report.json").read_text()) == attributed.report


def test_another_budget_is_another_verdict(attributed: Done) -> None:
    measured = attributed.ratio("trainer/prefill")["mean_abs"]
    done = again(str(attributed.folder), "--budget", f"mean_abs={measured / 2}", "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert (report["verdict"]["word"], report["verdict"]["exit_code"]) == ("DRIFT", 3)
    assert report["verdict"]["reasons"][0]["text"].startswith("mean_abs is ")
    assert report["ratios"] == attributed.report["ratios"]
    assert again(str(attributed.folder), "--budget", f"mean_abs={measured * 2}").returncode == 0
    only_reported = again(str(attributed.folder), "--budget", f"mean_abs={measured / 2}", "--fail-on", "contract,defect")
    assert only_reported.returncode == 0
    assert "mean_abs" in only_reported.stdout


def test_one_bit_of_one_score_is_seen(copy: Path) -> None:
    arm = copy / "trainer/arms/native.safetensors"
    data = bytearray(arm.read_bytes())
    data[-1] ^= 1
    arm.write_bytes(bytes(data))
    assert "changed: trainer/arms/native.safetensors" in refused(copy, "run-tampered")


def test_a_setting_that_was_edited_is_seen(copy: Path) -> None:
    run = copy / "run.json"
    run.write_text(run.read_text().replace('"vocab_padding_policy": "mask"', '"vocab_padding_policy": "include"'))
    assert "changed: run.json" in refused(copy, "run-tampered")


def test_a_run_without_its_seal_is_none(copy: Path) -> None:
    (copy / "SEAL.json").unlink()
    assert "did not complete" in refused(copy, "run-not-sealed")
    assert "is not a run folder" in refused(copy / "trainer", "run-not-found")


def test_a_copy_elsewhere_gives_the_same_numbers(copy: Path, attributed: Done) -> None:
    report = json.loads(again(str(copy), "--json").stdout)
    for part in ("verdict", "ratios", "attribution", "closure", "controls"):
        assert report[part] == attributed.report[part]


def test_two_runs_are_compared(attributed: Done, attributed_tp2: Done) -> None:
    both = (str(attributed.folder), str(attributed_tp2.folder))
    done = again(*both, "--json")
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    changes = {(c["group"], c["name"]): (c["before"], c["after"]) for c in comparison["changes"]}
    assert comparison["identical"] is False
    assert changes["setup", "trainer tp"] == changes["setup", "rollout tp"] == (1, 2)
    assert comparison["same"]["gates"] > 0
    text = again(*both, "--format", "text").stdout
    assert [word in text for word in ("mid-tp1", "mid-tp2", "trainer tp")] == [True] * 3


def test_a_run_compared_with_itself_has_not_changed(attributed: Done) -> None:
    done = again(str(attributed.folder), str(attributed.folder), "--json")
    assert done.returncode == 0
    comparison = json.loads(done.stdout)
    assert (comparison["identical"], comparison["changes"]) == (True, [])


def test_two_runs_have_no_junit_form(attributed: Done, attributed_tp2: Done) -> None:
    done = again(str(attributed.folder), str(attributed_tp2.folder), "--format", "junit")
    assert done.returncode == 2
    assert "error[format-not-for-two-runs]" in done.stderr
