"""``rlmismatch attention``: the attention family, axis by axis."""

from __future__ import annotations

from typing import Any, Final

import click

from rlmismatch.commands import options
from rlmismatch.commands.options import Knob

# Option -> knob. Most can be given for one side alone, too: --rollout.accum-dtype bf16.
KNOBS: Final[tuple[Knob, ...]] = (
    Knob(
        "--materialization",
        "full_prefill|chunked_prefill|paged_prefill|decode",
        "Form in which the rollout scores, beside full_prefill. Default: all.",
        side="rollout",
        multiple=True,
    ),
    Knob("--prefix-cache", "on|off", "The rollout's prefix cache. Default: the engine's own.", side="rollout"),
    Knob("--split-kv-policy", "auto|1|2|4", "Into how many splits a row's keys are cut; auto: as the kernel likes."),
    Knob("--rope", "native|unfused_fp32", "unfused_fp32: RoPE with cos and sin in fp32 and one cast, in every arm.", side="both"),
    Knob("--merge-order", "native|global_block_index", "global_block_index: our fixed fold of KV blocks, in every arm.", side="both"),
    Knob("--accum-dtype", "fp32|bf16", "The pin's running sum, which then is in force in every arm; bf16 rounds it every 16 keys."),
    Knob("--downcast-at", "final_write|per_partial|per_block", "Where the pin casts its output; it then is in force in every arm."),
    Knob("--sink", float, "A sink of this logit in every head's denominator, as no checkpoint of these models has one; 0 to 4."),
    Knob("--backend-candidate", "te|flash_attn|flashinfer|sdpa", "Backend whose capability both sides compare; all that run are measured."),
    Knob("--backward-backend", "native|triton", "Backward measured in the trainer: its own, or ours. Default: both.", side="trainer"),
)


@click.command("attention")
@options.options(*options.SHARED)
@click.option(
    "--attention",
    type=click.Choice(["on", "off"]),
    help="off: our deterministic kernel in both engines, in every arm; on: each engine's own.",
)
@options.knob_options("attention", KNOBS)
@click.pass_context
def command(ctx: click.Context, /, attention: str | None, **given: Any) -> None:
    """Measure the attention axes: every row with status, tier verdict, local error, alone, last and provenance.

    A knob without a side is for both that have it; --trainer.NAME and --rollout.NAME set it on one side alone.
    """
    from rlmismatch.commands import session
    from rlmismatch.errors import UsageError

    knobs, rest = options.split_knobs("attention", KNOBS, given)
    forms = (knobs["rollout.attention.materialization"] or "").split(",")
    if "paged_prefill" in forms and knobs["rollout.attention.prefix_cache"] == "off":
        raise UsageError("paged-prefill-needs-cache", "--materialization paged_prefill reads the prefix cache, and --prefix-cache is off")
    ctx.exit(session.measure("attention", rest, knobs={"attention": attention, **knobs}))
