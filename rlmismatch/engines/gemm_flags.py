"""The switches of one side's process that decide how its products are computed: set, read back, and put into words of intent.

torch has two switches for TF32: `allow_tf32`, and since 2.9 `fp32_precision`. Setting the old one writes both; setting the new one
makes reading the old one raise. So the old one is written and the new one is read first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.hooks import Patch, installed

PREFIX: Final = "gemm."
_ON: Final[Mapping[str, bool]] = {"on": True, "off": False}
# What each official mode asks of the environment. The two contradict each other in one process: one side, one process.
CUBLAS_FIXED: Final = (":4096:8", ":16:8")


def asked_flag(config: SideConfig, name: str) -> bool | None:
    """What ``gemm.NAME`` asks for on this side: True, False, or None where nobody asked."""
    value = config.knobs.get(PREFIX + name)
    return None if value is None else _ON[str(value)]


@contextlib.contextmanager
def in_force(config: SideConfig) -> Iterator[None]:
    """torch's own switches as this side is asked to have them, while the context is open; set once its engine has started."""
    matmul = torch.backends.cuda.matmul
    tf32, reduced = asked_flag(config, "tf32"), asked_flag(config, "bf16_reduced_precision_reduction")
    # Only what is asked for is touched: an engine may have set the rest for reasons of its own.
    before_tf32 = tf32_allowed() if tf32 is not None else None
    before_reduced = matmul.allow_bf16_reduced_precision_reduction
    try:
        if tf32 is not None:
            matmul.allow_tf32 = tf32
        if reduced is not None:
            matmul.allow_bf16_reduced_precision_reduction = reduced
        yield
    finally:
        if before_tf32 is not None:
            matmul.allow_tf32 = before_tf32
        if reduced is not None:
            matmul.allow_bf16_reduced_precision_reduction = before_reduced


def tf32_allowed() -> bool:
    """Whether float32 products may run in TF32, by whichever of torch's two switches was set last."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", "none")  # torch before 2.9 has the old switch alone
    return bool(matmul.allow_tf32) if precision == "none" else precision == "tf32"


def tf32_reading() -> Reading:
    return read(tf32_allowed(), "torch.backends.cuda.matmul.fp32_precision, allow_tf32")


def reduced_precision_reading() -> Reading:
    name = "allow_bf16_reduced_precision_reduction"
    return read(bool(getattr(torch.backends.cuda.matmul, name)), f"torch.backends.cuda.matmul.{name}")


def matmul_precision_reading() -> Reading:
    source = "torch.get_float32_matmul_precision()"
    try:
        return read(torch.get_float32_matmul_precision(), source)
    except RuntimeError:  # what torch answers once the newer switch was set against the older one
        return unknown(f"{source}: the old and the new TF32 switch were both used")


def environment_reading(name: str) -> Reading:
    """One variable of the process with what it is meant for: the two engines' modes use other strings for one intent."""
    value = os.environ.get(name)
    return read(f"{'unset' if value is None else value} ({intent(name, value)})", name)


def intent(name: str, value: str | None) -> str:
    """What a setting of CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO or NCCL_PROTO is for."""
    if value is None:
        return "chosen per call"
    if name == "CUBLAS_WORKSPACE_CONFIG":
        return "one fixed workspace" if value in CUBLAS_FIXED else "a workspace of another size"
    return "several allowed" if "," in value or value.startswith("^") else "one fixed choice"


class _Operands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the floating-point dtypes that go into matrix products, whatever calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(word in str(func) for word in ("mm", "linear", "gemm", "matmul")):
            self.add(args)
        return func(*args, **(kwargs or {}))

    def add(self, args: tuple[Any, ...]) -> None:
        self.dtypes |= {a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype.is_floating_point}


def _seen(operands: _Operands, module: ModuleType, name: str) -> Patch:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def product(*args: Any, **kwargs: Any) -> Any:
            operands.add(args)
            return native(*args, **kwargs)

        return product

    return Patch(target=module, name=name, make=make, pins=(), label=name)


@contextlib.contextmanager
def product_dtypes(own: Iterable[tuple[ModuleType, str]] = ()) -> Iterator[set[str]]:
    """Names of the dtypes of the operands of every product run while the context is open, filled in on exit.

    own: functions of modules that multiply by kernels of their own, which torch's dispatcher does not see.
    """
    found: set[str] = set()
    with _Operands() as operands, installed([_seen(operands, module, name) for module, name in own]):
        yield found
    found |= {str(dtype).removeprefix("torch.") for dtype in operands.dtypes}


def compute_dtype_reading(body: set[str], head: set[str], head_given: str) -> Reading:
    """The dtype that products run in. body: of a layer's products. head: of the head's, which was given operands of `head_given`.

    A head in another dtype than the model's is logprob.precision's to name; one that computes in another than it was given is ours.
    """
    dtypes = sorted(body | (head - {head_given}))
    source = "trial: dtypes of the operands of a layer's products, and of the head's where it casts them"
    if not body:
        return unknown(f"{source}: no product was seen")
    return read(dtypes[0] if len(dtypes) == 1 else dtypes, source)
