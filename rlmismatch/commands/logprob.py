"""``rlmismatch logprob``: the log-prob family, axis by axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from rlmismatch.commands import options
from rlmismatch.commands.options import Knob

# Option -> knob. Most can be given for one side alone, too: --trainer.head-dtype fp32.
KNOBS: Final[tuple[Knob, ...]] = (
    Knob("--reduce", "allreduce_partials|allgather_partials_fixed_merge|allgather_logits", "How the ranks' softmax sums become one."),
    Knob("--merge-order", "nccl_algo|global_vocab_shard_index", "Order of that merge: the collective's, or by shard index."),
    Knob("--head-dtype", "bf16|fp32", "dtype of the head's GEMM and of the logits it writes."),
    Knob("--accum-dtype", "fp32|bf16", "dtype of the sum of exponentials."),
    Knob("--downcast-at", "final_write|per_partial", "Where a rank's sum is rounded to bf16, if anywhere."),
    Knob("--selected-gather", "masked_sum_allreduce|local_gather", "How the target's logit reaches all ranks."),
    Knob("--materialization", "full_prefill|chunked|last_token_only", "Rows of one head GEMM: all, --chunk-size, or 1."),
    Knob("--head-gemm-kernel", "native|triton", "triton: our fixed-order GEMM for the head, in every arm.", side="both"),
    Knob(
        "--fusion-impl",
        "none|native|te|chunked_linear_ce",
        "The trainer's fused loss; chunked_linear_ce starts from hidden rows.",
        side="trainer",
    ),
    Knob("--fusion-block-size", click.IntRange(1), "Columns at a time in chunked_linear_ce.", side="trainer"),
    Knob("--fusion-chunk-size", click.IntRange(1), "Rows at a time in chunked_linear_ce and slime_vocab_parallel.", side="trainer"),
    Knob("--trainer-impl", "mcore_unfused|mcore_native_fused|mcore_te_fused|slime_vocab_parallel", "The trainer's loss.", side="trainer"),
    Knob("--transform-chain", str, "Order of the transforms of the logits, e.g. logit_scale,soft_cap,temperature."),
    Knob("--logprobs-mode", "raw_logprobs|processed_logprobs", "raw: without temperature, top-p, top-k and min-p."),
    Knob("--top-p", float, "Nucleus that the distribution is cut to, and renormalised over."),
    Knob("--top-k", int, "Tokens that the distribution is cut to."),
    Knob("--min-p", float, "Least probability kept, relative to the likeliest token's."),
    Knob("--soft-cap", float, "Cap of tanh soft-capping on the logits."),
    Knob("--logit-scale", float, "Factor on the logits."),
    Knob("--backward-impl", "native|triton", "Backward that is measured in the trainer.", side="trainer"),
    Knob("--grad-downcast-at", "final_write|hard_bf16", "Where the trainer's dlogits are rounded to bf16.", side="trainer"),
    Knob("--entropy-reduce", "native|fixed_merge", "How the trainer's entropy is summed over ranks.", side="trainer"),
)


def _with_knobs(function: Callable[..., Any]) -> Callable[..., Any]:
    return options.knob_options("logprob", KNOBS)(function)


@click.command("logprob")
@options.options(*options.SHARED)
@_with_knobs
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Measure the log-prob axes: every row with status, tier verdict, local error, alone, last and provenance.

    A knob without a side is for both; --trainer.NAME and --rollout.NAME set it on one side alone.
    """
    from rlmismatch.commands import session

    knobs, rest = options.split_knobs("logprob", KNOBS, given)
    ctx.exit(session.measure("logprob", rest, knobs=knobs))
