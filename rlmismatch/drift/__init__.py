"""Drift between two sets of per-token log-probs: metrics in nats and float64, signatures, and the budget. Pure functions, no torch."""

from rlmismatch.drift.align import AlignedScores, Scores, align
from rlmismatch.drift.budget import LIMITS, Budget
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
from rlmismatch.drift.signatures import signatures
from rlmismatch.drift.summary import against_oracle, bit_equal, summarise, ulp_distance

__all__ = [
    "LIMITS",
    "AlignedScores",
    "Budget",
    "BudgetLine",
    "Drift",
    "Growth",
    "Hint",
    "Interval",
    "Invalid",
    "OracleError",
    "PositionBucket",
    "Scores",
    "SequenceDrift",
    "TokenDrift",
    "UlpBin",
    "against_oracle",
    "align",
    "bit_equal",
    "signatures",
    "summarise",
    "ulp_distance",
]
