"""``rlmismatch gemm``: the GEMM family, axis by axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from rlmismatch.commands import options
from rlmismatch.commands.options import Knob, OtherName

# Option -> knob. Most can be given for one side alone, too: --trainer.tf32 on.
KNOBS: Final[tuple[Knob, ...]] = (
    Knob("--kernel", "native|triton", "triton: our fixed-order GEMM in both engines, in every arm.", side="both"),
    Knob(
        "--forward-reduce",
        "all_reduce|reduce_scatter|rank_order",
        "How row-parallel partials are summed. rank_order: fp32, one rounding; given for both sides it is the pin, in every arm.",
    ),
    Knob(
        "--all-reduce-backend",
        "auto|nccl|custom|symm_mem|flashinfer|gloo|shm|rank_order",
        "The rollout's all-reduce; what ran is read back, call by call.",
        side="rollout",
    ),
    Knob("--deterministic-mode", "on|off", "The trainer's own deterministic mode, and the environment it asks for.", side="trainer"),
    Knob("--batch-invariant", "on|off", "The engine's batch-invariant mode; on is a promise, and a row whose bits move breaks it."),
    Knob("--dgrad-reduce", "native|rank_order", "The sum of dX over ranks. rank_order: fp32, one rounding, in every pass.", side="trainer"),
    Knob("--wgrad-accumulate", "fused|explicit", "How dW reaches main_grad. explicit: fp32 product, fp32 sum.", side="trainer"),
    Knob("--tf32", "on|off", "Whether float32 products may use TF32."),
    Knob("--bf16-reduced-precision-reduction", "on|off", "Whether split-K partials of bf16 products may be added in bf16."),
)
_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# The family's names for options that every command has: one meaning.
OTHER_NAMES: Final[tuple[OtherName, ...]] = (
    OtherName("--compute-dtype", {"": ("dtype",), "trainer": ("trainer_dtype",), "rollout": ("rollout_dtype",)}, _DTYPES),
    OtherName("--tensor-parallel-size", {"": ("trainer_tp", "rollout_tp"), "trainer": ("trainer_tp",), "rollout": ("rollout_tp",)}, None),
    OtherName("--sequence-parallel", {"": ("sp",)}, {"on": True, "off": False}),
)


def _with_knobs(function: Callable[..., Any]) -> Callable[..., Any]:
    return options.knob_options("gemm", KNOBS)(options.other_names(OTHER_NAMES)(function))


@click.command("gemm")
@options.options(*options.SHARED)
@_with_knobs
@click.option("--grads", is_flag=True, help="Also take the trainer's gradients of one loss, native and pinned.")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Measure the GEMM axes: every row with status, tier verdict, local error, alone, last and provenance.

    A knob without a side is for both; --trainer.NAME and --rollout.NAME set it on one side alone.
    """
    from rlmismatch.commands import session

    knobs, rest = options.split_knobs("gemm", KNOBS, options.by_shared_names(ctx, OTHER_NAMES, given))
    ctx.exit(session.measure("gemm", rest, knobs=knobs))
