"""torchrun's exit code is the verdict's, for `-m rlmismatch` and for nothing else."""

import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from rlmismatch import torchrun_exit


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        (["/x/bin/torchrun", "--nproc-per-node", "2", "-m", "rlmismatch", "probe"], True),
        (["/x/torch/distributed/run.py", "--module", "rlmismatch", "probe"], True),
        (["/x/bin/torchrun", "-m", "train", "--name", "rlmismatch"], False),
        (["/x/bin/torchrun", "train.py"], False),
        (["python", "-m", "rlmismatch"], False),
        ([], False),
    ],
)
def test_only_a_torchrun_of_ours_is_touched(argv: list[str], ours: bool) -> None:
    assert torchrun_exit.runs_rlmismatch(argv) is ours


def test_only_failed_workers_give_a_code() -> None:
    class ChildFailedError(Exception):
        def __init__(self, code: int) -> None:
            self.code = code

        def get_first_failure(self) -> tuple[int, SimpleNamespace]:
            return 0, SimpleNamespace(exitcode=self.code)

    assert torchrun_exit.exit_code(ChildFailedError(4)) == 4
    assert torchrun_exit.exit_code(ChildFailedError(-9)) is None  # killed by a signal: torchrun's own words are better
    assert torchrun_exit.exit_code(ValueError("x")) is None


def test_ctrl_c_and_sigterm_give_the_shells_codes() -> None:
    assert torchrun_exit.exit_code(SignalException("got it", sigval=signal.SIGINT)) == 130
    assert torchrun_exit.exit_code(SignalException("got it", sigval=signal.SIGTERM)) == 143


def test_the_plugin_is_registered_and_torchrun_passes_our_codes_through(tmp_path: Path) -> None:
    names = {e.name: e.value for e in metadata.entry_points(group="torchrun.handlers")}
    assert names.get("rlmismatch-exit-code") == "rlmismatch.torchrun_exit:install", "install the package: pip install -e ."
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = subprocess.run([*torchrun, "-m", "rlmismatch", "probe", "--ckpt", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ours.returncode == 2, ours.stderr
    assert ours.stderr.count("error[") == 1  # one rank speaks
    script = tmp_path / "other.py"
    script.write_text("raise SystemExit(4)")
    other = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, check=False)
    assert other.returncode == 1
