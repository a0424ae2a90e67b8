"""Which collectives vLLM really ran: its choice depends on the size of each call, so what is enabled is not what ran.

Written for eager mode, where every call goes through the methods hooked here. Nothing is captured there, so "before capture" is "at all".
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from rlmismatch.pins.hooks import Patch

Phase = Literal["prefill", "decode", "mixed", "other"]  # of an engine step; other: outside of any, as in a trial
UNKNOWN: Final = "unknown"
_OPS: Final = ("all_reduce", "reduce_scatter", "all_gather", "gather")
_IN_TORCH: Final = (*_OPS, "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One of the device communicator's own ways to sum. fits: the method that says whether it takes a tensor; empty: any."""

    attribute: str
    name: str
    sums: str
    fits: str = ""


# In the order of vLLM's cuda_communicator.py and cpu_communicator.py. A call that neither one of these nor torch.distributed ran is
# UNKNOWN's: a later vLLM may have a way that is not named here.
BACKENDS: Final = (
    Backend(attribute="fi_ar_comm", name="flashinfer", sums="all_reduce", fits="should_use_fi_ar"),
    Backend(attribute="qr_comm", name="quick_reduce", sums="quick_all_reduce", fits="should_quick_allreduce"),
    Backend(attribute="fi_pcie_ipc_ar_comm", name="flashinfer_pcie", sums="all_reduce", fits="should_use"),
    Backend(attribute="aiter_ar_comm", name="aiter", sums="custom_all_reduce", fits="should_custom_ar"),
    Backend(attribute="ca_comm", name="custom", sums="custom_all_reduce", fits="should_custom_ar"),
    Backend(attribute="symm_mem_comm", name="symm_mem", sums="all_reduce", fits="should_use_symm_mem"),
    Backend(attribute="pynccl_comm", name="nccl", sums="all_reduce"),
    Backend(attribute="dist_module", name="shm", sums="all_reduce"),
)


@dataclass(frozen=True, order=True, kw_only=True)
class Call:
    """One kind of call: in which phase of the engine, what it did, who ran it, on how much of what."""

    phase: Phase
    op: str
    backend: str
    dtype: str
    size_bytes: int


