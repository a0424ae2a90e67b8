"""The log-prob family: from the last hidden state to the log-probability of the token that was chosen.

Eleven axes, and their text is data, so this file is longer than a module with logic should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlmismatch.axes.base import Axis, Plant
from rlmismatch.contract import identical, recorded, semantic


@dataclass(frozen=True, kw_only=True)
class LogProbContract:
    """What log-probability a side reports, and who computes it."""

    vocab_size: int = identical("tokens of the real vocabulary")
    tensor_parallel_size: int = identical("ranks that share the vocabulary")
    model_dtype: str = identical("dtype of the model's weights and activations")
    transform_chain: str = semantic("what is done to the logits before the log-softmax, in order")
    active_mask: str = semantic("tokens that are scored")
    impl: str = recorded("implementation that ran")
    version: str = recorded("its version")
    requested_backend: str = recorded("backend that was asked for")
    actual_backend: str = recorded("backend that ran")
    fallback_reason: str = recorded("why the actual backend is not the requested one")


@dataclass(frozen=True, kw_only=True)
class LogProbVocabSpec:
    """Which columns of the logits the denominator counts."""

    vocab_padding_policy: str = semantic("whether padded rows enter the denominator (include) or not (mask)")
    padded_vocab_size: int = recorded("rows of the head, padding included")
    org_vocab_size: int = semantic("rows of the head without padding")
    num_pad_rows: int = recorded("padded rows")
    pad_row_init: str = recorded("what the padded rows hold")


@dataclass(frozen=True, kw_only=True)
class LogProbShardingSpec:
    """Which rank holds which rows of the head."""

    global_vocab: int = identical("columns of the logits that all ranks together hold, without padding")
    boundaries: str = recorded("first and last row of each rank")


@dataclass(frozen=True, kw_only=True)
class LogProbReductionSpec:
    """How the ranks' parts of one log-softmax become one number."""

    order: str = semantic("rank order in which partials are merged")
    acc_dtype: str = semantic("dtype of the sum of exponentials")
    collective: str = recorded("all-reduce of partials, or all-gather of partials or logits")
    engine: str = recorded("who performed the merge")
    merge_order: str = semantic("order of the merge: the collective's own, or by global shard index")
    nccl_algo: str = recorded("NCCL_ALGO of the process")
    nccl_proto: str = recorded("NCCL_PROTO of the process")
    topology: str = recorded("nodes and links between the ranks")


@dataclass(frozen=True, kw_only=True)
class LogProbPrecisionSpec:
    """In which dtypes the head and the log-softmax work."""

    head_dtype: str = identical("dtype of the logits as the head writes them")
    accum_dtype: str = semantic("dtype of the log-softmax")
    downcast_at: str = semantic("where the log-prob is cast")
    transport_dtype: str = semantic("dtype in which partials or logits cross ranks")


@dataclass(frozen=True, kw_only=True)
class LogProbTransformSpec:
    """What is done to the logits before the log-softmax."""

    transform_chain: str = semantic("every transform that was applied, in order")
    temperature_applied: float = semantic("what the logits were divided by")
    logprobs_mode: str = semantic("whether the log-probs are of raw or of processed logits")
    soft_cap: float = semantic("cap of tanh soft-capping on the logits; 0 is none")
    logit_scale: float = semantic("factor on the logits")
    top_p: float = semantic("nucleus the distribution was cut to; 1 is none")
    top_k: int = semantic("number of tokens the distribution was cut to; 0 is none")
    min_p: float = semantic("least probability kept, relative to the largest; 0 is none")
    penalties: str = semantic("repetition, presence and frequency penalties")


@dataclass(frozen=True, kw_only=True)
class LogProbGatherSpec:
    """How one log-prob per token is picked."""

    single_owner: bool = semantic("whether exactly one rank supplies each target's logit")
    shift_convention: str = semantic("which row of logits scores which token")
    ignore_index: str = semantic("target value that is not scored")
    active_mask: str = semantic("tokens that are scored")


@dataclass(frozen=True, kw_only=True)
class LogProbMaterializationSpec:
    """Which rows pass through the head GEMM together."""

    logical_rows: str = identical("rows of logits per scored token")
    physical_rows: int = recorded("rows of the GEMM that ran, padding included")
    kernel: str = recorded("GEMM kernel that ran")
    tile_split_k: str = recorded("tile and split-K of that kernel")
    padded_batch_size: int = recorded("batch size that a captured graph pads to")


