"""Drift between two sets of per-token log-probs: metrics in nats and float64, signatures, and the budget. Pure functions, numpy only."""

from rlmismatch.drift.model import (
    BudgetLine,
    Drift,
    Growth,
    Hint,
    Interval,
    Invalid,
    OracleError,
    PositionBucket,
    SequenceDrift,
    TokenDrift,
    UlpBin,
)

__all__ = [
    "BudgetLine",
    "Drift",
    "Growth",
    "Hint",
    "Interval",
    "Invalid",
    "OracleError",
    "PositionBucket",
    "SequenceDrift",
    "TokenDrift",
    "UlpBin",
]
