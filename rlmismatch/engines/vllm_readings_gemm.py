"""The GEMM family's contract as the live rollout shows it: its process's switches, the dtype it computes in, its sums over ranks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

import torch

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines import collective_order, gemm_flags, gemm_knobs, vllm_sums
from rlmismatch.engines.gemm_flags import environment_reading
from rlmismatch.engines.vllm_collectives import UNKNOWN, Call
from rlmismatch.engines.vllm_site import Fields, Site, collective_engine, fill


def runtime_flags(site: Site) -> Fields:
    """Every field of gemm.runtime_flags. Collective: one product of each kind is run."""
    return {
        "compute_dtype": compute_dtype(site),
        "tensor_parallel_size": read(site.tp.world_size, "size of the live tensor-parallel group"),
        "sequence_parallel": not_applicable("no sequence parallelism in the rollout"),
        "tf32": gemm_flags.tf32_reading(),
        "bf16_reduced_precision_reduction": gemm_flags.reduced_precision_reading(),
        "deterministic_mode": read(torch.are_deterministic_algorithms_enabled(), "torch.are_deterministic_algorithms_enabled()"),
        "batch_invariant": read(gemm_knobs.vllm_batch_invariant(), "VLLM_BATCH_INVARIANT"),
        "cublas_workspace": environment_reading("CUBLAS_WORKSPACE_CONFIG"),
        "nccl_algo": environment_reading("NCCL_ALGO"),
        "nccl_proto": environment_reading("NCCL_PROTO"),
        "cudnn_deterministic": read(torch.backends.cudnn.deterministic, "torch.backends.cudnn.deterministic"),
        "float32_matmul_precision": gemm_flags.matmul_precision_reading(),
    }


# Where vLLM's batch-invariant mode multiplies by Triton kernels, by version, and the functions that every such product goes through.
BATCH_INVARIANT: Final = ("vllm.model_executor.layers.batch_invariant", "vllm.model_executor.determinism.batch_invariant")
OWN_PRODUCTS: Final = ("matmul_persistent", "mm_batch_invariant")


def own_products() -> list[tuple[ModuleType, str]]:
    """The functions of this vLLM that multiply without torch: (module, name)."""
    modules = [sys.modules[name] for name in BATCH_INVARIANT if name in sys.modules]
    return [(module, name) for module in modules for name in OWN_PRODUCTS if hasattr(module, name)]


def compute_dtype(site: Site) -> Reading:
    """The dtype of the operands of the first layer's products and the head's, from one row through each."""
    layer, head = site.live.layers[0], site.live.model.lm_head
    linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    dtype, device = site.runner.dtype, site.live.inv_freq.device
    with torch.inference_mode():
        with gemm_flags.product_dtypes(own_products()) as body:
            for linear in linears:
                row_1K = torch.zeros(1, linear.input_size_per_partition, dtype=dtype, device=device)
                linear.quant_method.apply(linear, row_1K, None)
        with gemm_flags.product_dtypes(own_products()) as seen:
            site.live.model.logits_processor._get_logits(torch.zeros(1, head.embedding_dim, dtype=dtype, device=device), head, None)
    given = getattr(site.live.model.logits_processor, "head_dtype", None) or dtype
    return gemm_flags.compute_dtype_reading(body, seen, str(given).removeprefix("torch."))


def forward_reduce(site: Site) -> Fields:
    """How the partials of row-parallel layers become one number. Collective: known operands are summed by what the layers call."""
    live, tp = site.live, site.live.tp
    if tp.size == 1:
        return fill("order acc_dtype collective engine", not_applicable("TP1: nothing to reduce"))
    wanted = vllm_sums.wanted(site.config, tp)
    if wanted == "rank_order":
        return gemm_knobs.rank_order_fields(site.config, ranks=tp.size)
    engine = read(collective_engine(site), "type of the device communicator and of its dist_module")
    hidden = site.model.hidden_size
    with site.collectives.uncounted():
        order, acc_dtype = collective_order.asked(
            lambda x_N: live.all_reduce(x_N.view(-1, hidden)).flatten(),
            tp,
            live.inv_freq.device,
            f"the all_reduce of {engine.value} behind a row-parallel layer",
            dtype=site.runner.dtype,
            sizes=[rows * tp.size * hidden for rows in vllm_sums.TRIAL_ROWS],
        )
    scattered = wanted == "reduce_scatter"
    return {
        "order": order,
        "acc_dtype": collective_order.or_one_addition(acc_dtype, tp, site.documented("float32", "one addition of two, rounded once")),
        "collective": read("reduce_scatter and all_gather", "the hook in the communicator's all_reduce")
        if scattered
        else read("all_reduce", "RowParallelLinear.forward"),
        "engine": engine,
    }


def all_reduce_backend(site: Site) -> Fields:
    """What ran so far, prefill and decode apart. Which backend a call takes depends on its size."""
    if site.tp.world_size == 1:
        return fill("actual_backends bytes_per_call calls", not_applicable("TP1: nothing to reduce"))
    log, source = site.collectives, "counted at the communicator's methods since the engine was loaded"
    counted = {call: n for call, n in log.calls.items() if call.op == "all_reduce" and call.phase in ("prefill", "decode", "mixed")}
    if not counted:
        return fill("actual_backends bytes_per_call calls", unknown("no step has run yet; see what ran in the arms"))
    by_phase = _by_phase(counted, lambda calls: sorted({c.backend for c in calls}))
    nameless = any(UNKNOWN in backends for backends in by_phase.values())
    return {
        "actual_backends": unknown("a call ran in a backend that has no hook") if nameless else read(by_phase, source),
        "bytes_per_call": read(_by_phase(counted, lambda calls: sorted({c.size_bytes for c in calls})), source),
        "calls": read(_by_phase(counted, lambda calls: sum(calls.values()) / log.steps[next(iter(calls)).phase]), source),
    }


def _by_phase(counted: dict[Call, int], value: Any) -> dict[str, Any]:
    phases = sorted({call.phase for call in counted})
    return {phase: value({c: n for c, n in counted.items() if c.phase == phase}) for phase in phases}
