"""The attention family. A person turns one knob, ``attention``: on (the engine's own path) or off (our kernel on both sides).

The axes are the dimensions in which the two paths can part; each is recorded and isolated on its own. They are ten, and their text is
data, so this file is longer than a module with logic should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlmismatch.axes.base import Axis, Plant
from rlmismatch.contract import identical, recorded, semantic


@dataclass(frozen=True, kw_only=True)
class AttentionContract:
    """What function of Q, K and V a side computes, and who computes it."""

    num_query_heads: int = identical("query heads of the model")
    num_kv_heads: int = identical("key/value heads of the model")
    head_dim: int = identical("width of one head")
    dtype: str = identical("dtype of Q, K and V")
    tensor_parallel_size: int = identical("ranks that share the heads")
    context_parallel_size: int = identical("ranks that share the sequence")
    mask: str = semantic("which positions a token may see")
    sliding_window: int = semantic("tokens in the window, the current one included; 0 is none")
    softmax_scale: float = semantic("factor on Q K^T before the softmax")
    logit_soft_cap: float = semantic("cap of tanh soft-capping on the scores; 0 is none")
    sinks: bool = semantic("whether a learned sink enters the denominator")
    rope_identity: str = semantic("theta, scaling and factor of the rotary embedding, in one line")
    cache_identity: str = semantic("whether K/V of an earlier request or of other weights can be read")
    requested_backend: str = recorded("backend that was asked for")
    actual_backend: str = recorded("backend of the function that ran, per layer")
    mode: str = recorded("eager, or the form of graph capture")
    fallback_reason: str = recorded("why the actual backend is not the requested one")


@dataclass(frozen=True, kw_only=True)
class AttentionMaterializationSpec:
    """In which pieces the rows of one sequence pass through attention."""

    logical_rows: str = semantic("query rows per token")
    physical_form: str = recorded("full prefill, chunked prefill, paged prefill or decode")
    chunk_size: int = recorded("tokens per step of a chunked prefill")
    block_size: int = recorded("tokens per KV page")


@dataclass(frozen=True, kw_only=True)
class AttentionRopeSpec:
    """The rotary embedding of Q and K."""

    theta: float = semantic("base of the frequencies")
    scaling: str = semantic("rule that stretches the frequencies, with its numbers")
    attention_factor: float = semantic("factor on cos and sin")
    rotary_dim: int = semantic("leading elements of a head that are rotated")
    rotary_layout: str = semantic("which elements make a pair: half or interleaved")
    position_ids: str = semantic("position of each token")
    cache_position: str = semantic("how a cached key's position is counted")
    q_rope_state: str = semantic("whether attention gets Q rotated")
    k_cache_rope_state: str = semantic("whether K is kept rotated")
    cos_sin_dtype: str = recorded("dtype in which cos and sin are kept")
    rope_fusion_boundary: str = recorded("what the rotation is fused with")


@dataclass(frozen=True, kw_only=True)
class AttentionLayoutSpec:
    """Which head is where."""

    num_query_heads: int = identical("query heads of the model")
    num_kv_heads: int = identical("key/value heads of the model")
    head_dim: int = identical("width of one head")
    tp_head_ownership: str = identical("query heads of each rank")
    gqa_mapping: str = semantic("which key/value head serves a query head: block or tiled")
    qkv_layout: str = recorded("order of Q, K and V in the fused projection")
    segment_boundaries: str = semantic("how sequences in one batch are kept apart")


@dataclass(frozen=True, kw_only=True)
class DecodeKVCacheMetadata:
    """Which keys and values a decode step reads."""

    logical_token_order: str = semantic("order of the tokens read through the page table")
    cache_identity: str = semantic("which request and weights the cached K/V come from")
    position_ids: str = semantic("position of each cached token")
    weight_version: str = semantic("weights that wrote the cache")
    kv_dtype: str = semantic("dtype in which K and V are kept")
    paged_kv_policy: str = recorded("how pages are allotted and reused")
    page_table: str = recorded("physical pages of each sequence")
    block_size: int = recorded("tokens per KV page")
    prefix_cache_hits: int = recorded("tokens taken from the prefix cache")


@dataclass(frozen=True, kw_only=True)
class AttentionLseSpec:
    """The log-sum-exp that a merge of partial results consumes."""

    lse_export: bool = semantic("whether attention returns its LSE")
    lse_domain: str = semantic("what is summed: attention scores or vocabulary logits")
    lse_base: str = semantic("base of the logarithm: e or 2")
    lse_shape: str = semantic("order of the axes, e.g. [head, token]")
    masked_row: str = semantic("value for a row that sees nothing")


@dataclass(frozen=True, kw_only=True)
class AttentionReductionSpec:
    """How partial attention results become one, and in which precision."""

    global_block_index: str = semantic("how KV blocks are numbered across ranks")
    acc_dtype: str = semantic("dtype in which partial outputs are merged")
    merge_order: str = semantic("order in which partial outputs are merged")
    cp_partition: str = semantic("which tokens a context-parallel rank holds: contiguous or zigzag")
    cp_comm_type: str = recorded("how K/V travel between context-parallel ranks")
    split_kv_policy: str = recorded("number of KV splits, or the rule that picks it")
    engine: str = recorded("who merged")
    accum_dtype: str = semantic("dtype in which a dot product's terms are added")
    downcast_at: str = semantic("where the partial output state is cast to the model's dtype")
    kv_dtype: str = semantic("dtype of K and V as attention reads them")
    backend_policy: str = recorded("casts inside the backend that are documented, such as bf16 probabilities")


@dataclass(frozen=True, kw_only=True)
class AttentionBackendCapability:
    """What a candidate backend can promise."""

    backend_candidate: str = recorded("library and kernel")
    library_version: str = recorded("its version")
    backend_capability: str = semantic("what it supports of the contract")


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardSpec:
    """The gradients of attention."""

    dq: str = semantic("formula and dtype of dQ")
    dk: str = semantic("formula and dtype of dK")
    dv: str = semantic("formula and dtype of dV")
    saved_forward_state: str = semantic("what the backward reads of the forward: out, lse")
    backward_backend: str = recorded("kernel that ran")
    deterministic: bool = recorded("whether the backward adds without atomics")


ATTENTION: Final[tuple[Axis, ...]] = (
    Axis(
        id="attention.provenance",
        family="attention",
        asks="Is it real drift, or two attention processes configured differently?",
        spec=AttentionContract,
        mirrors={
            "dtype": ("gemm.runtime_flags:compute_dtype",),
            "tensor_parallel_size": ("gemm.runtime_flags:tensor_parallel_size",),
            "rope_identity": ("attention.rope:theta", "attention.rope:scaling", "attention.rope:attention_factor"),
            "cache_identity": ("attention.paged_kv:cache_identity",),
        },
        knobs={"attention.sink": ()},
        measure="the same side with a forced backend against auto",
        trap=(
            "actual must come from the function that ran, not from the request; a sliding window needs its inclusive or exclusive"
            " convention"
        ),
        hint="give both engines the same mask, window, softmax scale, soft cap and sinks: they follow from the checkpoint's config.json",
        plants=(
            Plant(id="window_off_by_one", verdict="contract", what="the sliding window counts one token more on one side", built=True),
            Plant(id="sink_dropped", verdict="contract", what="one side leaves the learned sink out of the denominator", built=True),
            Plant(id="backend_fell_back", verdict="recorded", what="the backend that ran is not the one that was asked for", built=True),
            Plant(id="softmax_scale", verdict="contract", what="one side scales the scores by another factor", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.materialization",
        family="attention",
        asks="Full-prefill training graph against chunked-prefill, paged-prefill and decode rollout graph?",
        spec=AttentionMaterializationSpec,
        knobs={"attention.materialization": ("full_prefill", "chunked_prefill", "paged_prefill", "decode")},
        pin="our attention gives the same bits in all four forms",
        pins=("attention",),
        measure="forced tokens; three ratios: trainer/rollout-prefill, rollout-prefill/decode, decode/recorded",
        trap="prompt logprobs bypass the prefix cache; norm and GEMM also see other row counts, so hold them pinned",
        hint="score with the form that training used, or recompute the rollout's log-probs with one prefill",
        ratio="prefill/decode",
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.rope",
        family="attention",
        asks="Fused or unfused RoPE, pre- or post-RoPE Q/K, position ids, theta, layout, or the cast boundary?",
        spec=AttentionRopeSpec,
        knobs={"attention.rope": ("native", "unfused_fp32")},
        pin="unfused, cos/sin in fp32, one cast",
        pins=("rope",),
        measure="rotated Q and K in ULP against the reference, then propagated",
        trap=(
            'all positions shifted alike give zero drift for plain RoPE (say "no numeric effect expected"); a YaRN factor squared looks'
            " like a softmax-scale change, only the declared field tells them apart"
        ),
        hint="give both engines the checkpoint's rope parameters (theta, scaling, layout) and positions that count from 0 in each sequence",
        plants=(
            Plant(id="rope_theta", verdict="contract", what="one side's frequencies are made with another theta", built=True),
            Plant(id="rope_interleaved", verdict="contract", what="one side pairs neighbouring elements instead of halves", built=True),
            Plant(id="yarn_factor", verdict="contract", what="one side multiplies cos and sin by a YaRN attention factor", built=True),
            Plant(id="positions_jump", verdict="contract", what="positions skip ahead in the middle of a sequence on one side", built=True),
            Plant(id="positions_shifted", verdict="recorded", what="all positions are shifted alike on one side", built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.layout",
        family="attention",
        asks="Different head ownership, KV-head replication, packed or varlen layout, or transposes?",
        spec=AttentionLayoutSpec,
        mirrors={
            "num_query_heads": ("attention.provenance:num_query_heads",),
            "num_kv_heads": ("attention.provenance:num_kv_heads",),
            "head_dim": ("attention.provenance:head_dim",),
            "tp_head_ownership": ("gemm.runtime_flags:tensor_parallel_size",),
        },
        values={"gqa_mapping": ("block", "tiled")},
        pin="canonical [token, head, dim], block GQA map",
        measure=(
            "loader canary (unique values per head through both weight loaders); then contiguous against packed-strided on the same data"
        ),
        hint="load the same checkpoint with both weight loaders, and keep packed sequences apart on the side that packs",
        zero={"gqa_trivial": "Hkv = 1 or Hkv = Hq: the GQA map cannot differ"},
        plants=(
            Plant(id="gqa_tiled", verdict="contract", what="query heads take key/value heads in turn instead of in blocks", built=True),
            Plant(id="heads_swapped", verdict="contract", what="two query heads are swapped on one side", built=True),
            Plant(
                id="packed_without_segments",
                verdict="contract",
                what="packed sequences see each other: the segment boundaries are lost",
                sides=("trainer",),
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.paged_kv",
        family="attention",
        asks="Does physical page order, prefix-cache reuse, slot mapping or cache position change the logical KV sequence?",
        spec=DecodeKVCacheMetadata,
        mirrors={
            "position_ids": ("attention.rope:position_ids",),
            "kv_dtype": ("attention.precision:kv_dtype",),
        },
        pin="logical order read through the page table",
        measure=(
            "pages shuffled, prefix hit against cold, block sizes; expected exactly zero; non-zero means the kernel's split follows pages"
        ),
        hint="reset the rollout's prefix cache after every weight update",
        plants=(
            Plant(id="stale_kv", verdict="contract", what="decode reads K/V that older weights wrote", sides=("rollout",), built=True),
            Plant(id="page_swap", verdict="contract", what="two entries of the page table are swapped", sides=("rollout",), built=True),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.lse",
        family="attention",
        asks="Is the (out, lse) mismatch a missing LSE, base e against 2, a wrong shape, or a vocabulary LSE taken for an attention LSE?",
        spec=AttentionLseSpec,
        pin="natural log, [head, token], masked row = -inf",
        only_with_cp=("lse_export", "lse_domain", "lse_base", "lse_shape", "masked_row"),
        measure="LSE of the native kernel against float64 on captured Q, K; slope 1/ln 2 names a base error, shifted axes a shape error",
        trap='applies only where a merge consumes it; otherwise "not applicable", which is not "unknown"',
        hint="export the attention LSE in natural log as [head, token] where a merge consumes it",
        plants=(Plant(id="lse_base2", verdict="contract", what="one side's LSE is in base 2", built=True),),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.merge_order",
        family="attention",
        asks="CP transport, split-K tiling, backend-local order, or the online-softmax merge order?",
        spec=AttentionReductionSpec,
        field_names=("global_block_index", "acc_dtype", "merge_order", "cp_partition", "cp_comm_type", "split_kv_policy", "engine"),
        only_with_cp=("global_block_index", "acc_dtype", "merge_order", "cp_partition"),
        knobs={
            "attention.merge_order": ("native", "global_block_index"),
            "attention.split_kv_policy": ("auto", "1", "2", "4"),
        },
        pin="fp32 (out, lse) partials sorted by global block index, left fold, one downcast",
        measure="captured partials in all or sampled orders -> envelope; fixed fold; float64; forced splits on the same Q/K/V",
        hint="merge partial results in global block order, and partition the sequence the same way on both sides",
        zero={"no_merge": "CP1 on the trainer, one split on the rollout: nothing is merged"},
        measured=True,
        built="complete",
        plants=(
            Plant(
                id="cp_contiguous_vs_zigzag",
                verdict="contract",
                what="context-parallel ranks hold contiguous pieces where zigzag ones are declared",
                sides=("trainer",),
                built=True,
            ),
            Plant(id="merge_arrival_order", verdict="contract", what="partial results are merged as they arrive", built=True),
        ),
    ),
    Axis(
        id="attention.precision",
        family="attention",
        asks="BF16 or FP32 accumulation, backend-internal dtype, partial-state downcast, or the final write?",
        spec=AttentionReductionSpec,
        field_names=("accum_dtype", "downcast_at", "kv_dtype", "backend_policy"),
        knobs={
            "attention.accum_dtype": ("fp32", "bf16"),
            "attention.downcast_at": ("final_write", "per_partial", "per_block"),
        },
        pin="fp32, final write",
        pins=("attention",),
        measure="every downcast point simulated on captured inputs; which policy explains the native residual best",
        trap='a backend-internal cast that cannot be observed is "unobservable", never "equal"',
        hint=(
            "accumulate attention in float32 and cast once, at the final write, on both sides; keep the KV cache in the model's dtype;"
            " a float32 Triton kernel needs tl.dot(input_precision='ieee'): its default is TF32"
        ),
        plants=(
            Plant(
                id="attention_bf16_accumulate",
                verdict="contract",
                what="one side rounds attention's running sums to bf16",
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.backend_reuse",
        family="attention",
        asks="Can a TE training backend or a FlashInfer rollout backend satisfy this contract?",
        spec=AttentionBackendCapability,
        knobs={"attention.backend_candidate": ("te", "flashinfer", "flash_attn", "sdpa")},
        measure=(
            "candidate x {full, chunked, paged, decode} x shapes against the reference; repeatability and batch invariance before accuracy;"
            " no silent fallback"
        ),
        hint="choose a backend whose capabilities cover the contract on both sides",
        plants=(
            Plant(
                id="auto_split_under_invariance_claim",
                verdict="contract",
                what="a backend that claims batch invariance picks its KV splits by load",
                sides=("rollout",),
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="attention.backward",
        family="attention",
        asks="Does forward-compatible attention also give compatible dq, dk, dv?",
        spec=AttentionBackwardSpec,
        knobs={"attention.backward_backend": ("native", "triton")},
        pin="our deterministic backward (no atomics)",
        measure=(
            "fixed dout; native three times (floor); native against reference against float64; backward fed the other kernel's (out, lse)"
        ),
        hint="use the trainer's deterministic attention backward",
        plants=(Plant(id="dk_scaled", verdict="defect", what="dK comes out scaled by a constant", sides=("trainer",), built=True),),
        side="trainer",
        measured=True,
        built="complete",
    ),
)
