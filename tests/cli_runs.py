"""Runs the command line as a user would, in a process of its own, and reads back what it said."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = "fixtures/tiny-qwen3"
LLAMA = "fixtures/tiny-llama"
WINDOW = "fixtures/tiny-mistral"  # every layer sees 24 tokens
MID = "fixtures/mid-qwen3"
MASK = ("--vocab-padding-policy", "mask")
TP2 = ("--trainer-tp", "2", "--rollout-tp", "2")
QUICK = ("--oracle", "off", "--max-new-tokens", "4")  # where the verdict needs neither the oracle nor many tokens
Meanwhile = Callable[[subprocess.Popen[str]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """One finished command."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        """The report on stdout (``--json``)."""
        data: dict[str, Any] = json.loads(self.stdout)
        return data

    @property
    def reasons(self) -> list[dict[str, Any]]:
        """The verdict's reasons, the one to act on first."""
        reasons: list[dict[str, Any]] = self.report["verdict"]["reasons"]
        return reasons

    @property
    def errors(self) -> list[str]:
        """The slugs of the error lines on stderr."""
        return re.findall(r"^error\[([\w-]+)\]", self.stderr, re.MULTILINE)

    def axis(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = next(row for row in self.report["axes"] if row["axis"] == name)
        return row

    def ratio(self, name: str) -> dict[str, Any]:
        """The drift of a pair of score sets that was measured."""
        drift: dict[str, Any] = next(row["drift"] for row in self.report["ratios"] if row["name"] == name)
        return drift

    def exits(self, code: int) -> Done:
        """This, after a check of the exit code that shows what was said if it is another."""
        said = self.reasons if self.stdout.startswith('{\n  "schema_version"') else self.stdout
        assert self.code == code, f"exit code {self.code}, not {code}: {said}\n{self.stderr}"
        return self


def command(name: str, *options: str, torchrun: int | None = None) -> list[str]:
    """The argument list of one command, under torchrun with that many ranks if given."""
    module = ["-m", "rlmismatch", name, *options]
    if torchrun is None:
        return [sys.executable, *module]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun), *module]


def run(
    name: str,
    *options: str,
    out: Path,
    torchrun: int | None = None,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    meanwhile: Meanwhile | None = None,
    timeout: float = 600,
) -> Done:
    """Run ``rlmismatch NAME OPTIONS --out OUT --json``, both sides' workers by `python` if given.

    `meanwhile` is called once the process has started (to kill something, say).
    """
    by = ("--trainer-python", python, "--rollout-python", python) if python else ()
    argv = command(name, *options, *by, "--out", str(out), "--json", torchrun=torchrun)
    return run_argv(argv, out=out, env=env, meanwhile=meanwhile, timeout=timeout)


def run_argv(
    argv: list[str], *, out: Path, env: Mapping[str, str] | None = None, meanwhile: Meanwhile | None = None, timeout: float = 600
) -> Done:
    """Run a whole command line from the root of the checkout; `out` is the run's folder in it."""
    started = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if meanwhile:
            meanwhile(process)
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return Done(code=process.returncode, stdout=stdout, stderr=stderr, folder=out, seconds=time.monotonic() - started)


@contextlib.contextmanager
def side_by_side(cases: Mapping[str, Callable[[], Done]]) -> Iterator[Mapping[str, Future[Done]]]:
    """Start every case in the given order, two at a time: one run alone leaves half of two cores idle while its engines start up."""
    pool = ThreadPoolExecutor(2)
    try:
        yield {name: pool.submit(case) for name, case in cases.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def selected(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """The values of `parameter` in the tests of the requesting module that this session runs: nothing is started for the others."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return {str(item.callspec.params[parameter]) for item in items if hasattr(item, "callspec") and parameter in item.callspec.params}


def workers(folder: Path | str) -> dict[int, str]:
    """Processes that write a log of this run, process id -> ``trainer-rank0``...: the engine workers and all that they started."""
    logs = Path(folder) / "logs"
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            log = Path(os.readlink(entry / "fd" / "1").removesuffix(" (deleted)"))
            if entry.name.isdigit() and log.parent == logs:
                found[int(entry.name)] = log.stem
    return found


def gone(folder: Path | str) -> None:
    """Check that no process of this run is left; one that was killed may take a moment to vanish."""
    wait_for(lambda: not workers(folder), f"the end of {workers(folder)}", timeout=5)


def worker(folder: Path | str, name: str) -> int:
    """The process id of the engine worker called ``trainer-rank0``..., not of what it started."""
    (pid,) = [p for p, log in workers(folder).items() if log == name and b"rlmismatch.engines.worker" in _argv(p)]
    return pid


def _argv(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 180) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not happen within {timeout} s")
