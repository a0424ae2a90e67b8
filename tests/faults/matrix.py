"""Every built plant on every side, and what its run must come to. Prints docs/controls.md:

python -m tests.faults.matrix > docs/controls.md

A table, one row a plant and side: long, and without logic.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final, Literal

from rlmismatch import axes
from tests.cli_runs import LLAMA, MASK, QUICK, TINY, TP2, WINDOW

_TIERS: Final = {"NOT COMPARABLE": "identical", "CONTRACT": "semantic", "DEFECT": "recorded", "OK": ""}
_CP2: Final = (*MASK, "--cp", "2", "--waive", "attention.provenance:context_parallel_size")
_TP2_SP: Final = (*MASK, *TP2, "--sp")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plant on one side: how it is run, the verdict it must get, and the first reason that the verdict must give."""

    plant: str
    side: Literal["trainer", "rollout"]
    word: Literal["NOT COMPARABLE", "CONTRACT", "DEFECT", "OK"]  # OK: recorded, and only warned of
    axis: str
    says: str  # stands in the reason's text: the field or tensor, and what is wrong with it
    ckpt: str = TINY
    options: tuple[str, ...] = MASK
    torchrun: int | None = None
    at: str = ""  # the tier of the field, where the word does not tell it

    @property
    def id(self) -> str:
        return f"{self.plant}@{self.side}"

    @property
    def key(self) -> str:
        """What tells it from every other case: two axes share a plant where the set-up decides which of them can merge."""
        return f"{self.id} of {self.axis}" if self.plant == "merge_arrival_order" else self.id

    @property
    def tier(self) -> str:
        return self.at or _TIERS[self.word]

    @property
    def command(self) -> tuple[str, ...]:
        """The options of ``rlmismatch probe``, but for --out and the format."""
        return ("--ckpt", self.ckpt, *self.options, *QUICK, "--plant", self.id)

    @property
    def setup(self) -> str:
        """In words, what is not as in most cases."""
        words = [self.ckpt] if self.ckpt != TINY else []
        words += ["TP2+SP" if "--sp" in self.options else "TP2"] if "--trainer-tp" in self.options else []
        words += ["CP2, its size waived"] if "--cp" in self.options else []
        words += [] if "--vocab-padding-policy" in self.options else ["padded rows counted"]
        words += ["float32"] if "float32" in self.options else []
        return ", ".join([*words, f"torchrun with {self.torchrun} ranks"] if self.torchrun else words)


