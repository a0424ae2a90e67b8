"""The trainer's gradient of one real loss: minus the mean log-prob of the run's response tokens, one sequence a microbatch.

Megatron's own DistributedDataParallel holds main_grad and adds to it, its finalize_model_grads ends the step; the modules stay in eval mode
(dropout is 0 in any case). Gradients are compared here, parameter by parameter as the checkpoint names them, because they do not fit a
capture: what is kept of each comparison are sums (`STATISTICS`).
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from rlmismatch.engines import gradient_probes, logprob_knobs, megatron_weights, megatron_wgrad
from rlmismatch.engines.gradient_knobs import WGRAD, base_choice
from rlmismatch.engines.protocol import Arm, ArmResult
from rlmismatch.errors import UsageError
from rlmismatch.pins.hooks import OpSwitch, Recorder, installed
from rlmismatch.pins.megatron_gradients import ALL_PINS, COMPOSITION, Choice, GradientOps, Observer
from rlmismatch.tokens import Sequence

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

# What can be pinned apart in the backward: the operations with their gradients, the sum of dX over ranks, the way into main_grad.
PLAYERS: Final = ("ops", "dgrad_reduce", "wgrad_accumulate")
# Of one gradient g against the pinned one p, over the elements of one parameter.
STATISTICS: Final = ("count", "unequal", "sum p^2", "sum g^2", "sum (g - p)^2", "sum g p", "max |g - p|", "max |p|")
_PIECE: Final = 1 << 24  # elements that are compared in float64 at once: an embedding whole would take gigabytes more


class Buffers:
    """main_grad of every parameter, and what adds to it. One a live model; it holds a gradient as long as the model lives."""

    def __init__(self, engine: MegatronEngine) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        wide = "wgrad_bf16_accumulate" not in engine.plants
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=wide, overlap_grad_reduce=False, use_distributed_optimizer=False)
        self.ddp = DistributedDataParallel(engine.gpt.config, config, engine.gpt)
        # Whether the run asks for dW to be added inside the GEMM, and something here can do that.
        self.fused = engine.config.knobs.get(WGRAD) == "fused" and bool(megatron_wgrad.available(engine.device))
        self.ops = GradientOps(engine.gpt, engine.ops.shape, engine.shard, fused=self.fused)

    def zero(self) -> None:
        self.ddp.zero_grad_buffer()
        self.ops.forget()

    def finish(self) -> None:
        """What Megatron does at the end of a step; norms that ranks hold in part are summed here."""
        importlib.import_module("megatron.core.distributed.finalize_model_grads").finalize_model_grads([self.ddp])

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """float32: main_grad and what the pins added beside it."""
        main: torch.Tensor = parameter.main_grad.float()  # type: ignore[attr-defined]
        kept = self.ops.kept(parameter)
        return main.clone() if kept is None else main + kept


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One gradient: this rank's part of every parameter's in float32, and the log-probs [len(response_ids)] of its forwards, float64."""

    grads: Mapping[str, torch.Tensor]
    logprobs: Mapping[str, torch.Tensor]
    calls: Mapping[str, int]  # pin -> calls of the hooks that carry it
    silent: tuple[str, ...]


def take(engine: MegatronEngine, choice: Choice, sequences: Seq[Sequence], observer: Observer | None = None) -> Pass:
    """The gradient under `choice`; the native state is back on return, also after an error. Collective."""
    buffers = engine.gradient_buffers
    tokens = sum(len(s.response_ids) for s in sequences)
    switch = OpSwitch(active=frozenset(), probe="none", recorder=Recorder())
    logprobs = {}
    buffers.zero()
    with (
        installed(engine.ops.patches(switch, engine.native_settings)),
        installed(buffers.ops.patches(choice, observer)) as counter,
    ):
        for sequence in sequences:
            buffers.ops.begin(len(sequence.token_ids))
            ids = sequence.token_ids
            loss_S = engine.forward(ids, [*ids[1:], 0], grad=True)
            scored = slice(len(sequence.prompt_ids) - 1, len(ids) - 1)
            logprobs[sequence.id] = -loss_S[scored].detach().double().cpu()
            (loss_S[scored].sum() / tokens).backward()  # type: ignore[no-untyped-call]
    buffers.finish()
    grads = {name: buffers.gradient(p) for name, p in engine.gpt.named_parameters()}
    buffers.zero()
    return Pass(grads=grads, logprobs=logprobs, calls=counter.by_pin(), silent=counter.silent())


def subsets(tp: int) -> Iterator[frozenset[str]]:
    """Every set of players. Where one addition is all there is to a sum over ranks, its order is no player."""
    players = PLAYERS if tp > 2 else tuple(p for p in PLAYERS if p != "dgrad_reduce")
    for size in range(len(players) + 1):
        yield from map(frozenset, itertools.combinations(players, size))


def set_id(players: frozenset[str]) -> str:
    """How a set of pinned players is called in a capture: ``native``, ``ops+wgrad_accumulate``."""
    return "+".join(p for p in PLAYERS if p in players) or "native"


def why_not_closed(engine: MegatronEngine) -> str | None:
    """Why the pinned gradient of this set-up is no claim, or None."""
    if engine.tp.size > engine.model.num_kv_heads:
        heads = engine.model.num_kv_heads
        return (
            f"TP{engine.tp.size} is above the {heads} key/value heads: ranks share a head, and the engine rounds and adds its dK and dV"
            " rank by rank, outside of every pin"
        )
    return None


