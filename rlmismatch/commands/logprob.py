"""``rlmismatch logprob``: the log-prob family, axis by axis."""

from __future__ import annotations

from typing import Any

import click

from rlmismatch.commands import options


@click.command("logprob")
@options.options(*options.SHARED)
@click.option(
    "--reduce",
    type=click.Choice(["allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits"]),
    help="How partial softmax sums of the vocabulary shards become one, in both engines. Default: each engine's own.",
)
@click.option(
    "--head-gemm-kernel",
    type=click.Choice(["native", "triton"]),
    help="triton: our fixed-order GEMM for the LM head in both engines, in every arm.",
)
@click.pass_context
def command(ctx: click.Context, /, reduce: str | None, head_gemm_kernel: str | None, **given: Any) -> None:
    """Measure the log-prob axes: every row with status, tier verdict, local error, alone, last and provenance."""
    from rlmismatch.commands import session

    ctx.exit(session.measure("logprob", given, knobs={"logprob.reduce": reduce, "logprob.head_gemm_kernel": head_gemm_kernel}))
