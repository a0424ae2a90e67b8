"""``rlmismatch probe``: are the engines comparable, how far apart are they, and with --attribute, which ops carry the drift."""

from __future__ import annotations

from typing import Any

import click

from rlmismatch.commands import options


@click.command("probe")
@options.options(*options.SHARED)
@click.option("--attribute", is_flag=True, help="Find the zero set, a proved fix set, its shares, and the first divergence.")
@click.pass_context
def command(ctx: click.Context, /, attribute: bool, **given: Any) -> None:
    """Compare both engines on one checkpoint: gates, contract, drift, and which axes can run here.

    \b
    Examples:
      rlmismatch probe --ckpt fixtures/tiny-qwen3 --vocab-padding-policy mask
      torchrun --nproc-per-node 2 -m rlmismatch probe --ckpt DIR --trainer-tp 2 --rollout-tp 2 --sp
    """
    from rlmismatch.commands import session

    ctx.exit(session.measure("probe", given, attribute=attribute))
