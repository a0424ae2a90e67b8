"""The contract of the trainer's backward, found by running it: known gradients through live layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.contract import Evidence, Reading, not_applicable, read, unknown
from rlmismatch.engines import collective_order
from rlmismatch.engines.collective_order import TWO
from rlmismatch.engines.gradient_knobs import DGRAD, WGRAD
from rlmismatch.engines.megatron_evidence import Fields, dtype_of, forward_only, one_value
from rlmismatch.engines.megatron_wgrad import linears

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

_ROWS: Final = 8  # of one rank in the trial of the sum


def dgrad_reduce(engine: MegatronEngine) -> Fields:
    """How the live trainer sums dX over ranks. Collective.

    Without gradients two ranks are asked all the same: their sum may be shown to be one addition, which has no order.
    """
    asked, tp = engine.config.grads, engine.tp
    if tp.size == 1:
        none = not_applicable("TP1: nothing to reduce")
        return {"order": none, "acc_dtype": none, "engine": none}
    if not asked and (tp.size > 2 or engine.config.trainer_spec == "te"):  # Transformer Engine's layer has a norm in front of the product
        return forward_only("order", "acc_dtype", "engine")
    backend = read(collective_order.backend_of(tp), "torch.distributed.get_backend(tp group)")
    if engine.config.knobs.get(DGRAD) == "rank_order":
        source = "hooks of the pin, in force in every pass"
        order = not_applicable(TWO) if tp.size == 2 else read("pairs of neighbours, by rank", source)
        return {"order": order, "acc_dtype": read("float32", source), "engine": backend}
    order, acc_dtype = _order(engine)
    if not asked and acc_dtype.evidence is Evidence.UNKNOWN:  # nothing here depends on it
        acc_dtype = not_applicable(f"forward only: no backward is run ({acc_dtype.source})")
    return {"order": order, "acc_dtype": acc_dtype, "engine": backend}


def _order(engine: MegatronEngine) -> tuple[Reading, Reading]:
    """(order, dtype of the running sum) that explain dX of layer 0's linear_qkv for a dY that picks one row of the weight per token."""
    source = "trial: one-hot dY through the live linear_qkv"
    module, tp, sp = engine.gpt.decoder.layers[0].self_attention.linear_qkv, engine.tp, engine.config.sp
    weight = module.weight.detach()
    rows = _ROWS * tp.size
    x_sBH = torch.zeros(_ROWS if sp else rows, 1, weight.shape[1], dtype=weight.dtype, device=engine.device)
    dy_SBN = torch.zeros(rows, 1, weight.shape[0], dtype=weight.dtype, device=engine.device)
    dy_SBN[torch.arange(rows), 0, torch.arange(rows) % weight.shape[0]] = 1.0
    with torch.enable_grad():
        x_sBH.requires_grad_()
        (dx_sBH,) = torch.autograd.grad(module(x_sBH)[0], x_sBH, dy_SBN)
    if engine.config.grads:
        engine.gradient_buffers.zero()
    parts = [(part.chunk(tp.size)[tp.rank] if sp else part).flatten().cpu() for part in tp.gathered(dy_SBN.matmul(weight))]
    dx_N = dx_sBH.detach().flatten().cpu()
    if not collective_order.on_every_rank(collective_order.is_sum(dx_N, parts), tp, engine.device):
        nothing = not_applicable(f"{source}: dX is not the sum of the ranks' partials")
        return nothing, nothing
    found = collective_order.explained(dx_N, parts, tp, engine.device, scattered=sp)
    if found is None:
        nothing = unknown(f"{source}: no order of additions that is known gives these values")
        return nothing, nothing
    acc_dtype = read(found.acc_dtype, source)
    if tp.size == 2:
        return not_applicable(TWO), acc_dtype
    # Where float32 sums of these weights are rounded once, every order gives the same bits, and the collective itself is asked.
    return _collectives_order(engine, rows * weight.shape[1]) if found.several else read(found.order, source), acc_dtype


def _collectives_order(engine: MegatronEngine, size: int) -> Reading:
    """The order of the collective behind dX: an all-reduce, or a reduce-scatter under sequence parallelism."""
    tp, sp = engine.tp, engine.config.sp
    collective = collective_order.reduce_scatter(tp) if sp else collective_order.all_reduce(tp)
    what = f"{collective_order.backend_of(tp)}'s {'reduce-scatter' if sp else 'all-reduce'} of the tp group"
    dtype = getattr(torch, engine.config.dtype)
    return collective_order.asked(collective, tp, engine.device, what, dtype=dtype, sizes=(size,), scattered=sp)[0]


def wgrad_accumulate(engine: MegatronEngine) -> Fields:
    """How dW reaches main_grad in the live trainer. Collective."""
    if not engine.config.grads:
        return forward_only("accum_dtype", "main_grad_dtype", "fusion")
    if engine.config.knobs.get(WGRAD) == "explicit":
        source = "float32 accumulators of the pin, in force in every pass"
        return {"accum_dtype": read("float32", source), "main_grad_dtype": read("float32", source), "fusion": read(False, source)}
    held = _held(engine)
    names = {257.0: "float32", 256.0: "bfloat16"}
    source = "trial: a dW of 256, then one of 1, through the live linear_fc2"
    return {
        "accum_dtype": read(names[held], f"{source}: main_grad holds {held:g}") if held in names else unknown(f"{source} left {held:g}"),
        "main_grad_dtype": read(dtype_of(*(p.main_grad for p in engine.gpt.parameters())), "main_grad of every parameter, under DDP"),
        "fusion": read(
            one_value(bool(m.gradient_accumulation_fusion) for m in linears(engine.gpt)),
            "gradient_accumulation_fusion of every linear layer",
        ),
    }


def _held(engine: MegatronEngine) -> float:
    """One element of main_grad after two microbatches whose dW is 256 and 1 there."""
    module = engine.gpt.decoder.layers[0].mlp.linear_fc2
    x_SBK = torch.zeros(1, 1, module.weight.shape[1], dtype=module.weight.dtype, device=engine.device)
    x_SBK[..., 0] = 1.0
    engine.gradient_buffers.zero()
    for value in (256.0, 1.0):
        with torch.enable_grad():
            y_SBN = module._forward_impl(
                input=x_SBK.clone().requires_grad_(),
                weight=module.weight,
                bias=None,
                gradient_accumulation_fusion=module.gradient_accumulation_fusion,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=engine.tp.group,
                grad_output_buffer=None,
            )
        dy_SBN = torch.zeros_like(y_SBN)
        dy_SBN[..., 0] = value
        y_SBN.backward(dy_SBN)
    held = float(module.weight.main_grad[0, 0])
    engine.gradient_buffers.zero()
    return held
