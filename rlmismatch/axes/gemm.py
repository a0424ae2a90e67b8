"""The GEMM family: matrix products, and the sums over ranks behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlmismatch.axes.base import Axis, Plant
from rlmismatch.contract import identical, recorded, semantic


@dataclass(frozen=True, kw_only=True)
class GemmDeterminismSpec:
    """The switches of one side's process that decide how its matrix products are computed."""

    compute_dtype: str = identical("dtype of the model's matrix products")
    tensor_parallel_size: int = identical("ranks that share one layer's weights")
    sequence_parallel: bool = identical("whether activations between the parallel layers are sharded along the sequence", side="trainer")
    tf32: bool = semantic("whether float32 products may use TF32")
    bf16_reduced_precision_reduction: bool = semantic("whether split-K partials of bf16 products may be added in bf16")
    deterministic_mode: bool = recorded("the trainer's own deterministic mode")
    batch_invariant: bool = recorded("the rollout's own batch-invariant mode")
    cublas_workspace: str = recorded("CUBLAS_WORKSPACE_CONFIG of the process")
    nccl_algo: str = recorded("NCCL_ALGO of the process")
    nccl_proto: str = recorded("NCCL_PROTO of the process")
    cudnn_deterministic: bool = recorded("whether cuDNN is held to deterministic algorithms")
    float32_matmul_precision: str = recorded("torch's float32 matmul precision: highest, high or medium")


@dataclass(frozen=True, kw_only=True)
class GemmContract:
    """Who multiplies."""

    backend_id: str = recorded("library and kernel that ran, per layer")
    batch_invariant: bool = recorded("whether a row's bits are independent of the other rows, as measured or claimed")


@dataclass(frozen=True, kw_only=True)
class GemmReductionSpec:
    """How the partial products of one GEMM become one number across ranks."""

    order: str = semantic("rank order in which partials are added")
    # A sum that one side alone has must not hold less than what is sent; where both sides have it, they must agree.
    acc_dtype: str = semantic("dtype of the running sum", must=("float32", "as sent"))
    collective: str = recorded("collective that carries the sum: all-reduce, reduce-scatter or all-gather")
    engine: str = recorded("who performed the sum")


@dataclass(frozen=True, kw_only=True)
class GemmWgradSpec:
    """How a weight gradient is added to what earlier microbatches left."""

    accum_dtype: str = semantic("dtype in which dW is added to main_grad", must=("float32",))
    main_grad_dtype: str = semantic("dtype in which main_grad is kept", must=("float32",))
    fusion: bool = recorded("whether the GEMM itself adds to main_grad")


@dataclass(frozen=True, kw_only=True)
class RolloutCommSpec:
    """What the rollout's communicator really did."""

    actual_backends: str = recorded("backends that ran, per call size")
    bytes_per_call: int = recorded("payload of each call, bytes")
    calls: int = recorded("calls per forward")


