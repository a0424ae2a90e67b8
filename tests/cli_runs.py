"""Runs the command line as a user would, in a process of its own, and reads back what it said."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = "fixtures/tiny-qwen3"
LLAMA = "fixtures/tiny-llama"
MID = "fixtures/mid-qwen3"
MASK = ("--vocab-padding-policy", "mask")


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

    def axis(self, name: str) -> dict[str, Any]:
        return next(row for row in self.report["axes"] if row["axis"] == name)

    @property
    def first_reason(self) -> dict[str, Any]:
        reason: dict[str, Any] = self.report["verdict"]["reasons"][0]
        return reason


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
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    timeout: float = 600,
) -> Done:
    """Run ``rlmismatch NAME OPTIONS --out OUT --json``. `meanwhile` is called once the process has started (to kill something, say)."""
    argv = command(name, *options, "--out", str(out), "--json", torchrun=torchrun)
    started = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if meanwhile:
            meanwhile(process)
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Done(code=process.returncode, stdout=stdout, stderr=stderr, folder=out, seconds=time.monotonic() - started)


def workers(folder: Path | str) -> list[int]:
    """Process ids of the engine workers whose config names this run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if b"rlmismatch.engines.worker" not in argv:
                continue
            config = Path(argv[argv.index(b"rlmismatch.engines.worker") + 1].decode())
            if json.loads(config.read_text())["run"] == str(folder):
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
    return found


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 120) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {timeout} s")
