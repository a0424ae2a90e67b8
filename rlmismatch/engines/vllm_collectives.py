"""Which all-reduce vLLM really ran: its choice depends on the size of each call, so what is enabled is not what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch

from rlmismatch.pins.hooks import Patch

# Attribute of the device communicator -> method that sums. The first group is CUDA's, `dist_module` the CPU's.
_BACKENDS: Final = {
    "pynccl_comm": "all_reduce",
    "ca_comm": "custom_all_reduce",
    "symm_mem_comm": "all_reduce",
    "fi_ar_comm": "all_reduce",
    "qr_comm": "quick_all_reduce",
    "dist_module": "all_reduce",
}


class AllReduceLog:
    """Counts the all-reduces of the TP group by backend and payload. `communicator` is None at TP1."""

    def __init__(self, communicator: Any | None) -> None:
        self._communicator = communicator
        self._calls: Counter[tuple[str, int]] = Counter()
        self._ran = ""

    def patches(self) -> list[Patch]:
        """The hooks that count, for as long as the engine lives."""
        communicator = self._communicator
        if communicator is None:
            return []
        out = [Patch(target=communicator, name="all_reduce", make=self._outer, pins=(), label="all_reduce")]
        for attribute, method in _BACKENDS.items():
            backend = getattr(communicator, attribute, None)
            # On the CPU this may be torch.distributed itself, whose calls are not all vLLM's.
            if backend is not None and backend is not torch.distributed:
                name = type(backend).__name__
                out.append(Patch(target=backend, name=method, make=self._inner(name), pins=(), label=name))
        return out

    def calls(self) -> dict[str, dict[str, int]]:
        """Backend -> payload in bytes (as text) -> calls, since the engine was loaded."""
        out: dict[str, dict[str, int]] = {}
        for (backend, size), count in sorted(self._calls.items()):
            out.setdefault(backend, {})[str(size)] = count
        return out

    def _outer(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            size = x.numel() * x.element_size()
            self._ran = "torch.distributed"  # unless a backend below says that it was the one
            out = native(x, *args, **kwargs)
            self._calls[self._ran, size] += 1
            return out

        return all_reduce

    def _inner(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(native: Callable[..., Any]) -> Callable[..., Any]:
            def all_reduce(*args: Any, **kwargs: Any) -> Any:
                self._ran = name
                return native(*args, **kwargs)

            return all_reduce

        return make
