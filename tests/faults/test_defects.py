"""Where a rounding ends and a defect begins, on local errors that were measured."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rlmismatch.arms import LOCAL
from rlmismatch.assemble.defects import defects, is_defect
from rlmismatch.contract import read
from rlmismatch.engines.protocol import LocalError


def error(pin: str, native: float, pinned: float) -> LocalError:
    """Mean errors of the native op and of the pin, as a share of the result's size; the size is 3."""
    return LocalError(
        boundary="layers.0.x",
        pin=pin,
        rows=1,
        count=1,
        unequal=1,
        native_vs_pin_max=0.0,
        native_vs_pin_mean=0.0,
        native_vs_fp64_max=0.0,
        native_vs_fp64_mean=3 * native,
        pin_vs_fp64_max=0.0,
        pin_vs_fp64_mean=3 * pinned,
        fp64_scale=3.0,
    )


HONEST = {
    "bf16 GEMM at TP2, partials rounded": ("gemm", 2.16e-3, 1.41e-3),
    "float32 GEMM": ("gemm", 2.57e-7, 2.17e-8),
    "Megatron's unfused bf16 attention": ("attention", 6.25e-3, 1.33e-3),
    "float32 log-softmax over 49152 tokens": ("logprob", 2.47e-6, 2.37e-8),
    "an op whose pin is exact": ("rope", 6e-8, 0.0),
}
WRONG = {
    "a GEMM of 2 % too much": ("gemm", 2.0e-2, 1.41e-3),
    "a float32 GEMM in TF32": ("gemm", 2.0e-4, 2.17e-8),
    "a log-softmax in bf16": ("logprob", 1.4e-3, 2.37e-8),
    "a log-sum-exp off by log 2": ("logprob", 5.3e-2, 2.37e-8),
    "attention with dropout": ("attention", 2.4e-1, 1.33e-3),
    "NaN": ("gemm", math.nan, 1.41e-3),
}


@pytest.mark.parametrize("case", HONEST)
def test_rounding_is_no_defect(case: str) -> None:
    assert not is_defect(error(*HONEST[case]))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_is(case: str) -> None:
    assert is_defect(error(*WRONG[case]))


@pytest.mark.parametrize(
    ("readings", "axis"),
    [
        ({}, "logprob.reduce"),
        ({"accum_dtype": "float32", "downcast_at": "final_write"}, "logprob.reduce"),
        ({"accum_dtype": "bfloat16", "downcast_at": "final_write"}, "logprob.precision"),
        ({"accum_dtype": "float32", "downcast_at": "per_partial"}, "logprob.precision"),
    ],
)
def test_a_log_softmax_that_rounds_its_sums_is_a_matter_of_precision(readings: dict[str, str], axis: str) -> None:
    side = SimpleNamespace(readings={"logprob.precision": {field: read(value, "settings") for field, value in readings.items()}})
    evidence: Any = SimpleNamespace(side=lambda name: side if name == "rollout" else None, broken=())
    arms = {"trainer": {}, "rollout": {LOCAL: SimpleNamespace(local=[error(*WRONG["a log-softmax in bf16"])])}}
    book: Any = SimpleNamespace(arms=arms)
    (found,) = defects(evidence, book)
    assert found.axis == axis
