"""The budget: how much drift is allowed, and each limit against what was measured."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rlmismatch.drift.model import BudgetLine, Drift, OracleError
from rlmismatch.errors import UsageError

_AT_LEAST: Final = ("bit_equal_share", "ess")
_SIGNED: Final = ("signed_mean", "k1")  # compared by size
_FORM: Final = "--budget mean_abs=0.01,max=0.2, or a YAML file"
ORACLE: Final = "oracle_error_ratio"
RECORDED: Final = "decode/recorded"  # the ratio whose values training uses
OF_RECORDED: Final = "(recorded)"
_ENOUGH: Final = (
    16  # tokens whose mean errors can be divided: of fewer, honest sides are more than twice apart every fourth time or oftener
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits by metric name; None is no limit. Nats where the metric is in nats; signed metrics are limited in size.

    ``bit_equal_share`` and ``ess`` are lower limits, all others upper ones. ``explicit`` names the limits that a person set.
    """

    token_mult_prob_error: float | None = 1.05
    oracle_error_ratio: float | None = 2.0
    signed_mean: float | None = None
    mean_abs: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None
    clip_share: float | None = None
    bit_equal_share: float | None = None
    ess: float | None = None
    explicit: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"budget {name} must be a finite number of at least 0, got {value}")

    @classmethod
    def parse(cls, *texts: str) -> Budget:
        """A budget over the defaults; each text is ``"mean_abs=0.01,max=0.2"`` or a YAML file of the same keys, a later one wins.

        Raises UsageError: ``budget-unknown-key`` (with the nearest known one), ``budget-malformed``, ``file-unreadable``.
        """
        limits: dict[str, Any] = {}
        for text in texts:
            is_file = text.endswith((".yaml", ".yml"))
            given = _read_yaml(Path(text)) if is_file else _read_pairs(text)
            cls.from_mapping(given, where=text if is_file else "--budget")
            limits |= given
        return cls.from_mapping(limits)

    @classmethod
    def from_mapping(cls, limits: Mapping[str, Any], *, where: str = "") -> Budget:
        """A budget over the defaults; values may be numbers or their text. Raises UsageError as `parse`."""
        values: dict[str, Any] = {}
        for name, value in limits.items():
            if name not in LIMITS:
                near = difflib.get_close_matches(str(name), LIMITS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known limits: {', '.join(LIMITS)}"
                raise UsageError("budget-unknown-key", f"there is no limit {name!r}", where=where, hint=hint)
            try:
                if isinstance(value, bool):
                    raise ValueError(f"{value} is not a number")
                values[name] = float(value)
                cls(**{name: values[name]})
            except (TypeError, ValueError):
                raise UsageError("budget-malformed", f"{name} must be a finite number of at least 0, got {value!r}", where=where) from None
        return cls(**values, explicit=frozenset(values))

    def check(
        self, drift: Drift | None, *, oracle: Mapping[str, OracleError] | None = None, recorded: Drift | None = None
    ) -> tuple[BudgetLine, ...]:
        """One line per limit, in the order of the fields. A value that is None or NaN is never within.

        drift: of the headline ratio; None when it was not measured. oracle: side -> its error; one line per side. Without an oracle
        a default `oracle_error_ratio` is "not measured" and not required, nor is it of a few tokens; one that a person set is required.
        recorded: of decode against the log-probs that came with the tokens, which has the limit of the mean probability ratio as well.
        """
        lines = []
        for name in LIMITS:
            allowed = getattr(self, name)
            if allowed is None:
                continue
            if name == ORACLE:
                lines += self._oracle_lines(allowed, oracle or {})
                continue
            value = None if drift is None else getattr(drift, name)
            why = "the drift was not measured" if drift is None else "; ".join(i.text for i in drift.invalid[:1])
            lines.append(_line(name, allowed, abs(value) if value is not None and name in _SIGNED else value, why=why))
            if name == "token_mult_prob_error" and recorded is not None:
                why = "; ".join(i.text for i in recorded.invalid[:1])
                lines.append(_line(f"{name} {OF_RECORDED}", allowed, recorded.token_mult_prob_error, why=why))
        return tuple(lines)

    def _oracle_lines(self, allowed: float, oracle: Mapping[str, OracleError]) -> list[BudgetLine]:
        if not oracle:
            return [_line(ORACLE, allowed, None, why="no oracle was run", required=ORACLE in self.explicit)]
        lines = []
        for side, error in oracle.items():
            few = ORACLE not in self.explicit and error.drift.tokens < _ENOUGH
            too_few = f"means over {error.drift.tokens} tokens say too little, it takes {_ENOUGH}"
            value, why = (None, too_few) if few else (error.ratio, error.why_no_ratio)
            lines.append(_line(f"{ORACLE} ({side})", allowed, value, why=why, required=not few))
        return lines


LIMITS: Final[tuple[str, ...]] = tuple(f.name for f in dataclasses.fields(Budget) if f.name != "explicit")


def _line(limit: str, allowed: float, value: float | None, *, why: str = "", required: bool = True) -> BudgetLine:
    at_least = limit in _AT_LEAST
    if value is None or math.isnan(value):
        return BudgetLine(
            limit=limit,
            sense="at least" if at_least else "at most",
            allowed=allowed,
            value=None,
            status="not measured",
            required=required,
            why=why or "it is not a number",
        )
    within = value >= allowed if at_least else value <= allowed
    return BudgetLine(
        limit=limit,
        sense="at least" if at_least else "at most",
        allowed=allowed,
        value=value,
        status="within" if within else "over",
        required=required,
        smallest_limit_that_passes=value,
    )


def _read_pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not equals or name in pairs:
            what = f"{name!r} stands twice" if equals else f"{part!r} is not of the form name=number"
            raise UsageError("budget-malformed", what, where="--budget", hint=_FORM)
        pairs[name] = value
    if not pairs:
        raise UsageError("budget-malformed", "the budget is empty", where="--budget", hint=_FORM)
    return pairs


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("file-unreadable", f"cannot read {path}: {error}", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UsageError("budget-malformed", f"not YAML: {error}", where=str(path)) from None
    if not isinstance(data, dict) or not data:
        raise UsageError("budget-malformed", "a budget file is a mapping of limits to numbers, and not empty", where=str(path))
    return data