GEMM: Final[tuple[Axis, ...]] = (
    Axis(
        id="gemm.runtime_flags",
        family="gemm",
        asks="Is the drift arithmetic at all, or just two differently configured processes?",
        spec=GemmDeterminismSpec,
        knobs={
            "training.deterministic_mode": ("on", "off"),
            "rollout.batch_invariant": ("on", "off"),
            "gemm.compute_dtype": ("bf16", "fp16", "fp32"),
            "gemm.tf32": ("on", "off"),
            "gemm.bf16_reduced_precision_reduction": ("on", "off"),
            "training.sequence_parallel": ("on", "off"),
            "training.tensor_parallel_size": (),
        },
        pin="strict flag set, applied and read back inside each side's process after its engine has started",
        measure="flip one flag on one side; repeat 3 times; floor, then delta",
        trap=(
            "The two official deterministic modes contradict each other in one environment (NCCL_ALGO Ring against tree; cuBLAS workspace"
            " :4096:8 against :16:8 on Hopper), so each side has its own process and environment and intent classes are compared (fixed"
            " algorithm? split-K starved?), not strings. Legacy allow_tf32 can raise once the newer fp32_precision API was used: read both."
            " Unequal TP is normal in RL: it fails unless waived by name, and a waiver is printed. A rollout that has no sequence"
            " parallelism at all makes the trainer's --sp a waiver of its own, printed as one."
        ),
        hint=(
            "start both sides with the same --dtype and with --trainer-tp equal to --rollout-tp; if they are meant to differ,"
            " --waive gemm.runtime_flags:FIELD"
        ),
        plants=(
            Plant(id="tf32_one_sided", verdict="contract", what="float32 products use TF32 on one side only", built=True),
            Plant(
                id="compute_dtype_one_sided", verdict="contract", what="one side computes in another dtype than it was asked to", built=True
            ),
            Plant(
                id="autocast_head_one_sided", verdict="contract", what="one side's head and log-softmax run under bf16 autocast", built=True
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="gemm.kernel",
        family="gemm",
        asks="Does the GEMM kernel itself (cuBLAS, oneDNN, vendor Triton, fixed-order) move the number?",
        spec=GemmContract,
        knobs={"gemm.kernel": ("native", "triton")},
        pin=(
            "fixed-order Triton GEMM, fp32 accumulate, one tile order for every M, no split-K, no autotune; the same kernel in both engines"
        ),
        pins=("gemm",),
        measure=(
            "local replay of captured inputs per layer (qkv, o, gate_up, down) over rows 1, 8, 64, 512, full; each against float64; then"
            " pinned in both engines"
        ),
        trap=(
            "engines fuse qkv and gate_up differently, so compare per logical column; separate another kernel from the same kernel at"
            " another M"
        ),
        hint="see which layer the local replay names, and change the GEMM library or its build on that side",
        plants=(
            Plant(
                id="wrong_gemm_one_layer",
                verdict="defect",
                what="one layer's native GEMM returns 1.02 times the product; the weights are right",
                built=True,
            ),
            Plant(
                id="batch_invariance_claimed_but_broken",
                verdict="contract",
                what="a side that claims batch invariance gives a row other bits in a larger batch",
                built=True,
            ),
        ),
        built="complete",
    ),
    Axis(
        id="gemm.dgrad_reduce",
        family="gemm",
        asks="Is it the TP sum of dX in ColumnParallel backward, not the GEMM, that moves the gradient?",
        spec=GemmReductionSpec,
        field_names=("order", "acc_dtype", "engine"),
        only_with_tp=("order", "acc_dtype"),
        knobs={"gemm.dgrad_reduce": ("native", "rank_order")},
        pin="sum of per-rank partials in global rank order, fp32, one rounding",
        measure=(
            "capture per-rank partial dX; native sum, rank order, balanced tree, float64; propagate to the layer-0 gradient and the"
            " gradient norm"
        ),
        trap="trainer only (the rollout has no backward). With sequence parallel it is a reduce-scatter.",
        hint="reduce dX in float32 in the trainer",
        zero={
            "trainer_tp1": "trainer TP1: nothing is summed over ranks",
            "trainer_tp2_equal_payload": "trainer TP2 with equal payload and accumulate dtype: one addition, no order",
        },
        plants=(
            Plant(
                id="dgrad_not_reduced",
                verdict="defect",
                what="dX stays a per-rank partial: the all-reduce is lost",
                sides=("trainer",),
                built=True,
            ),
            Plant(
                id="dgrad_bf16_accumulate",
                verdict="contract",
                what="dX partials of more than bf16 are added in bf16",
                sides=("trainer",),
                built=True,
            ),
        ),
        side="trainer",
        measured=True,
        built="complete",
    ),
    Axis(
        id="gemm.forward_reduce",
        family="gemm",
        asks="Are the sequence-parallel reduce-scatter and the plain all-reduce of RowParallel forward the same number?",
        spec=GemmReductionSpec,
        only_with_tp=("order", "acc_dtype"),
        knobs={"gemm.forward_reduce": ("all_reduce", "reduce_scatter", "rank_order")},
        pin="rank order, fp32, one rounding, in both engines",
        pins=("forward_reduce",),
        measure=(
            "replay captured partials through every arm at the training and at the decode row count; an fp32-payload arm separates order"
            " from accumulate dtype"
        ),
        hint=(
            "run both sides at the same TP with --forward-reduce rank_order: one order, one rounding; or accept the difference, which is"
            " measured, by --waive gemm.forward_reduce:FIELD"
        ),
        zero={"tp1": "TP1 on both sides: nothing is summed over ranks"},
        plants=(
            Plant(
                id="forward_reduce_bf16_accumulate",
                verdict="contract",
                what="row-parallel partials are added one after another in bf16",
                built=True,
            ),
        ),
        measured=True,
        built="complete",
    ),
    Axis(
        id="gemm.wgrad_accumulate",
        family="gemm",
        asks='Does fusing dW = dY^T X with "+= main_grad" change the result?',
        spec=GemmWgradSpec,
        knobs={"gemm.wgrad_accumulate": ("fused", "explicit")},
        pin="explicit dW GEMM in fp32 added to an fp32 main_grad",
        measure="at least 2 microbatches with a non-zero main_grad; fused, explicit-bf16, explicit-fp32, float64",
        trap="with a bf16 main_grad that starts at zero the gap hides until microbatch 2 (256 + 1 stays 256 in bf16)",
        hint="accumulate gradients in float32 (main_grad in float32) in the trainer",
        plants=(
            Plant(id="wgrad_bf16_accumulate", verdict="contract", what="dW is added to main_grad in bf16", sides=("trainer",), built=True),
        ),
        side="trainer",
        measured=True,
        built="complete",
    ),
    Axis(
        id="rollout.all_reduce_backend",
        family="gemm",
        asks="Does the rollout's own all-reduce (custom IPC, symmetric memory, FlashInfer, quick reduce) differ from NCCL?",
        spec=RolloutCommSpec,
        knobs={"rollout.all_reduce_backend": ("auto", "nccl", "custom", "symm_mem", "flashinfer", "gloo", "shm", "rank_order")},
        pin="rank order",
        measure=(
            "wrap every communicator method before graph capture; histogram backend x bytes x dtype x count of what RAN; replay captured"
            " partials on every backend available"
        ),
        trap="the choice is per call size, so prefill and decode of one layer differ; what is enabled is not what ran",
        hint="force one all-reduce backend in the rollout for every call size",
        zero={"rollout_tp1": "rollout TP1: nothing is summed over ranks"},
        plants=(
            Plant(
                id="all_reduce_wrong_data",
                verdict="defect",
                what="one rank's contribution is lost in the all-reduce",
                sides=("rollout",),
                built=True,
            ),
        ),
        side="rollout",
        measured=True,
        built="complete",
    ),
)