@dataclass(frozen=True, kw_only=True)
class LogProbFusionSpec:
    """What the log-softmax is fused with."""

    fusion_impl: str = recorded("fused implementation that ran")
    block_size: int = recorded("columns per tile of the online softmax")
    chunk_size: int = recorded("rows per chunk of the sequence")


@dataclass(frozen=True, kw_only=True)
class LogProbBackwardSpec:
    """The gradient of the log-prob, and the entropy beside it."""

    dlogits: str = semantic("formula and dtype of the gradient of the logits")
    entropy_reduction: str = semantic(
        "how the entropy is summed over ranks, and before or after temperature",
        must=("fixed_merge, after temperature", "native, after temperature"),
    )
    grad_downcast_at: str = semantic("where the gradient is cast")
    autograd_path: str = recorded("autograd function that ran")


LOGPROB: Final[tuple[Axis, ...]] = (
    Axis(
        id="logprob.provenance",
        family="logprob",
        asks="Is it arithmetic, or two differently configured log-prob processes?",
        spec=LogProbContract,
        mirrors={
            "tensor_parallel_size": ("gemm.runtime_flags:tensor_parallel_size",),
            "model_dtype": ("gemm.runtime_flags:compute_dtype",),
            "transform_chain": ("logprob.transform_chain:transform_chain",),
            "active_mask": ("model.tokens:mask",),
        },
        fallback=("requested_backend", "actual_backend", "fallback_reason"),
        knobs={"logprob.trainer_impl": ("mcore_unfused", "mcore_native_fused", "mcore_te_fused", "slime_vocab_parallel")},
        values={"impl": ("mcore_unfused", "mcore_native_fused", "mcore_te_fused", "slime_vocab_parallel", "vllm_all_gather")},
        measure="every impl on one captured logits tensor against float64",
        hint=(
            "open the same checkpoint on both sides, so that the vocabulary is the same, score the same tokens, and ask for what the side"
            " really runs"
        ),
        plants=(
            Plant(
                id="fallback_reported_as_requested",
                verdict="contract",
                what="a side that fell back to another backend reports the one it was asked for",
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.vocab_padding",
        family="logprob",
        asks="Is it a systematic bias from padded rows in the denominator rather than rounding?",
        spec=LogProbVocabSpec,
        knobs={"logprob.vocab_padding_policy": ("include", "mask")},
        pin="mask",
        measure=(
            "include minus mask per token from one full-logit capture, exact, against the closed form log(1 + sum_pad/sum_real); offline"
            " norm probe of lm_head[org_V:]"
        ),
        trap=(
            "one-signed bias far below bf16 noise (128 zero rows at LSE 20 cost 2.6e-7), so the declared field decides, not the threshold."
            " Padded size is read back, never derived. A tokenizer smaller than the model's vocabulary is not padding."
        ),
        hint="set --vocab-padding-policy mask: the trainer's loss then leaves out the padded vocabulary rows, as the rollout does",
        zero={"no_pad_rows": "no padded vocabulary rows"},
        plants=(
            Plant(
                id="pad_rows_included",
                verdict="contract",
                what="the padded vocabulary rows are counted in the denominator on one side",
                built=True,
            ),
            Plant(
                id="pad_rows_nonzero",
                verdict="contract",
                what="the padded vocabulary rows hold random weights",
                sides=("trainer",),  # the rollout cuts its padding before it could matter
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.vocab_shards",
        family="logprob",
        asks="Is disagreement between partials arithmetic, or just other shard boundaries?",
        spec=LogProbShardingSpec,
        mirrors={"global_vocab": ("logprob.provenance:vocab_size",)},
        knobs={"logprob.vocab_shard_map": ()},
        pin="tiles by WIDTH in real-vocabulary coordinates (gcd of both engines' shard sizes)",
        measure=("print both maps; compare partials only after re-tiling; reference(trainer map) minus reference(rollout map)"),
        trap="for V = 151936 at TP2 the trainer owns 76032 rows a rank, the rollout 75968",
        hint="make the shards of the head cover every row of the vocabulary once",
        zero={"tp1": "TP1 on both sides: one shard"},
        plants=(
            Plant(id="shard_gap", verdict="contract", what="a row of the head belongs to no rank", built=True),
            Plant(id="shard_overlap", verdict="contract", what="a row of the head belongs to two ranks", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.reduce",
        family="logprob",
        asks="Partial-LSE all-reduce, or full-logit all-gather with a single-pass softmax?",
        spec=LogProbReductionSpec,
        field_names=("order", "acc_dtype", "collective", "engine"),
        mirrors={"acc_dtype": ("logprob.precision:accum_dtype",)},
        only_with_tp=("order", "acc_dtype"),
        knobs={"logprob.reduce": ("allreduce_partials", "allgather_partials_fixed_merge", "allgather_logits")},
        pin="allgather_partials_fixed_merge",
        pins=("logprob",),
        measure="three arms on one captured fp32 logits tensor, each against float64 (expected about 1e-6)",
        hint="`rlmismatch logprob --reduce allgather_partials_fixed_merge`, which both engines can do; or --waive logprob.reduce:FIELD",
        zero={"tp1": "TP1 on both sides: nothing is merged across ranks"},
        plants=(
            Plant(id="lse_offset_log_tp", verdict="contract", what="the denominator counts every rank's sum TP times over", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.merge_order",
        family="logprob",
        asks="Does the collective's algorithm choice, not the math, move the number?",
        spec=LogProbReductionSpec,
        field_names=("merge_order", "nccl_algo", "nccl_proto", "topology"),
        mirrors={"merge_order": ("logprob.reduce:order",)},  # one collective, one order
        only_with_tp=("merge_order",),
        knobs={"logprob.merge_order": ("nccl_algo", "global_vocab_shard_index")},
        pin="global_vocab_shard_index",
        measure="repeat-run bitwise assertion under varied NCCL_ALGO and NCCL_PROTO, each in a fresh process",
        hint=(
            "`rlmismatch logprob --reduce allgather_partials_fixed_merge` merges the vocabulary shards by their global index;"
            " NCCL takes one order with NCCL_ALGO and NCCL_PROTO fixed on both sides"
        ),
        zero={"tp_le_2": "at most two ranks: one addition, no order"},
        plants=(Plant(id="merge_arrival_order", verdict="contract", what="the shards' partials are merged as they arrive", built=True),),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.precision",
        family="logprob",
        asks="Position of the fp32 upcast, output dtype of the head GEMM, or downcast of the partial?",
        spec=LogProbPrecisionSpec,
        mirrors={"head_dtype": ("gemm.runtime_flags:compute_dtype",)},  # a head that casts its operands
        only_with_tp=("transport_dtype",),
        knobs={
            "logprob.head_dtype": ("bf16", "fp32"),
            "logprob.accum_dtype": ("fp32", "bf16"),
            "logprob.downcast_at": ("final_write", "per_partial"),
        },
        pin="fp32 head, fp32 accumulate, final write",
        measure="2x2 of head dtype per side from the same hidden rows against an fp32 and a float64 oracle",
        trap=(
            "usually the largest log-prob axis; one side raised alone is worse than both low; requested head_dtype may be silently dropped,"
            " so read it back"
        ),
        hint=(
            "give the head, its log-softmax and what crosses ranks the same dtypes on both sides (--head-dtype, --accum-dtype,"
            " --downcast-at): both low is better than one side raised alone"
        ),
        plants=(
            Plant(id="head_fp32_one_sided", verdict="contract", what="one side's head writes float32 logits, the other's bf16", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.transform_chain",
        family="logprob",
        asks="Do the two sides compute the same distribution at all?",
        spec=LogProbTransformSpec,
        knobs={
            "logprob.transform_chain": (),
            "logprob.temperature": (),
            "logprob.logprobs_mode": ("raw_logprobs", "processed_logprobs"),
            "logprob.soft_cap": (),
            "logprob.logit_scale": (),
            "logprob.top_p": (),
            "logprob.top_k": (),
            "logprob.min_p": (),
        },
        pin="the declared chain applied to raw fp32 logits",
        measure=(
            "no drift number; recompute the other side's value from raw logits under every candidate chain and name the one that matches;"
            " none matches -> failed"
        ),
        trap="an ordering mismatch is a correctness bug, not drift; what 'processed' means depends on the engine version",
        hint="apply the same temperature, soft cap, scale, top-p, top-k, min-p and penalties, in the same order, on both sides",
        plants=(
            Plant(id="temperature_not_applied", verdict="contract", what="one side leaves out the temperature", built=True),
            Plant(
                id="top_p_renormalised",
                verdict="contract",
                what="the rollout renormalises over its nucleus",
                sides=("rollout",),
                built=True,
            ),
            Plant(id="soft_cap_missing", verdict="contract", what="one side leaves out the logit soft cap", built=True),
            Plant(id="cap_after_scale", verdict="contract", what="one side caps the logits after scaling them", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.selected_gather",
        family="logprob",
        asks="Single-owner gather, ignore_index, out-of-vocabulary target, or a shift by one?",
        spec=LogProbGatherSpec,
        mirrors={"active_mask": ("model.tokens:mask",)},
        knobs={"logprob.selected_gather": ("masked_sum_allreduce", "local_gather")},
        pin="the owner's value is copied, never summed",
        measure="owner count is 1 for every token; canary sequence; mean |delta| at shifts -1, 0, +1 has its minimum at 0",
        trap=(
            "a target outside the vocabulary must be an error (peers return logprob 0); a logprob of exactly 0 or above 0 on an active"
            " token is a finding"
        ),
        hint="score token t+1 with the logits of token t on both sides, and leave padded and ignored targets out of the mask",
        plants=(
            Plant(id="shift_by_one", verdict="contract", what="one side scores each token with the wrong row of logits", built=True),
            Plant(id="double_owner", verdict="contract", what="two ranks supply one target's logit", built=True),
            Plant(id="oov_target", verdict="contract", what="a target outside the vocabulary is scored", built=True),
            Plant(id="eos_logprob_zero", verdict="contract", what="the end token's log-prob is reported as exactly 0", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.head_gemm",
        family="logprob",
        asks=("Did the number move before any softmax ran (full-sequence head GEMM against a decode head GEMM with graph-padded rows)?"),
        spec=LogProbMaterializationSpec,
        knobs={
            "logprob.head_gemm_kernel": ("native", "triton"),
            "logprob.materialization": ("full_prefill", "chunked", "last_token_only"),
        },
        pin="fixed-order Triton GEMM",
        pins=("head_gemm",),
        measure=(
            "the same hidden rows at M = 1, graph bucket, full; head drift (logits) and LSE drift (equal logits) reported apart and adding"
            " up"
        ),
        hint="make one row of logits per scored token on both sides",
        plants=(
            Plant(
                id="head_row_off_by_one", verdict="contract", what="one side's head reads the hidden state of the row before", built=True
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.fusion",
        family="logprob",
        asks="Does fused online-softmax tiling, native jit fusion or sequence chunking change the partial?",
        spec=LogProbFusionSpec,
        knobs={
            "logprob.fusion_impl": ("none", "native", "te", "chunked_linear_ce"),
            "logprob.fusion_block_size": (),
            "logprob.fusion_chunk_size": (),
        },
        pin="none",
        pins=("logprob",),
        measure="sweep block and chunk on the same logits or hidden states (expected 1.2e-6 to 1.6e-6 against float64)",
        hint="switch off the trainer's fused cross entropy",
        measured=True,
        built="complete",
    ),
    Axis(
        id="logprob.backward",
        family="logprob",
        asks="Does a forward-compatible logprob also give compatible dlogits and entropy?",
        spec=LogProbBackwardSpec,
        knobs={
            "logprob.backward_impl": ("native", "triton"),
            "logprob.grad_downcast_at": ("final_write", "hard_bf16"),
            "logprob.entropy_reduce": ("native", "fixed_merge"),
        },
        pin="our backward",
        measure=(
            "dlogits against float64 per impl for one loss with grad_output other than 1; dhidden after the head; entropy under include and"
            " mask"
        ),
        trap=(
            "the native fused cross entropy hard-casts its gradient to bf16; a forward that matches to 2e-6 can have a gradient off by 2e-2"
        ),
        hint="use the trainer's unfused cross entropy, and take the entropy after temperature",
        plants=(
            Plant(
                id="zero_grad_non_owner",
                verdict="defect",
                what="ranks that do not own the target get no gradient",
                sides=("trainer",),
                built=True,
            ),
            Plant(
                id="entropy_before_temperature",
                verdict="contract",
                what="the entropy is taken of the logits before temperature",
                sides=("trainer",),
                built=True,
            ),
        ),
        side="trainer",
        measured=True,
        built="complete",
    ),
)
