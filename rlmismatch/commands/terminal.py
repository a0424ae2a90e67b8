"""Progress on stderr: a bar on a terminal, plain lines elsewhere. stdout stays data."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rlmismatch.engines.protocol import SideName


class TerminalProgress:
    """Implements plan.Progress with rich on a terminal and with one line a step in a log."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=stream)
        self._live = console.is_terminal
        self._stream = stream
        self._started = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def step(self, text: str) -> None:
        self._bar.reset(self._task, description=text, total=None)
        self._line(text)

    def arms(self, text: str, total: int) -> None:
        self._bar.reset(self._task, description=text, total=total)
        self._line(f"{text}: {total} arms")

    def arm_done(self, side: SideName, arm: str) -> None:
        self._bar.update(self._task, advance=1)

    def _line(self, text: str) -> None:
        if not self._live:
            print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=self._stream, flush=True)