CASES: Final[tuple[Case, ...]] = (
    Case(
        plant="one_stale_tensor",
        side="trainer",
        word="NOT COMPARABLE",
        axis="model.weights",
        says="model.layers.0.mlp.down_proj.weight: trainer not as in the checkpoint",
    ),
    Case(
        plant="one_stale_tensor",
        side="rollout",
        word="NOT COMPARABLE",
        axis="model.weights",
        says="model.layers.0.post_attention_layernorm.weight: rollout not as in the checkpoint",
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="untied_head",
        side="trainer",
        word="NOT COMPARABLE",
        axis="model.weights",
        says="lm_head.weight: missing in the rollout, tied: trainer and rollout differ",
        ckpt=LLAMA,
    ),
    Case(
        plant="untied_head",
        side="rollout",
        word="NOT COMPARABLE",
        axis="model.weights",
        says="lm_head.weight: missing in the trainer, tied: trainer and rollout differ",
        ckpt=LLAMA,
    ),
    Case(plant="two_bos", side="trainer", word="NOT COMPARABLE", axis="model.tokens", says="bos_count is [2, 2, 2, 2] on the trainer"),
    Case(
        plant="two_bos",
        side="rollout",
        word="NOT COMPARABLE",
        axis="model.tokens",
        says="bos_count is [1, 1, 1, 1] on the trainer and [2, 2, 2, 2] on the rollout",
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="eps",
        side="trainer",
        word="NOT COMPARABLE",
        axis="model.norm",
        says="eps is 1e-05 on the trainer and 1e-06 on the rollout",
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="eps",
        side="rollout",
        word="NOT COMPARABLE",
        axis="model.norm",
        says="eps is 1e-06 on the trainer and ",
    ),
    Case(plant="qk_norm_skipped", side="trainer", word="NOT COMPARABLE", axis="model.qk_norm", says="present is false on the trainer"),
    Case(
        plant="qk_norm_skipped",
        side="rollout",
        word="NOT COMPARABLE",
        axis="model.qk_norm",
        says="present is true on the trainer and false on the rollout",
    ),
    Case(
        plant="dropout_on",
        side="trainer",
        word="CONTRACT",
        axis="model.mode",
        says="attention_dropout is 0.1 on the trainer",
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="rope_theta",
        side="trainer",
        word="CONTRACT",
        axis="attention.rope",
        says="theta is 100000.0 on the trainer and 1000000.0 on the rollout",
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="rope_theta",
        side="rollout",
        word="CONTRACT",
        axis="attention.rope",
        says="theta is 1000000.0 on the trainer and 100000.0 on the rollout",
    ),
    Case(
        plant="temperature_not_applied",
        side="trainer",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says="transform_chain is [] on the trainer",
    ),
    Case(
        plant="temperature_not_applied",
        side="rollout",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='transform_chain is ["temperature(0.7)"] on the trainer and [] on the rollout',
        options=_TP2_SP,
        torchrun=2,
    ),
    Case(
        plant="pad_rows_nonzero",
        side="trainer",
        word="CONTRACT",
        axis="logprob.vocab_padding",
        says="vocab_padding_policy is include on the trainer and mask on the rollout",
        options=(),  # masked, the rows can do no harm
    ),
    Case(
        plant="lse_offset_log_tp",
        side="trainer",
        word="CONTRACT",
        axis="logprob.reduce",
        says="order is log-sum-exp off by +0.6931 on the trainer",
    ),
    Case(
        plant="lse_offset_log_tp",
        side="rollout",
        word="CONTRACT",
        axis="logprob.reduce",
        says="and log-sum-exp off by +0.6931 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="attention_bf16_accumulate",
        side="trainer",
        word="CONTRACT",
        axis="attention.precision",
        says="accum_dtype is bfloat16 on the trainer and float32 on the rollout",
    ),
    Case(
        plant="attention_bf16_accumulate",
        side="rollout",
        word="CONTRACT",
        axis="attention.precision",
        says="accum_dtype is float32 on the trainer and bfloat16 on the rollout",
    ),
    Case(
        plant="softmax_scale",
        side="trainer",
        word="CONTRACT",
        axis="attention.provenance",
        says="softmax_scale is 0.35439711809158325 on the trainer and 0.17677669",
    ),
    Case(
        plant="softmax_scale",
        side="rollout",
        word="CONTRACT",
        axis="attention.provenance",
        says="softmax_scale is 0.17677669",
    ),
    Case(
        plant="window_off_by_one",
        side="trainer",
        word="CONTRACT",
        axis="attention.provenance",
        says="sliding_window is 25 on the trainer and 24 on the rollout",
        ckpt=WINDOW,
    ),
    Case(
        plant="window_off_by_one",
        side="rollout",
        word="CONTRACT",
        axis="attention.provenance",
        says="sliding_window is 24 on the trainer and 25 on the rollout",
        ckpt=WINDOW,
        options=(*MASK, *TP2),
    ),
    Case(
        plant="sink_dropped",
        side="trainer",
        word="CONTRACT",
        axis="attention.provenance",
        says="sinks was declared otherwise than the engine says: trainer false",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="sink_dropped",
        side="rollout",
        word="CONTRACT",
        axis="attention.provenance",
        says="sinks was declared otherwise than the engine says:",
    ),
    Case(
        plant="backend_fell_back",
        side="trainer",
        word="OK",
        axis="attention.provenance",
        says="trainer: flash was asked for; the local spec builds DotProductAttention",
    ),
    Case(
        plant="backend_fell_back",
        side="rollout",
        word="OK",
        axis="attention.provenance",
        says="rollout: FLASH_ATTN cannot run on cpu here: the platform chose CPU_ATTN",
    ),
    Case(
        plant="rope_interleaved",
        side="trainer",
        word="CONTRACT",
        axis="attention.rope",
        says="rotary_layout is interleaved on the trainer and half on the rollout",
    ),
    Case(
        plant="rope_interleaved",
        side="rollout",
        word="CONTRACT",
        axis="attention.rope",
        says="rotary_layout is half on the trainer and interleaved on the rollout",
    ),
    Case(
        plant="yarn_factor",
        side="trainer",
        word="CONTRACT",
        axis="attention.rope",
        says="attention_factor is 1.41 on the trainer and 1.0 on the rollout",
    ),
    Case(
        plant="yarn_factor",
        side="rollout",
        word="CONTRACT",
        axis="attention.rope",
        says="attention_factor is 1.0 on the trainer and 1.41 on the rollout",
    ),
    Case(
        plant="positions_jump",
        side="trainer",
        word="CONTRACT",
        axis="attention.rope",
        says="position_ids is jumps by +5 at token 8 on the trainer",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="positions_jump",
        side="rollout",
        word="CONTRACT",
        axis="attention.rope",
        says="and jumps by +5 at token 8 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="positions_shifted",
        side="trainer",
        word="OK",
        axis="attention.rope",
        says="trainer: positions are shifted alike by 7: no numeric effect expected",
    ),
    Case(
        plant="positions_shifted",
        side="rollout",
        word="OK",
        axis="attention.rope",
        says="rollout: positions are shifted alike by 7: no numeric effect expected",
    ),
    Case(
        plant="gqa_tiled",
        side="trainer",
        word="CONTRACT",
        axis="attention.layout",
        says="gqa_mapping is tiled on the trainer and block on the rollout",
    ),
    Case(
        plant="gqa_tiled",
        side="rollout",
        word="CONTRACT",
        axis="attention.layout",
        says="gqa_mapping is block on the trainer and tiled on the rollout",
    ),
    Case(
        plant="heads_swapped",
        side="trainer",
        word="CONTRACT",
        axis="attention.layout",
        says="gqa_mapping is query heads in the order [3, 1, 2, 0] on the trainer",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="heads_swapped",
        side="rollout",
        word="CONTRACT",
        axis="attention.layout",
        says="and query heads in the order [3, 1, 2, 0] on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="packed_without_segments",
        side="trainer",
        word="CONTRACT",
        axis="attention.layout",
        says="segment_boundaries is none: a sequence sees the one before it on the trainer",
    ),
    Case(
        plant="stale_kv",
        side="rollout",
        word="CONTRACT",
        axis="attention.paged_kv",
        says="cache_identity is cold on the trainer and K and V of older weights in 2 pages on the rollout",
    ),
    Case(
        plant="page_swap",
        side="rollout",
        word="CONTRACT",
        axis="attention.paged_kv",
        says="logical_token_order is ascending on the trainer and pages [1, 0, 2] on the rollout",
    ),
    Case(
        plant="cp_contiguous_vs_zigzag",
        side="trainer",
        word="CONTRACT",
        axis="attention.merge_order",
        says="cp_partition was declared otherwise than the engine says: trainer contiguous",
        options=_CP2,
    ),
    Case(
        plant="forward_reduce_bf16_accumulate",
        side="trainer",
        word="CONTRACT",
        axis="gemm.forward_reduce",
        says="acc_dtype is bfloat16 on the trainer and float32 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="forward_reduce_bf16_accumulate",
        side="rollout",
        word="CONTRACT",
        axis="gemm.forward_reduce",
        says="acc_dtype is float32 on the trainer and bfloat16 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="wrong_gemm_one_layer",
        side="trainer",
        word="DEFECT",
        axis="gemm.kernel",
        says="trainer layers.0.up_proj: 2 % from float64",
    ),
    Case(
        plant="wrong_gemm_one_layer",
        side="rollout",
        word="DEFECT",
        axis="gemm.kernel",
        says="rollout layers.0.up_proj: 2 % from float64",
    ),
    Case(
        plant="tf32_one_sided",
        side="trainer",
        word="CONTRACT",
        axis="gemm.runtime_flags",
        says="tf32 is true on the trainer and false on the rollout",
    ),
    Case(
        plant="tf32_one_sided",
        side="rollout",
        word="CONTRACT",
        axis="gemm.runtime_flags",
        says="tf32 is false on the trainer and true on the rollout",
    ),
    Case(
        plant="compute_dtype_one_sided",
        side="trainer",
        word="NOT COMPARABLE",
        axis="gemm.runtime_flags",
        says="compute_dtype is float16 on the trainer and bfloat16 on the rollout",
    ),
    Case(
        plant="compute_dtype_one_sided",
        side="rollout",
        word="NOT COMPARABLE",
        axis="gemm.runtime_flags",
        says="compute_dtype is bfloat16 on the trainer and float16 on the rollout",
    ),
    Case(
        plant="autocast_head_one_sided",
        side="trainer",
        word="NOT COMPARABLE",
        axis="gemm.runtime_flags",
        says='compute_dtype is ["bfloat16", "float32"] on the trainer and float32 on the rollout',
        options=(*MASK, "--dtype", "float32"),
    ),
    Case(
        plant="autocast_head_one_sided",
        side="rollout",
        word="NOT COMPARABLE",
        axis="gemm.runtime_flags",
        says='compute_dtype is float32 on the trainer and ["bfloat16", "float32"] on the rollout',
        options=(*MASK, "--dtype", "float32"),
    ),
    Case(
        plant="batch_invariance_claimed_but_broken",
        side="trainer",
        word="CONTRACT",
        axis="gemm.kernel",
        says="trainer layers.0.gate_proj gives other bits at M = 1 than at all rows",
    ),
    Case(
        plant="batch_invariance_claimed_but_broken",
        side="rollout",
        word="CONTRACT",
        axis="gemm.kernel",
        says="rollout layers.0.gate_proj gives other bits at M = 1 than at all rows",
    ),
    Case(
        plant="all_reduce_wrong_data",
        side="rollout",
        word="DEFECT",
        axis="rollout.all_reduce_backend",
        says="rollout as its layers call it",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="pad_rows_included",
        side="trainer",
        word="CONTRACT",
        axis="logprob.vocab_padding",
        says="vocab_padding_policy is include on the trainer and mask on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="pad_rows_included",
        side="rollout",
        word="CONTRACT",
        axis="logprob.vocab_padding",
        says="vocab_padding_policy is mask on the trainer and include on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="shard_gap",
        side="trainer",
        word="NOT COMPARABLE",
        axis="logprob.vocab_shards",
        says="global_vocab is 1099 on the trainer and 1100 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="shard_gap",
        side="rollout",
        word="NOT COMPARABLE",
        axis="logprob.vocab_shards",
        says="global_vocab is 1100 on the trainer and 1099 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="shard_overlap",
        side="trainer",
        word="NOT COMPARABLE",
        axis="logprob.vocab_shards",
        says="global_vocab is 1101 on the trainer and 1100 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="shard_overlap",
        side="rollout",
        word="NOT COMPARABLE",
        axis="logprob.vocab_shards",
        says="global_vocab is 1100 on the trainer and 1101 on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="head_fp32_one_sided",
        side="trainer",
        word="NOT COMPARABLE",
        axis="logprob.precision",
        says="head_dtype is float32 on the trainer and bfloat16 on the rollout",
    ),
    Case(
        plant="head_fp32_one_sided",
        side="rollout",
        word="NOT COMPARABLE",
        axis="logprob.precision",
        says="head_dtype is bfloat16 on the trainer and float32 on the rollout",
    ),
    Case(
        plant="top_p_renormalised",
        side="rollout",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='transform_chain is [] on the trainer and ["top_p(0.8)"] on the rollout',
    ),
    Case(
        plant="soft_cap_missing",
        side="trainer",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='transform_chain is [] on the trainer and ["soft_cap(10)"] on the rollout',
    ),
    Case(
        plant="soft_cap_missing",
        side="rollout",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='transform_chain is ["soft_cap(10)"] on the trainer and [] on the rollout',
    ),
    Case(
        plant="cap_after_scale",
        side="trainer",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='transform_chain is ["logit_scale(0.5)", "soft_cap(10)"] on the trainer',
    ),
    Case(
        plant="cap_after_scale",
        side="rollout",
        word="CONTRACT",
        axis="logprob.transform_chain",
        says='and ["logit_scale(0.5)", "soft_cap(10)"] on the rollout',
    ),
    Case(
        plant="shift_by_one",
        side="trainer",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="shift_convention is logits[t] score token t on the trainer",
    ),
    Case(
        plant="shift_by_one",
        side="rollout",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="and logits[t] score token t on the rollout",
    ),
    Case(
        plant="double_owner",
        side="trainer",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="single_owner is false on the trainer and true on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="double_owner",
        side="rollout",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="single_owner is true on the trainer and false on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="oov_target",
        side="trainer",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="ids outside the vocabulary, scored 0 on the trainer",
    ),
    Case(
        plant="oov_target",
        side="rollout",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="ids outside the vocabulary, scored 0 on the rollout",
    ),
    Case(
        plant="eos_logprob_zero",
        side="trainer",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="the end token, scored 0 on the trainer",
    ),
    Case(
        plant="eos_logprob_zero",
        side="rollout",
        word="CONTRACT",
        axis="logprob.selected_gather",
        says="the end token, scored 0 on the rollout",
    ),
    Case(
        plant="head_row_off_by_one",
        side="trainer",
        word="NOT COMPARABLE",
        axis="logprob.head_gemm",
        says="logits of other rows, [-1, 3] away on the trainer",
    ),
    Case(
        plant="head_row_off_by_one",
        side="rollout",
        word="NOT COMPARABLE",
        axis="logprob.head_gemm",
        says="logits of other rows, [-1, 3] away on the rollout",
    ),
    Case(
        plant="auto_split_under_invariance_claim",
        side="rollout",
        word="CONTRACT",
        axis="attention.backend_reuse",
        says="and full, chunked, decode; repeatable; not batch invariant on the rollout",
    ),
    Case(
        plant="merge_arrival_order",
        side="trainer",
        word="CONTRACT",
        axis="attention.merge_order",
        says="merge_order was declared otherwise than the engine says: trainer order of arrival",
        options=_CP2,
    ),
    Case(
        plant="merge_arrival_order",
        side="rollout",
        word="CONTRACT",
        axis="attention.merge_order",
        says="on the trainer and order of arrival on the rollout",
    ),
    Case(
        plant="lse_base2",
        side="trainer",
        word="CONTRACT",
        axis="attention.lse",
        says="lse_base was declared otherwise than the engine says: trainer 2",
        options=_CP2,
    ),
    Case(
        plant="lse_base2",
        side="rollout",
        word="CONTRACT",
        axis="attention.lse",
        says="lse_base is",
    ),
    Case(
        plant="dk_scaled",
        side="trainer",
        word="DEFECT",
        axis="attention.backward",
        says="trainer dk of native, slope over the exact one, minus 1 is 0.02",
    ),
    Case(
        plant="merge_arrival_order",
        side="trainer",
        word="CONTRACT",
        axis="logprob.merge_order",
        says="merge_order is order of arrival on the trainer",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="merge_arrival_order",
        side="rollout",
        word="CONTRACT",
        axis="logprob.merge_order",
        says="and order of arrival on the rollout",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="fallback_reported_as_requested",
        side="trainer",
        word="CONTRACT",
        axis="logprob.provenance",
        says="the trainer was asked for mcore_unfused, ran mcore_native_fused, and reported no fallback",
        at="recorded",
    ),
    Case(
        plant="fallback_reported_as_requested",
        side="rollout",
        word="CONTRACT",
        axis="logprob.provenance",
        says="the rollout was asked for raw_logprobs, ran another log-softmax than the sampler's, and reported no fallback",
        at="recorded",
    ),
    Case(
        plant="zero_grad_non_owner",
        side="trainer",
        word="DEFECT",
        axis="logprob.backward",
        says="trainer dlogits of mcore_native_fused",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="entropy_before_temperature",
        side="trainer",
        word="CONTRACT",
        axis="logprob.backward",
        says="entropy_reduction is fixed_merge, before temperature on the trainer",
    ),
    Case(
        plant="dgrad_not_reduced",
        side="trainer",
        word="DEFECT",
        axis="gemm.dgrad_reduce",
        says="trainer dX off float64: engine is",
        options=(*MASK, *TP2),
    ),
    Case(
        plant="dgrad_bf16_accumulate",
        side="trainer",
        word="CONTRACT",
        axis="gemm.dgrad_reduce",
        says="acc_dtype is bfloat16 on the trainer",
        options=(*_TP2_SP, "--dtype", "float32"),
    ),
    Case(
        plant="wgrad_bf16_accumulate",
        side="trainer",
        word="CONTRACT",
        axis="gemm.wgrad_accumulate",
        says="accum_dtype is bfloat16 on the trainer",
    ),
)

_HEAD: Final = """\
# Controls: does the tool see a fault?

A *plant* is a known fault that `--plant ID@SIDE` puts into one live engine. Each row below is a run of both real engines that
`tests/faults/test_plants.py` makes; the verdict must be this one, with this axis in its first reason, and the exit code must be 4.
Nothing else in the run is wrong. Written by `python -m tests.faults.matrix > docs/controls.md`; a test holds it current.

NOT COMPARABLE voids every number of the run. Where no set-up is named it is fixtures/tiny-qwen3 at TP1, padded vocabulary rows masked.
"""
_COLUMNS: Final = ("plant", "what is broken", "side", "set-up", "verdict", "named first", "tier", "the reason says")


def render() -> str:
    """The whole document, in Markdown."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    for case in CASES:
        what = axes.plant(case.plant, case.side)[1].what
        row = (f"`{case.plant}`", what, case.side, case.setup, case.word, f"`{case.axis}`", case.tier, case.says)
        lines.append(_line(row))
    return "\n".join([_HEAD, *lines]) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(render())
