"""Runs one measuring command: opens the world, drives the plan, renders, seals, and leaves no process behind."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rlmismatch import capture
from rlmismatch.commands import options
from rlmismatch.commands.terminal import TerminalProgress
from rlmismatch.engines.launch import Controller, follow
from rlmismatch.engines.node import Node, World
from rlmismatch.errors import EngineError, RlmismatchError, UsageError
from rlmismatch.settings import Settings
from rlmismatch.torchrun_exit import under_torchrun


def measure(command: str, given: Mapping[str, Any], *, knobs: Mapping[str, str | None] | None = None, attribute: bool = False) -> int:
    """What the four measuring commands do with their options; returns the exit code."""
    settings = options.settings_of(command, given, knobs=knobs, attribute=attribute)
    return run(settings, command_line=options.command_line(), format_=options.format_of(given), verbose=given["verbose"])


def run(settings: Settings, *, command_line: str, format_: str, verbose: bool) -> int:
    """Run the command on every rank; rank 0 renders. Returns the exit code of the verdict."""
    world = World.from_env(os.environ, settings.nproc if settings.nproc or under_torchrun(os.environ) else settings.world_size)
    with _terminate_as_interrupt(), contextlib.ExitStack() as cleanup:
        folder = Path()
        if world.rank == 0:
            folder = _new_folder(settings)
            cleanup.callback(capture.release, folder)
        node = Node(world, folder, settings.timeout)
        cleanup.callback(node.close)
        if world.rank != 0:
            return _follow(node)
        controller = Controller(node, settings.timeout)
        code: int = 1  # what Python exits with on an error of our own
        try:
            code = _lead(settings, controller, folder, command_line=command_line, format_=format_, verbose=verbose)
        except RlmismatchError as error:
            code = error.exit_code
            _keep_failure(folder, error)
            raise
        except KeyboardInterrupt:
            code = 130
            _keep_failure(folder, EngineError("interrupted", "the run was interrupted"))
            raise
        finally:
            node.close()
            capture.remove_unfinished(folder)
            # From here on another rank's non-zero exit may make torchrun end this one too; what is left takes milliseconds.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            controller.finish(code)
        return code


def _lead(settings: Settings, controller: Controller, folder: Path, *, command_line: str, format_: str, verbose: bool) -> int:
    from rlmismatch import assemble, inputs, report
    from rlmismatch.evidence import wanted_axes
    from rlmismatch.plan import Run

    wanted_axes(settings)
    prepared = inputs.prepare(settings)
    with TerminalProgress(sys.stderr) as progress:
        controller.progress = progress.arm_done
        Run(
            settings=settings, inputs=prepared, folder=folder, controller=controller, progress=progress, command_line=command_line
        ).execute()
        progress.step("judging")
    result = assemble.report(folder)
    capture.write_json(folder / "report.json", result.to_json())
    capture.seal(folder)
    print(report.render(result, format_, verbose=verbose), end="", flush=True)
    print(f"captures and report: {folder}", file=sys.stderr)
    return result.verdict.exit_code


def _follow(node: Node) -> int:
    try:
        return follow(node)
    except (RuntimeError, OSError) as error:
        raise EngineError("driver-lost", f"rank 0 cannot be reached any more: {error}", hint="see rank 0's output") from None


def _new_folder(settings: Settings) -> Path:
    """The run's folder, which from here on is no other run's: new, or empty but for why an earlier run did not get to its engines."""
    if settings.out:
        folder = Path(settings.out)
        if folder.is_file():
            raise UsageError("out-is-a-file", f"--out {folder} is a file", hint="name a folder")
        if not capture.claim(folder):
            raise UsageError(
                "out-not-empty", f"{folder} is not empty", where=str(folder), hint="captures are never overwritten: choose another --out"
            )
        return folder.resolve()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path("runs") / (f"{stamp}-{settings.command}" + (f"-{number}" if number > 1 else ""))
        if capture.claim(folder):
            break
    return folder.resolve()


def _keep_failure(folder: Path, error: RlmismatchError) -> None:
    """Leave the reason beside the captures that were finished; a full disk must not hide the error itself."""
    with contextlib.suppress(RlmismatchError):
        capture.write_json(folder / "failure.json", error.to_json())


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (from torchrun, a scheduler, `kill`) unwinds like Ctrl-C, so that workers are stopped."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, before)
