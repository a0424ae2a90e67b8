"""What goes wrong around the engines: one clear error, the right exit code, finished captures kept, no process left behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import venv
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli_runs import MASK, QUICK, ROOT, TINY, TP2, Done, command, gone, run, run_argv, selected, side_by_side, wait_for, worker

# No run here gets to its end. Repeats keep both engines busy until something is done to one of them, however late the other one starts.
PROBE = ("--ckpt", TINY, *MASK, *QUICK, "--repeat", "200")
HANG_S = 60  # more than an engine takes to load, on a busy machine too


def measuring(folder: Path) -> None:
    """Wait until both engines are at work on arms."""
    wait_for(lambda: all(arms(folder, side) for side in ("trainer", "rollout")), "the first captures")


def arms(folder: Path, side: str) -> list[Path]:
    return sorted((folder / side / "arms").glob("*.safetensors"))


def killing(folder: Path, name: str, number: int) -> Callable[[subprocess.Popen[str]], None]:
    """Send a signal to one worker once both engines are measuring."""

    def act(_driver: subprocess.Popen[str]) -> None:
        measuring(folder)
        os.kill(worker(folder, name), number)

    return act


def signalling(folder: Path, number: int) -> Callable[[subprocess.Popen[str]], None]:
    """Send a signal to the driver once both engines are measuring."""

    def act(driver: subprocess.Popen[str]) -> None:
        measuring(folder)
        driver.send_signal(number)

    return act


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 kB: room for the first look, not for the captures."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("a small disk is a tmpfs, and mounting one needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def interrupted(out: Path) -> Done:
    # A shell that runs this suite in the background makes it ignore SIGINT; a person's terminal does not.
    argv = ["env", "--default-signal=INT", *command("probe", *PROBE, "--out", str(out), "--json")]
    return run_argv(argv, out=out, meanwhile=signalling(out, signal.SIGINT))


def without_vllm(out: Path) -> Done:
    venv.create(out.parent / "bare", with_pip=False)
    return run("probe", *PROBE, "--rollout-python", str(out.parent / "bare/bin/python"), out=out)


CASES: dict[str, Callable[[Path], Done]] = {
    "hang": lambda out: run("probe", *PROBE, "--timeout", str(HANG_S), out=out, meanwhile=killing(out, "trainer-rank0", signal.SIGSTOP)),
    "trainer killed": lambda out: run("probe", *PROBE, out=out, meanwhile=killing(out, "trainer-rank0", signal.SIGKILL)),
    "rollout killed": lambda out: run("probe", *PROBE, *TP2, out=out, torchrun=2, meanwhile=killing(out, "rollout-rank1", signal.SIGKILL)),
    "interrupted": interrupted,
    "driver killed": lambda out: run("probe", *PROBE, out=out, meanwhile=signalling(out, signal.SIGKILL)),
    "without vllm": without_vllm,
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Done]]]:
    """The selected cases, started; each is awaited by its own test."""
    folder, chosen = tmp_path_factory.mktemp("failures"), selected(request, "case")
    with side_by_side({name: functools.partial(make, folder / name / "run") for name, make in CASES.items() if name in chosen}) as started:
        yield started


def failed(done: Done, code: int, slug: str, *, captures: bool = True) -> dict[str, Any]:
    """The error. Checks that it is the only one, that nothing is left running, and that no report is made of the folder."""
    done.exits(code)
    assert done.errors == [slug], done.stderr
    assert "Traceback" not in done.stderr
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert (error["slug"], error["exit_code"]) == (slug, code)
    left_clean(done, captures=captures, reason=error["what"])
    return error


def left_clean(done: Done, *, captures: bool, reason: str, killed: bool = False) -> None:
    """No process, whole captures (if there were any), and `report` refuses the folder for `reason`.

    killed: nobody had a chance to tidy up. A capture that was being written may be left under its temporary name, which no reader
    takes for a capture.
    """
    gone(done.folder)
    for side in ("trainer", "rollout") if captures else ():
        assert arms(done.folder, side)
    for path in arms(done.folder, "trainer") + arms(done.folder, "rollout"):
        assert load_file(path)
    assert killed or not list(done.folder.rglob("*.tmp"))
    refused = subprocess.run(command("report", str(done.folder)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error[run-not-sealed]" in refused.stderr
    assert reason in refused.stderr


@pytest.mark.engines
@pytest.mark.parametrize("case", ["trainer killed"])
def test_a_worker_is_killed(case: str, runs: Mapping[str, Future[Done]]) -> None:
    error = failed(runs[case].result(), 6, "worker-killed")
    assert error["what"] == "trainer rank 0 was killed by SIGKILL"
    assert error["where"].endswith("logs/trainer-rank0.log")


@pytest.mark.engines
@pytest.mark.parametrize("case", ["rollout killed"])
def test_a_worker_of_another_torchrun_rank_is_killed(case: str, runs: Mapping[str, Future[Done]]) -> None:
    """Rank 0 of the side loses its peer in a collective; the error is the kill all the same."""
    error = failed(runs[case].result(), 6, "worker-killed")
    assert error["what"] == "rollout rank 1 was killed by SIGKILL"


@pytest.mark.engines
@pytest.mark.parametrize("case", ["hang"])
def test_a_worker_hangs(case: str, runs: Mapping[str, Future[Done]]) -> None:
    error = failed(runs[case].result(), 6, "engine-timeout")
    assert error["what"] == f"the trainer made no progress for {HANG_S} s"
    assert "--timeout" in error["hint"]


@pytest.mark.engines
@pytest.mark.parametrize("case", ["interrupted"])
def test_ctrl_c(case: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[case].result().exits(130)
    assert done.stderr.splitlines()[-1] == "interrupted: every worker was stopped; finished captures are kept"
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    left_clean(done, captures=True, reason="the run was interrupted")


@pytest.mark.engines
@pytest.mark.parametrize("case", ["driver killed"])
def test_the_driver_is_killed(case: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[case].result().exits(-signal.SIGKILL)
    left_clean(done, captures=True, reason="it was cut short", killed=True)


@pytest.mark.engines
@pytest.mark.parametrize("case", ["without vllm"])
def test_an_engine_is_not_installed(case: str, runs: Mapping[str, Future[Done]]) -> None:
    """Nothing is: the Python that was named has no package at all."""
    error = failed(runs[case].result(), 7, "engine-not-installed", captures=False)
    assert error["what"].startswith("vllm is not installed in ")
    assert "--rollout-python" in error["hint"]
    assert "pip install 'rlmismatch[vllm]'" in error["hint"]


@pytest.mark.engines
def test_the_disk_runs_full(small_disk: Path) -> None:
    """So full that not even the reason can be kept in the folder."""
    done = run("probe", *PROBE, out=small_disk / "run").exits(7)
    assert done.errors == ["output-unwritable"]
    assert "No space left on device" in done.stderr
    assert "--out" in done.stderr
    left_clean(done, captures=False, reason="it was cut short")


def test_the_disk_is_full_from_the_start(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 120_000)
    done = run("probe", *PROBE, out=small_disk / "run")
    assert done.exits(7).errors == ["output-unwritable"]
    assert not (small_disk / "run/logs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "hint"), [(("--device", "cuda"), "--device cpu"), (("--trainer-tp", "2", "--share-gpu"), "leave it out")]
)
def test_a_gpu_is_asked_for_and_there_is_none(options: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    done = run("probe", *PROBE, *options, out=tmp_path / "run")
    assert done.exits(7).errors == ["no-cuda-device"]
    assert hint in done.stderr
    assert not (tmp_path / "run/logs").exists()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def scrambled(path: Path) -> None:
    path.write_bytes(b"x" * 64 + path.read_bytes()[64:])


def with_a_nan(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path)


def with_a_tensor_missing(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "slug", "says"),
    [
        (truncated, "checkpoint-corrupt", "model.safetensors"),
        (scrambled, "checkpoint-corrupt", "model.safetensors"),
        (with_a_nan, "weights-not-finite", "model.layers.1.mlp.up_proj.weight: 1 NaN"),
        (with_a_tensor_missing, "checkpoint-tensors-do-not-match", "model.layers.1.mlp.up_proj.weight"),
    ],
    ids=["truncated", "scrambled", "nan", "missing"],
)
def test_a_damaged_checkpoint_is_refused_before_an_engine_starts(
    damage: Callable[[Path], None], slug: str, says: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / TINY, tmp_path / "ckpt")
    damage(tmp_path / "ckpt/model.safetensors")
    done = run("probe", "--ckpt", str(tmp_path / "ckpt"), out=tmp_path / "run")
    assert done.exits(2).errors == [slug]
    assert says in done.stderr
    assert not (tmp_path / "run/logs").exists()
