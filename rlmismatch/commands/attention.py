"""``rlmismatch attention``: the attention family, axis by axis."""

from __future__ import annotations

from typing import Any

import click

from rlmismatch.commands import options


@click.command("attention")
@options.options(*options.SHARED)
@click.option(
    "--attention",
    type=click.Choice(["on", "off"]),
    help="off: our deterministic kernel in both engines, in every arm; on: each engine's own.",
)
@click.option(
    "--rope",
    type=click.Choice(["native", "unfused_fp32"]),
    help="unfused_fp32: RoPE with cos and sin in fp32 and one cast, in both engines, in every arm.",
)
@click.pass_context
def command(ctx: click.Context, /, attention: str | None, rope: str | None, **given: Any) -> None:
    """Measure the attention axes: every row with status, tier verdict, local error, alone, last and provenance."""
    from rlmismatch.commands import session

    ctx.exit(session.measure("attention", given, knobs={"attention": attention, "attention.rope": rope}))
