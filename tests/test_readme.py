"""Runs what README.md shows, from top to bottom in one folder: later commands read what earlier ones wrote."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TIMEOUT_S = 600
# Commands that are not run here, and why. Anything else in a ```console block is.
NOT_RUN = {
    "make demo": "tools/demo.sh, which test_demo runs",
    "make test": "runs this file",
    "make fixture-smollm2": "installs packages; CI's environment is set up once",
    "rlmismatch probe --ckpt fixtures/smollm2": "needs make fixture-smollm2",
    "make setup DEVICE=cuda": "needs a GPU",
    "make test-gpu": "needs a GPU",
    "rlmismatch probe --ckpt DIR": "needs a GPU",
    "rlmismatch gemm --ckpt DIR": "needs a GPU",
}


def commands() -> list[tuple[str, int]]:
    """Every command of README's console blocks with the exit code that it shows (0 where it shows none)."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            command, _, comment = line.partition("   # exit ")
            found.append((command, int(comment.split()[0]) if comment else 0))
    return found


def is_run(command: str) -> bool:
    return not any(command.startswith(prefix) for prefix in NOT_RUN)


RUN = [case for case in commands() if is_run(case[0])]
# Starts engines, or reads what a command that does has left.
NEEDS_ENGINES = re.compile(r"rlmismatch (probe|gemm|attention|logprob|report) ")


def environment() -> dict[str, str]:
    """With this interpreter's scripts first: `rlmismatch`, `python` and `torchrun` are the ones under test."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """stdout and stderr of each; whatever is left of them after an error or a time-out is killed."""
    try:
        return [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: the checkout's fixtures, and the files that README spells out."""
    path = tmp_path_factory.mktemp("readme")
    (path / "fixtures").symlink_to(ROOT / "fixtures")
    for name, text in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        (path / name).write_text(text)
    return path


def case(command: str, code: int) -> object:
    return pytest.param(command, code, id=command, marks=pytest.mark.engines if NEEDS_ENGINES.search(command) else ())


@pytest.mark.parametrize(("command", "code"), [case(*c) for c in RUN])
def test_command(command: str, code: int, folder: Path) -> None:
    nodes = 1
    if "HOST:29400" in command:  # two nodes: here two agents of one machine
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            command = command.replace("HOST:29400", f"127.0.0.1:{free.getsockname()[1]}")
        nodes = 2
    agents = [start(command, folder) for _ in range(nodes)]
    output = finish(*agents)
    assert [agent.returncode for agent in agents] == [code] * nodes, "\n".join(out + err for out, err in output)


@pytest.mark.engines
def test_demo(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("fixtures", "rlmismatch"):
        (checkout / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tools", checkout / "tools")
    demo = start("tools/demo.sh", checkout)
    [(out, err)] = finish(demo)
    assert demo.returncode == 0, out + err
    assert re.search(r"^exit code 4, as expected$", out, re.MULTILINE)
    assert (checkout / "demo/report.md").read_text().startswith("#")
    assert '"schema_version"' in (checkout / "demo/report.json").read_text()
    # Numbers belong to a machine; the sections, and the commands behind them, are the demo's own.
    screen = README.split("```text\n")[1].split("```")[0]
    headings = re.findall(r"^[A-Z]\S+", screen, re.MULTILINE)
    assert "Attribution" in headings
    assert [word for word in headings if not re.search(rf"^{word}\b", out, re.MULTILINE)] == []
    assert [line for line in re.findall(r"^\$ (.*)", screen, re.MULTILINE) if line not in out] == []


def test_every_entry_of_not_run_is_in_the_readme() -> None:
    assert [prefix for prefix in NOT_RUN if not any(command.startswith(prefix) for command, _ in commands())] == []


def test_the_readme_shows_commands_that_are_run() -> None:
    assert len(RUN) >= 10
    assert {code for _, code in RUN} >= {0, 3, 4}
