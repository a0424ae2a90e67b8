from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_runs import count

ROOT = Path(__file__).resolve().parents[1]


def test_runs_are_counted_at_rank_0_and_processes_at_every_rank() -> None:
    runs = count(["trainer megatron 0", "trainer megatron 1", "rollout vllm 0", "oracle oracle 0", "rollout vllm 0"])
    assert str(runs) == "4 real engine runs (trainer 1, rollout 2, oracle 1) in 5 processes"


@pytest.mark.parametrize("line", ["actor megatron 0", "trainer megatron", "trainer megatron zero"])
def test_a_malformed_line_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        count([line])


@pytest.mark.parametrize(
    ("body", "args", "code"),
    [
        ("def test_nothing(): pass", [], 0),
        ("def test_nothing(): pass", ["--require-engine-runs"], 1),
        ("def test_one_side(engine_run_log): engine_run_log('trainer', 'megatron', 0)", ["--require-engine-runs"], 1),
        (
            "def test_both(engine_run_log): engine_run_log('trainer', 'megatron', 0); engine_run_log('rollout', 'vllm', 0)",
            ["--require-engine-runs"],
            0,
        ),
    ],
)
def test_a_session_without_real_engines_fails_when_they_are_required(tmp_path: Path, body: str, args: list[str], code: int) -> None:
    (tmp_path / "test_inner.py").write_text(body)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
        "-o",
        "addopts=",
        *args,
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "real engine runs" in done.stdout
