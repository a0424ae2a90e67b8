"""What looks on at the trainer's native backward: the sum of every dX over ranks, and the ways in which dW can reach main_grad.

Tensors, merged over the ranks, sums over microbatches and elements, float64:

    dgrad/LAYER [8]         `DGRAD`: the engine's sum, rank order and balanced tree on the same partials as they are sent, against float64
    wgrad/LAYER/WAY [6]     `WGRAD`: one way against float64 over all microbatches, and what one step of Adam makes of the two
    stays [2]               256, then 1 more in the next microbatch: what a bfloat16 and what a float32 main_grad hold
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.engines import megatron_wgrad
from rlmismatch.kernels import gemm
from rlmismatch.kernels.common.tree import pairwise_tree

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

DGRAD: Final = (
    "count",
    "unequal: engine, rank order",
    "unequal: tree, rank order",
    "sum exact^2",
    "sum (engine - exact)^2",
    "sum (rank order - exact)^2",
    "sum (tree - exact)^2",
    "max |engine - rank order|",
)
WGRAD: Final = ("count", "sum exact^2", "sum (g - exact)^2", "sum step^2", "sum (step - exact step)^2", "max |g - explicit_fp32|")
WAYS: Final = ("fused", "explicit_rounded", "explicit_fp32", "bf16_main_grad")
MOST_LAYERS: Final = 4  # above it dW is looked at in the first, the middle and the last layer: five copies of a gradient are held
_ADAM_EPS: Final = 1e-8


def adam_step(grad: torch.Tensor) -> torch.Tensor:
    """The first step of Adam in units of the learning rate: both moments are corrected to the gradient itself, g / (|g| + eps)."""
    return grad / (grad.abs() + _ADAM_EPS)


class Probes:
    """The observer of one native pass."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        layers = engine.model.num_layers
        shown = range(layers) if layers <= MOST_LAYERS else sorted({0, layers // 2, layers - 1})
        self._shown = tuple(f"layers.{i}." for i in shown)
        self._dgrad: dict[str, torch.Tensor] = {}
        self._main: dict[str, dict[str, torch.Tensor]] = {}
        self._microbatch: dict[str, int] = {}

    def dgrad(self, name: str, ranks: list[torch.Tensor], summed_sBH: torch.Tensor) -> None:
        """Compare this rank's slice of the sum, or under SP the slice that it has."""
        tp, sp = self.engine.tp, self.engine.config.sp
        parts = [x.chunk(tp.size)[tp.rank] for x in ranks] if sp else ranks
        exact = torch.stack([x.double() for x in parts]).sum(dim=0)
        dtype = summed_sBH.dtype
        in_order = parts[0].float()
        for part in parts[1:]:
            in_order = in_order + part.float()
        in_order = in_order.to(dtype)
        tree = pairwise_tree([x.float() for x in parts], torch.add).to(dtype)
        errors = [(x.double() - exact).square().sum() for x in (summed_sBH, in_order, tree)]
        found = torch.stack(
            [
                exact.new_tensor(exact.numel()),
                (summed_sBH != in_order).sum().double(),
                (tree != in_order).sum().double(),
                exact.square().sum(),
                *errors,
                (summed_sBH.double() - in_order.double()).abs().max(),
            ]
        )
        before = self._dgrad.get(name)
        self._dgrad[name] = found if before is None else _joined([before, found])

    def wgrad(self, name: str, dy_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Add this microbatch in every way, and in float64."""
        if not name.startswith(self._shown):
            return
        shape, device, param = (dy_TN.shape[1], x_TK.shape[1]), dy_TN.device, dy_TN.dtype
        if name not in self._main:
            wide = {way: torch.zeros(shape, dtype=torch.float32, device=device) for way in WAYS if self._can(way)}
            wide["bf16_main_grad"] = wide["bf16_main_grad"].bfloat16()
            self._main[name] = {**wide, "exact": torch.zeros(shape, dtype=torch.float64, device=device)}
        main = self._main[name]
        rounded = dy_TN.T.matmul(x_TK)  # as Megatron's backward has it: in the model's dtype
        main["exact"] += dy_TN.double().T @ x_TK.double()
        main["explicit_rounded"] += rounded.float()
        main["explicit_fp32"] += gemm.grad_weight(dy_TN, x_TK, impl=self.engine.config.impl)
        main["bf16_main_grad"] += rounded.bfloat16()
        if "fused" in main:
            megatron_wgrad.kernel(self.engine.device).wgrad_gemm_accum_fp32(x_TK.contiguous(), dy_TN.to(param).contiguous(), main["fused"])

    def _can(self, way: str) -> bool:
        return way != "fused" or bool(megatron_wgrad.available(self.engine.device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the module's table, on the CPU. Collective."""
        gathered: Callable[[torch.Tensor], torch.Tensor] = lambda x: _joined(self.engine.tp.gathered(x)).cpu()  # noqa: E731
        out = {f"dgrad/{name}": gathered(found) for name, found in self._dgrad.items()}
        for name, main in self._main.items():
            exact, pin = main["exact"], main["explicit_fp32"].double()
            for way in WAYS:
                if way in main:
                    out[f"wgrad/{name}/{way}"] = gathered(_way(main[way].double(), exact, pin))
        low = torch.zeros(1, dtype=torch.bfloat16)
        wide = torch.zeros(1)
        for value in (256.0, 1.0):
            low += value
            wide += value
        return {**out, "stays": torch.cat([low.double(), wide.double()])}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sums add up; the last element is a maximum."""
    stacked = torch.stack(parts)
    return torch.cat([stacked[:, :-1].sum(dim=0), stacked[:, -1:].amax(dim=0)])


def _way(grad: torch.Tensor, exact: torch.Tensor, pin: torch.Tensor) -> torch.Tensor:
    step, exact_step = adam_step(grad), adam_step(exact)
    sums = ((exact**2).sum(), ((grad - exact) ** 2).sum(), (exact_step**2).sum(), ((step - exact_step) ** 2).sum())
    return torch.stack([exact.new_tensor(exact.numel()), *sums, (grad - pin).abs().max()])
