"""Tells whether this is a rank of torchrun's, and lets the verdict's exit code through torchrun.

torchrun raises `ChildFailedError` when a worker exits non-zero, and so exits 1 itself whatever the worker's code was. CI gates
on our codes, so the package registers this module under torchrun's own plugin group ``torchrun.handlers``: torchrun loads it in
its agent process. It acts only if that process runs ``-m rlmismatch``; any other torchrun is left alone.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any


def under_torchrun(env: Mapping[str, str]) -> bool:
    """Whether torchrun started this process. A shell, or a scheduler, may have left one of its variables, which means nothing alone."""
    return "RANK" in env and "WORLD_SIZE" in env


def speaks(env: Mapping[str, str]) -> bool:
    """Whether this process prints: of torchrun's ranks the first does, and one without all variables: it has no peers."""
    return not under_torchrun(env) or "MASTER_PORT" not in env or not env["RANK"].isdecimal() or int(env["RANK"]) == 0


def runs_rlmismatch(argv: list[str]) -> bool:
    """Whether a torchrun command line starts this tool: ``torchrun [...] -m rlmismatch ...``."""
    program = os.path.basename(argv[0]) if argv else ""
    if program not in ("torchrun", "run.py"):  # python -m torch.distributed.run
        return False
    return any(flag in ("-m", "--module") and module == "rlmismatch" for flag, module in itertools.pairwise(argv))


def install() -> Any:
    """Entry point of ``torchrun.handlers``: installs the hook in a torchrun agent of ours; returns a rendezvous creator nobody asks for."""
    if runs_rlmismatch(sys.argv):
        sys.excepthook = _exit_with_worker_code
    return _no_rendezvous


def exit_code(error: BaseException) -> int | None:
    """The code to exit with, if `error` is how torchrun ends: the first failed worker's, or 128 + the signal that torchrun got."""
    if type(error).__name__ == "SignalException":  # Ctrl-C, or a scheduler; the workers were stopped and have said so
        return 128 + int(error.sigval)  # type: ignore[attr-defined]
    if type(error).__name__ != "ChildFailedError":
        return None
    code: int = error.get_first_failure()[1].exitcode  # type: ignore[attr-defined]
    return code if code > 0 else None


def _exit_with_worker_code(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    code = exit_code(error)
    if code is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _no_rendezvous(_params: object) -> Any:
    raise ValueError("rlmismatch-exit-code is not a rendezvous backend")
