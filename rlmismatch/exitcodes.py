"""The process exit codes. They are an interface: a test freezes them, and CI scripts switch on them."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a run ended as. 1 is left to Python, so that a traceback can never be taken for a verdict."""

    OK = 0  # contract holds, drift in budget, at least one token compared, every control behaved
    USAGE = 2  # bad option or bad input: the person can fix it
    DRIFT = 3  # comparable, but over the budget
    CONTRACT = 4  # SEMANTIC mismatch, not comparable (IDENTICAL), or a DEFECT against the float64 oracle
    INCONCLUSIVE = 5  # nothing compared, a knob without effect, evidence missing, a control failed
    ENGINE = 6  # an engine crashed, hung or was killed
    ENVIRONMENT = 7  # this machine cannot run it: engine not installed, too few devices, disk full