def run(engine: MegatronEngine, arm: Arm, sequences: Seq[Sequence]) -> ArmResult:
    """The probe ``grads``: the native gradient twice, the pinned one, and each set of players against it. Collective.

    Tensors: ``repeat`` [2] elements and how many of them differ between two native passes. ``logprob/SET`` [N]. ``of/SET/PARAMETER``
    [8] `STATISTICS`, of this gradient against the pinned one; ``order/PARAMETER`` [8] the same of rank order alone against the native one.
    ``digest/PARAMETER`` [32] SHA-256 of the pinned gradient, whole and un-fused, in float32. And those of
    `gradient_probes`. A set-up that is no claim gets the native pass alone.
    """
    started = time.perf_counter()
    if engine.ops.shape.chain.only_temperature is None:
        raise UsageError("grads-with-transforms", f"the gradient is not built for the transforms {engine.ops.shape.chain}", where="trainer")
    result = ArmResult(arm=arm, knobs=logprob_knobs.under_pin(engine.knob_outcomes, arm.pins))
    base = base_choice(engine.config.knobs, arm.pins)
    probes = gradient_probes.Probes(engine)
    first = take(engine, base, sequences, probes)
    again = take(engine, base, sequences)
    out = {"repeat": _unequal(engine, first, again), **probes.tensors()}
    result.scores = {path: dict(first.logprobs) for path in arm.paths}
    result.calls = {pin: again.calls.get(pin, 0) for pin in sorted(arm.pins)}
    del first
    refused = why_not_closed(engine)
    every = frozenset(PLAYERS)
    if refused is None:
        pinned = take(engine, _choice(base, every), sequences)
        result.notes += [f"{label}: its hook was installed and never called" for label in pinned.silent]
        out["logprob/pinned"] = torch.cat(list(pinned.logprobs.values()))
        for name, (tensor,) in _logical(engine, pinned):
            out[f"digest/{name}"] = torch.frombuffer(bytearray(hashlib.sha256(tensor.cpu().numpy().tobytes()).digest()), dtype=torch.uint8)
        for players in subsets(engine.tp.size):
            taken = again if not players else take(engine, _choice(base, players), sequences)
            for name, statistics in _against(engine, taken, pinned):
                out[f"of/{set_id(players)}/{name}"] = statistics
            if players == {"dgrad_reduce"}:
                out |= {f"order/{name}": statistics for name, statistics in _against(engine, taken, again)}
        result.notes += [f"pinned backward: {words}" for words in COMPOSITION]
    else:
        result.notes.append(f"no pinned gradient: {refused}")
        for name, statistics in _against(engine, again, again):
            out[f"of/native/{name}"] = statistics
    result.boundaries = out
    result.seconds = time.perf_counter() - started
    return result


def _choice(base: Choice, players: frozenset[str]) -> Choice:
    """`base` with the players pinned over it."""
    return Choice(
        pins=ALL_PINS if "ops" in players else base.pins,
        dgrad="rank_order" if "dgrad_reduce" in players else base.dgrad,
        wgrad="explicit" if "wgrad_accumulate" in players else base.wgrad,
    )


def _unequal(engine: MegatronEngine, a: Pass, b: Pass) -> torch.Tensor:
    """float64 [2]: elements, and how many differ, over all ranks."""
    own = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for name, grad in a.grads.items():
        own += torch.tensor([grad.numel(), int((grad != b.grads[name]).sum())], dtype=torch.float64, device=engine.device)
    return torch.stack(engine.tp.gathered(own)).sum(dim=0)


def _logical(engine: MegatronEngine, *passes: Pass) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """(logical name, its whole gradient in each pass) of every parameter, on rank 0; on other ranks nothing. Collective."""
    for parameter in megatron_weights.parameters(engine.model, te=False):
        parts = [engine.tp.gathered(taken.grads[parameter.name]) for taken in passes]
        if engine.tp.rank == 0:
            whole = [megatron_weights.unshard(parameter.kind, part, engine.model) for part in parts]
            for name, *tensors in zip(parameter.sources, *whole, strict=True):
                yield name, tuple(t.contiguous() for t in tensors)


def _against(engine: MegatronEngine, taken: Pass, pinned: Pass) -> Iterator[tuple[str, torch.Tensor]]:
    """(logical name, float64 [8] `STATISTICS`) of every parameter, on rank 0. Collective."""
    for name, (whole, other) in _logical(engine, taken, pinned):
        added, largest = [], []
        for g, p in zip(torch.split(whole.flatten(), _PIECE), torch.split(other.flatten(), _PIECE), strict=True):
            unequal, g, p = (g != p).sum().double(), g.double(), p.double()
            d = g - p
            added.append(torch.stack([unequal, p.square().sum(), g.square().sum(), d.square().sum(), (g * p).sum()]))
            largest.append(torch.stack([d.abs().max(), p.abs().max()]))
        unequal, *sums = torch.stack(added).sum(dim=0).tolist()
        yield name, torch.tensor([whole.numel(), unequal, *sums, *torch.stack(largest).amax(dim=0).tolist()], dtype=torch.float64)
