"""``rlmismatch gemm``: the GEMM family, axis by axis."""

from __future__ import annotations

from typing import Any

import click

from rlmismatch.commands import options


@click.command("gemm")
@options.options(*options.SHARED)
@click.option("--kernel", type=click.Choice(["native", "triton"]), help="triton: our fixed-order GEMM in both engines, in every arm.")
@click.option(
    "--forward-reduce",
    type=click.Choice(["native", "rank_order"]),
    help="rank_order: the row-parallel sum in rank order, fp32, one rounding, in both engines, in every arm.",
)
@click.pass_context
def command(ctx: click.Context, /, kernel: str | None, forward_reduce: str | None, **given: Any) -> None:
    """Measure the GEMM axes: every row with status, tier verdict, local error, alone, last and provenance."""
    from rlmismatch.commands import session

    ctx.exit(session.measure("gemm", given, knobs={"gemm.kernel": kernel, "gemm.forward_reduce": forward_reduce}))
