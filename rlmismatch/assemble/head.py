"""What the checkpoint's head holds beyond the tokens that anybody names: as measures, and in words."""

from __future__ import annotations

from typing import Any

from rlmismatch.evidence import Evidence
from rlmismatch.report.model import MeasureRow

_AXIS = "logprob.vocab_padding"


def measures(evidence: Evidence) -> tuple[MeasureRow, ...]:
    """How many such rows there are, and how large they are; none for a run that did not look."""
    found = _found(evidence)
    if found is None:
        return ()
    known = found["tokenizer"] is not None
    where = f"beyond the tokenizer's {found['tokenizer']} ids" if known else "at its end that are all alike (it has no tokenizer)"
    count = found["rows"] - found["first"]
    rows = [
        MeasureRow(axis=_AXIS, side="checkpoint", what=f"rows of the head {where}", value=float(count), unit="rows", note=found["kind"])
    ]
    if count:
        note = "" if found["used_norm_mean"] is None else f"of the other rows {found['used_norm_mean']:.3g}"
        what = f"norm of those rows, {found['kind']}, mean"
        rows.append(MeasureRow(axis=_AXIS, side="checkpoint", what=what, value=found["norm_mean"], unit="", note=note))
    return tuple(rows)


def note(evidence: Evidence) -> str:
    """For people: that such rows are no padding, and count; "" if there are none."""
    found = _found(evidence)
    if found is None or found["rows"] == found["first"]:
        return ""
    count, kind = found["rows"] - found["first"], found["kind"]
    if found["tokenizer"] is None:
        return f"the head's last {count} rows are all alike ({kind}): if that is saved padding, both engines count it all the same"
    return (
        f"the head has {count} rows more than the tokenizer has ids ({found['rows']} and {found['tokenizer']}; {kind}, mean norm "
        f"{found['norm_mean']:.3g}): they are the model's own, no padding, and both engines count them"
    )


def _found(evidence: Evidence) -> dict[str, Any] | None:
    found: dict[str, Any] | None = evidence.run["checkpoint"].get("unused_rows")
    return found
