"""The contract of the trainer's backward, found by running it: known gradients through live layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from rlmismatch.contract import Reading, not_applicable, read, unknown
from rlmismatch.engines.gradient_knobs import DGRAD, WGRAD
from rlmismatch.engines.megatron_evidence import Fields, dtype_of, forward_only, one_value
from rlmismatch.engines.megatron_wgrad import linears

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

AS_SENT: Final = "as sent"  # every addition is rounded to the dtype in which the partials are sent
_ROWS: Final = 8  # of one rank in the trial of the sum
_RUNS: Final = 4  # pieces a rank into which an order may fall; what needs more was not understood
_NO_SUM: Final = 2.0**-4  # relative; above it dX is no sum of the partials, whatever its order


def dgrad_reduce(engine: MegatronEngine) -> Fields:
    """How the live trainer sums dX over ranks. Collective."""
    if not engine.config.grads:
        return forward_only("order", "acc_dtype", "engine")
    if engine.tp.size == 1:
        none = not_applicable("TP1: nothing to reduce")
        return {"order": none, "acc_dtype": none, "engine": none}
    backend = read(dist.get_backend(engine.tp.group), "torch.distributed.get_backend(tp group)")
    two = not_applicable("two ranks: one addition, no order")
    if engine.config.knobs.get(DGRAD) == "rank_order":
        source = "hooks of the pin, in force in every pass"
        order = two if engine.tp.size == 2 else read("pairs of neighbours, by rank", source)
        return {"order": order, "acc_dtype": read("float32", source), "engine": backend}
    order, acc_dtype = _order(engine)
    return {"order": two if engine.tp.size == 2 else order, "acc_dtype": acc_dtype, "engine": backend}


def _order(engine: MegatronEngine) -> tuple[Reading, Reading]:
    """(order, dtype of the running sum) that explain dX of layer 0's linear_qkv for a dY that picks one row of the weight per token."""
    source = "trial: one-hot dY through the live linear_qkv"
    module, tp = engine.gpt.decoder.layers[0].self_attention.linear_qkv, engine.tp
    weight = module.weight.detach()
    rows = _ROWS * tp.size
    x_sBH = torch.zeros(_ROWS if engine.config.sp else rows, 1, weight.shape[1], dtype=weight.dtype, device=engine.device)
    dy_SBN = torch.zeros(rows, 1, weight.shape[0], dtype=weight.dtype, device=engine.device)
    dy_SBN[torch.arange(rows), 0, torch.arange(rows) % weight.shape[0]] = 1.0
    with torch.enable_grad():
        x_sBH.requires_grad_()
        (dx_sBH,) = torch.autograd.grad(module(x_sBH)[0], x_sBH, dy_SBN)
    engine.gradient_buffers.zero()
    parts = tp.gathered(dy_SBN.matmul(weight))
    mine = [part.chunk(tp.size)[tp.rank] for part in parts] if engine.config.sp else parts
    own = explained(dx_sBH.detach().flatten(), [part.flatten() for part in mine], sp=engine.config.sp)
    ranks: list[Any] = [None] * tp.size
    dist.all_gather_object(ranks, own, group=tp.group)
    if None in ranks:
        nothing = unknown(f"{source}: no order of additions that is known gives these values")
        return nothing, nothing
    if any(dtype == "none" for _, dtype in ranks):
        nothing = not_applicable(f"{source}: dX is not the sum of the ranks' partials")
        return nothing, nothing
    orders = [order for order, _ in ranks] if engine.config.sp else [ranks[0][0]]
    return read("; ".join(orders), source), read(one_value(dtype for _, dtype in ranks), source)


def explained(got: torch.Tensor, parts: list[torch.Tensor], *, sp: bool) -> tuple[str, str] | None:
    """(order, dtype) of the first candidate family that gives every element of `got`; (.., "none") if it is no sum; None if unknown."""
    exact = torch.stack([p.double() for p in parts]).sum(dim=0)
    if not float((got.double() - exact).norm()) <= _NO_SUM * float(exact.norm()):
        return "", "none"
    sent, size = got.dtype, len(parts)
    if torch.equal(_left(parts, range(size), torch.float32).to(sent), got):
        return "by rank", "float32"
    for hop in dict.fromkeys((sent, torch.bfloat16)):
        runs = _runs({order: _left(parts, order, hop).to(sent) == got for order in _rings(size)})
        if runs is not None and len(runs) <= (_RUNS if sp else _RUNS * size):
            ring = ", ".join("-".join(map(str, order)) for order in runs)
            dtype = AS_SENT if hop is sent and sent is not torch.float32 else str(hop).removeprefix("torch.")
            return f"ring {ring}", dtype
    return None


def _rings(size: int) -> list[tuple[int, ...]]:
    """Every start of a ring, in both directions."""
    return [tuple((start + step * i) % size for i in range(size)) for step in (1, -1) for start in range(size)]


def _left(parts: list[torch.Tensor], order: Seq[int], dtype: torch.dtype) -> torch.Tensor:
    total = parts[order[0]].to(dtype)
    for i in order[1:]:
        total = total + parts[i].to(dtype)
    return total


def _runs(fits: dict[tuple[int, ...], torch.Tensor]) -> list[tuple[int, ...]] | None:
    """The fewest pieces, left to right, each explained by one order; None if some element is explained by none."""
    masks = {order: mask.tolist() for order, mask in fits.items()}
    count, at, out = len(next(iter(masks.values()))), 0, []
    while at < count:
        ends = {order: next((i for i in range(at, count) if not mask[i]), count) for order, mask in masks.items()}
        best = max(ends, key=lambda order: ends[order])
        if ends[best] == at:
            return None
        out.append(best)
        at = ends[best]
    return out


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
