"""The GEMM family's forward contract as the live trainer shows it: switches of its process, dtype of its products, sums over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlmismatch.contract import Reading, not_applicable, read
from rlmismatch.engines import collective_order, gemm_flags, gemm_knobs, megatron_sums
from rlmismatch.engines.gemm_flags import environment_reading
from rlmismatch.engines.megatron_evidence import Fields, by_table, dtype_of, fill

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine


def runtime_flags(engine: MegatronEngine) -> Fields:
    """Every field of gemm.runtime_flags. Collective: two tokens are run."""
    config = engine.gpt.config
    return {
        "compute_dtype": compute_dtype(engine),
        "tensor_parallel_size": read(engine.tp.size, "size of the live tensor-parallel group"),
        "sequence_parallel": read(
            bool(engine.gpt.decoder.layers[0].self_attention.linear_qkv.sequence_parallel), "linear_qkv.sequence_parallel"
        ),
        "tf32": gemm_flags.tf32_reading(),
        "bf16_reduced_precision_reduction": gemm_flags.reduced_precision_reading(),
        "deterministic_mode": read(bool(config.deterministic_mode), "config.deterministic_mode"),
        "batch_invariant": read(bool(config.batch_invariant_mode), "config.batch_invariant_mode"),
        "cublas_workspace": environment_reading("CUBLAS_WORKSPACE_CONFIG"),
        "nccl_algo": environment_reading("NCCL_ALGO"),
        "nccl_proto": environment_reading("NCCL_PROTO"),
        "cudnn_deterministic": read(torch.backends.cudnn.deterministic, "torch.backends.cudnn.deterministic"),
        "float32_matmul_precision": gemm_flags.matmul_precision_reading(),
    }


def compute_dtype(engine: MegatronEngine) -> Reading:
    """The dtype of the operands of the first layer's products and the head's, from one row through each."""
    if engine.config.trainer_spec == "te":  # its products run below torch's dispatcher
        return read(dtype_of(*engine.gpt.parameters()), "dtype of every parameter")
    layer, head = engine.gpt.decoder.layers[0], engine.gpt.output_layer
    linears = (layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1, layer.mlp.linear_fc2)
    given = engine.ops.shape.head.dtype or getattr(torch, engine.config.dtype)
    with torch.no_grad():
        with gemm_flags.product_dtypes() as body:
            for linear in linears:
                _product(linear, linear.weight.detach())
        weight = engine.gpt.shared_embedding_or_output_weight() if engine.live_tied else head.weight
        with gemm_flags.product_dtypes() as seen:
            _product(head, weight.detach().to(given))
    return gemm_flags.compute_dtype_reading(body, seen, str(given).removeprefix("torch."))


def _product(linear: torch.nn.Module, weight_NK: torch.Tensor) -> None:
    """One row of zeros through a linear layer's own product, without any sum over ranks."""
    linear._forward_impl(  # type: ignore[operator]
        input=torch.zeros(1, 1, weight_NK.shape[1], dtype=weight_NK.dtype, device=weight_NK.device),
        weight=weight_NK,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=None,
        grad_output_buffer=None,
    )


def forward_reduce(engine: MegatronEngine) -> Fields:
    """How the partials of row-parallel layers become one number. Collective: known operands are summed by what the layers call."""
    tp, sp = engine.tp, bool(engine.gpt.decoder.layers[0].self_attention.linear_proj.sequence_parallel)
    if tp.size == 1:
        return fill(not_applicable("TP1: nothing to reduce"), "order", "acc_dtype", "collective", "engine")
    replaced = bool(megatron_sums.replacements(engine.config, tp))
    if replaced and gemm_knobs.row_sum(engine.config) == "rank_order":
        return gemm_knobs.rank_order_fields(engine.config, ranks=tp.size)
    native = "reduce_scatter" if sp else "all_reduce"
    instead = "all_reduce, then this rank's rows" if sp else "reduce_scatter and all_gather"
    backend = collective_order.backend_of(tp)
    order, acc_dtype = collective_order.asked(
        megatron_sums.live(tp, hidden=engine.model.hidden_size, sp=sp),
        tp,
        engine.device,
        f"{backend}'s {instead if replaced else native} behind a row-parallel layer",
        dtype=getattr(torch, engine.config.dtype),
        sizes=[rows * tp.size * engine.model.hidden_size for rows in megatron_sums.TRIAL_ROWS],
        scattered=sp,
    )
    return {
        "order": order,
        "acc_dtype": collective_order.or_one_addition(acc_dtype, tp, by_table("float32", "tensor_parallel/mappings.py")),
        "collective": read(instead, "the hook in tensor_parallel.layers") if replaced else read(native, "linear_proj.sequence_parallel"),
        "engine": read(backend, "torch.distributed.get_backend(tp group)"),
    }
