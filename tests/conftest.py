"""Counts the real engines that the session started, so that a green run says what it stands on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine_runs import ENGINE_LOG, EngineRuns, count
from tests.preloaded import preloaded_python

_LOG = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-engine-runs",
        action="store_true",
        help="fail unless at least one real trainer and one real rollout engine ran: skipped engine tests are not a pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    handle, path = tempfile.mkstemp(prefix="rlmismatch-engines-")
    os.close(handle)
    config.stash[_LOG] = Path(path)
    os.environ[ENGINE_LOG] = path


def pytest_unconfigure(config: pytest.Config) -> None:
    if _LOG in config.stash:
        config.stash[_LOG].unlink(missing_ok=True)
        os.environ.pop(ENGINE_LOG, None)


def _runs(config: pytest.Config) -> EngineRuns:
    return count(config.stash[_LOG].read_text().splitlines())


def _engines_missing(config: pytest.Config) -> bool:
    runs = _runs(config)
    return bool(config.getoption("--require-engine-runs")) and not (runs.trainer and runs.rollout)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _engines_missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_sep("-", str(_runs(config)))
    if _engines_missing(config):
        terminalreporter.write_line("FAILED: no real trainer, or no real rollout engine ran", red=True)


@pytest.fixture
def engine_run_log() -> Callable[[str, str, int], None]:
    """For tests that load an engine without `rlmismatch.engines.worker`: ``engine_run_log(side, engine, rank)`` counts one process."""

    def log(side: str, engine: str, rank: int) -> None:
        with Path(os.environ[ENGINE_LOG]).open("a") as file:
            file.write(f"{side} {engine} {rank}\n")

    return log


@pytest.fixture(scope="session")
def preloaded() -> Iterator[str]:
    """For ``--trainer-python`` and ``--rollout-python``: a Python whose workers have their engine imported when they start."""
    with preloaded_python() as python:
        yield python
