"""The error budget of a kernel: plain torch's own error on the same operands, against float64, times a stated factor."""

from __future__ import annotations

import torch

# Largest and root-mean-square error over plain torch's. The largest is one element's luck (which side of a tie), hence 2; the mean is not.
MAX_FACTOR, RMS_FACTOR = 2.0, 1.25


def assert_within_budget(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """`actual` (the kernel's) is as close to `exact` (float64) as `plain` (torch in the model dtype or float32) is, to the factors above.

    Where torch happens to be exact, half a float32 ulp of the largest value is left to the kernel.
    """
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape == plain.shape
    assert actual.numel() > 0
    error, allowed = (actual.double() - exact).abs(), (plain.double() - exact).abs()
    floor = 2.0**-24 * exact.abs().max()
    worst, worst_allowed = error.max(), MAX_FACTOR * allowed.max() + floor
    assert worst <= worst_allowed, f"largest error {worst:.3e} > {worst_allowed:.3e} at {int(error.argmax())} of {error.numel()}"
    rms, rms_allowed = error.square().mean().sqrt(), RMS_FACTOR * allowed.square().mean().sqrt() + floor
    assert rms <= rms_allowed, f"rms error {rms:.3e} > {rms_allowed:.3e} over {error.numel()} elements"
