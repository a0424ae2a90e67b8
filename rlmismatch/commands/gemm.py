"""``rlmismatch gemm``: the GEMM family, axis by axis."""

from __future__ import annotations

from typing import Any, Final

import click

from rlmismatch.commands import options
from rlmismatch.commands.options import Knob

# Knobs of the trainer's backward.
GRADIENT_KNOBS: Final[tuple[Knob, ...]] = (
    Knob("--dgrad-reduce", "native|rank_order", "The sum of dX over ranks. rank_order: fp32, one rounding, in every pass.", side="trainer"),
    Knob("--wgrad-accumulate", "fused|explicit", "How dW reaches main_grad. explicit: fp32 product, fp32 sum.", side="trainer"),
)


def _with_knobs(function: Any) -> Any:
    return options.knob_options("gemm", GRADIENT_KNOBS)(function)


@click.command("gemm")
@options.options(*options.SHARED)
@click.option("--kernel", type=click.Choice(["native", "triton"]), help="triton: our fixed-order GEMM in both engines, in every arm.")
@click.option(
    "--forward-reduce",
    type=click.Choice(["native", "rank_order"]),
    help="rank_order: the row-parallel sum in rank order, fp32, one rounding, in both engines, in every arm.",
)
@_with_knobs
@click.option("--grads", is_flag=True, help="Also take the trainer's gradients of one loss, native and pinned.")
@click.pass_context
def command(ctx: click.Context, /, kernel: str | None, forward_reduce: str | None, **given: Any) -> None:
    """Measure the GEMM axes: every row with status, tier verdict, local error, alone, last and provenance."""
    from rlmismatch.commands import session

    knobs, rest = options.split_knobs("gemm", GRADIENT_KNOBS, given)
    ctx.exit(session.measure("gemm", rest, knobs={"gemm.kernel": kernel, "gemm.forward_reduce": forward_reduce, **knobs}))
