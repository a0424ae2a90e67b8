"""Progress on stderr: a bar on a terminal, plain lines elsewhere. stdout stays data."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, TextIO

from rlmismatch.engines.protocol import SideName

_SILENCE_S: Final = 10.0  # a log says how far the arms are at least this often, where any of them ends


class TerminalProgress:
    """Implements plan.Progress with rich on a terminal and with one line a step in a log."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=stream)
        self._live = console.is_terminal
        self._stream = stream
        self._started = self._said = time.monotonic()
        self._done = self._total = 0
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
        self._total = 0  # arms are counted where their number was said
        self._bar.reset(self._task, description=text, total=None)
        self._line(text)

    def arms(self, text: str, total: int) -> None:
        self._bar.reset(self._task, description=text, total=total)
        self._line(f"{text}: {total} {'arm' if total == 1 else 'arms'}")
        self._done, self._total = 0, total

    def arm_done(self, side: SideName, arm: str) -> None:
        self._bar.update(self._task, advance=1)
        self._done += 1
        if self._total and time.monotonic() - self._said >= _SILENCE_S:
            self._line(f"{self._done} of {self._total} {'arm' if self._total == 1 else 'arms'}, the last one {side} {arm}")

    def _line(self, text: str) -> None:
        if not self._live:
            self._said = time.monotonic()
            print(f"[{self._said - self._started:6.1f} s] {text}", file=self._stream, flush=True)