class CollectiveLog:
    """Counts the TP group's collectives by `Call`, and the engine's steps by phase. `communicator` is None at TP1."""

    def __init__(self, communicator: Any | None) -> None:
        self._communicator = communicator
        self._ran = ""
        self.phase: Phase = "other"
        self.calls: Counter[Call] = Counter()
        self.steps: Counter[Phase] = Counter()

    def patches(self, runner: Any) -> list[Patch]:
        """The hooks that count, for as long as the engine lives. runner: the model runner, whose steps have the phases."""
        communicator = self._communicator
        if communicator is None:
            return []
        steps = Patch(target=runner, name="execute_model", make=self._step, pins=(), label="execute_model")
        # getattr of a bound method finds it on the class: every communicator has these four, the base class in torch.distributed.
        ops = [op for op in _OPS if hasattr(communicator, op)]
        out = [steps, *(Patch(target=communicator, name=op, make=self._outer(op), pins=(), label=op) for op in ops)]
        for backend, module in self._backends():
            for method in dict.fromkeys((backend.sums, *_OPS[1:], "all_gather_into_tensor")):
                if hasattr(module, method):
                    make = self._inner(backend.name)
                    out.append(Patch(target=module, name=method, make=make, pins=(), label=f"{backend.name} {method}"))
        make = self._inner(str(dist.get_backend(communicator.device_group)))
        return [*out, *(Patch(target=dist, name=op, make=make, pins=(), label=f"torch.distributed {op}") for op in _IN_TORCH)]

    def replaced_all_reduce(self, name: str, summed: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
        """The hook that has `summed` in the place of the all-reduce, and counts it as `name`. It goes in before `patches`."""

        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                self._ran = name
                out = summed(x)
                self._ran = name  # what `summed` called has left its own name
                return out

            return all_reduce

        return Patch(target=self._communicator, name="all_reduce", make=make, pins=(), label=f"all_reduce in {name}")

    def live_backends(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor | None]]:
        """Backend -> its own all-reduce of a tensor, whichever the communicator would choose; None for a tensor that it does not take."""
        out: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {}
        for backend, module in self._backends():
            if not getattr(module, "disabled", False):
                out[backend.name] = _alone(module, backend)
            # Also where vLLM disabled it because the host lacks multicast: this way does without.
            if backend.name == "symm_mem" and hasattr(module, "buffer"):
                out["symm_mem two-shot"] = _two_shot(module)
        if self._communicator is not None:
            group = self._communicator.device_group
            name = str(dist.get_backend(group))
            out[name if name not in out else f"torch.distributed {name}"] = lambda x: _by_torch(x, group)
        return out

    def why_idle(self, name: str) -> str:
        """Why the backend `name` ran in no call, as far as its communicator tells; empty where that is not known."""
        attribute = {b.name: b.attribute for b in BACKENDS}.get(name)
        if attribute is None or self._communicator is None:
            return ""
        module = getattr(self._communicator, attribute, None)
        if module is None:
            return f"vLLM made no {attribute}"
        return "vLLM disabled it, its log says why" if getattr(module, "disabled", False) else "no call was one that it takes"

    def all_reduces(self, before: Mapping[Call, int] | None = None) -> dict[str, dict[str, int]]:
        """Backend -> payload in bytes (as text) -> all-reduces since `before` (a copy of `calls`; default: the engine's start)."""
        out: dict[str, dict[str, int]] = {}
        for call, count in sorted((self.calls - Counter(before or {})).items()):
            if call.op == "all_reduce":
                sizes = out.setdefault(call.backend, {})
                sizes[str(call.size_bytes)] = sizes.get(str(call.size_bytes), 0) + count
        return out

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """While it is open, calls are a trial's of ours and no engine's."""
        before = self.calls.copy()
        try:
            yield
        finally:
            self.calls = before

    def _backends(self) -> list[tuple[Backend, Any]]:
        """Those that the communicator holds. On the CPU `dist_module` may be torch.distributed, which is hooked for every communicator."""
        found = [(b, getattr(self._communicator, b.attribute, None)) for b in BACKENDS]
        return [(b, module) for b, module in found if module is not None and module is not dist]

    def _step(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.phase = _phase(scheduled)
            self.steps[self.phase] += 1
            try:
                return native(scheduled, *args, **kwargs)
            finally:
                self.phase = "other"

        return execute_model

    def _outer(self, op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def collective(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                dtype, size = str(x.dtype).removeprefix("torch."), x.numel() * x.element_size()
                self._ran = UNKNOWN  # unless a backend below, or torch.distributed, says that it was the one
                out = native(x, *args, **kwargs)
                self.calls[Call(phase=self.phase, op=op, backend=self._ran, dtype=dtype, size_bytes=size)] += 1
                return out

            return collective

        return make

    def _inner(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def collective(*args: Any, **kwargs: Any) -> Any:
                self._ran = name
                return native(*args, **kwargs)

            return collective

        return make


def _phase(scheduled: Any) -> Phase:
    """decode: every request gets its next token. prefill: none does. A request that is new to the engine is never decoded."""
    new = {request.req_id for request in scheduled.scheduled_new_reqs}
    decoded = [n == 1 and request not in new for request, n in scheduled.num_scheduled_tokens.items()]
    return "decode" if all(decoded) else "mixed" if any(decoded) else "prefill"


def _alone(module: Any, backend: Backend) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def all_reduce(x: torch.Tensor) -> torch.Tensor | None:
        if backend.fits and not getattr(module, backend.fits)(x):
            return None
        copy = x.clone()
        out = getattr(module, backend.sums)(copy)
        # Shared memory sums in place and returns nothing; the others return their result, or None where they do not take the size.
        return copy if out is None and backend.attribute == "dist_module" else out

    return all_reduce


def _two_shot(module: Any) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The sum that vLLM's symm_mem_comm takes where it has no multicast kernel for the ranks, in the buffer that it shares with them."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor | None:
        size = x.numel() * x.element_size()
        if x.dtype != module.dtype or x.numel() > module.buffer.numel() or size % 4:
            return None
        shared: torch.Tensor = module.buffer[: x.numel()]
        shared.copy_(x.reshape(-1))
        try:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", module.group.group_name)
        except RuntimeError:  # vLLM keeps its buffer where the ranks could not share it
            return None
        return shared.reshape(x.shape).clone()

    return all_reduce


def _by_torch(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out
