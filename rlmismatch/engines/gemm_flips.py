"""Runtime flags flipped in a live process: each product of the engine with a flag as it is, with it flipped, and with it put back.

Only what torch looks at in every call can be flipped while an engine lives. What a library or an engine reads once, when it starts, is
refused with that reason: its number would be that of no change at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlmismatch.engines import gemm_flags
from rlmismatch.engines.gemm_facts import NOT_FLIPPED, FlagFacts, packed
from rlmismatch.engines.protocol import SideConfig

ROWS: Final = (8, 64)  # of one product: libraries split K by the row count
REPEATS: Final = 3

Product = Callable[[torch.Tensor], torch.Tensor]


class NotPutBackError(RuntimeError):
    """A flag of the process is not what it was before it was flipped."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One switch of the process. live: its value in a word. flip: has the other value in force while the context is open."""

    name: str
    live: Callable[[], str]
    flip: Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def flipped(flag: Flag) -> Iterator[tuple[str, str]]:
    """The flag with its other value, while the context is open: (value before, value as read back now).

    Raises NotPutBackError if it does not read as before once it is closed: what is measured next would be another process.
    """
    before = flag.live()
    with flag.flip():
        yield before, flag.live()
    if flag.live() != before:
        raise NotPutBackError(f"the flag {flag.name} was {before} before it was flipped, and is {flag.live()} after it was put back")


def live_flags(device: str) -> list[Flag]:
    """The flags that products may look at and that can be flipped here. device: ``cpu`` or ``cuda``."""
    return [flag for flag in _known(device) if not _stuck(flag, device)]


def _stuck(flag: Flag, device: str) -> str:
    """Why this torch, or this device's library, does not bear the flag's other value; empty where it does."""
    x = torch.ones(8, 64, device=device, dtype=torch.bfloat16) if device == "cpu" or torch.cuda.is_available() else None
    try:
        with flipped(flag) as (before, after):
            if x is not None:
                torch.nn.functional.linear(x, x).sum().item()
    except NotPutBackError:
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return f"it still reads {before} when it is flipped" if after == before else ""


def _known(device: str) -> list[Flag]:
    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn
    flags = [
        Flag(name="tf32", live=lambda: _word(gemm_flags.tf32_allowed()), flip=lambda: _float32(_other_tf32)),
        Flag(name="float32_matmul_precision", live=_matmul_precision, flip=lambda: _float32(_other_matmul_precision)),
        Flag(name="bf16_reduced_precision_reduction", live=lambda: _word(_bf16_reduction()[0]), flip=lambda: _reduction(_other_reduced)),
        _attribute("cudnn_deterministic", torch.backends.cudnn, "deterministic"),
    ]
    if _deterministic_refused(device) == "":
        flags.append(Flag(name="deterministic_algorithms", live=_deterministic_word, flip=_deterministic))
    if device == "cuda":
        flags += [
            _attribute("fp16_reduced_precision_reduction", matmul, "allow_fp16_reduced_precision_reduction"),
            _attribute("fp16_accumulation", matmul, "allow_fp16_accumulation"),
            Flag(name="cublas_library", live=_blas_library, flip=_other_blas_library),
        ]
        if _has_split_k():
            flags.append(Flag(name="bf16_split_k", live=lambda: _word(_bf16_reduction()[1]), flip=lambda: _reduction(_other_split_k)))
        if _has_workspace():
            flags.append(Flag(name="cublas_workspace", live=_workspace, flip=_other_workspace))
    else:
        flags += [
            _attribute("onednn", mkldnn, "enabled"),
            _attribute("onednn_deterministic", mkldnn, "deterministic"),
        ]
        if _onednn() is not None:
            flip = lambda: _float32(_other_onednn_precision)  # noqa: E731
            flags.append(Flag(name="onednn_fp32_precision", live=_onednn_precision, flip=flip))
    return flags


def refused(config: SideConfig) -> dict[str, str]:
    """Flags of the axis that this side's live process cannot flip, and why."""
    once = "is read once, when the library starts"
    out = {
        "compute_dtype": "the weights are loaded in it",
        "tensor_parallel_size": "the weights are cut by it when they are loaded",
        "nccl_algo": f"NCCL_ALGO {once}",
        "nccl_proto": f"NCCL_PROTO {once}",
    }
    if config.device == "cpu" or not _has_workspace():
        out["cublas_workspace"] = f"CUBLAS_WORKSPACE_CONFIG {once}"
    if config.side == "trainer":
        out["sequence_parallel"] = "Megatron builds its layers for it"
        out["deterministic_mode"] = (
            "Megatron's config is read while the model is built; of products, deterministic_algorithms is what it turns on"
        )
        out["batch_invariant"] = "Megatron puts its batch-invariant kernels in when it starts"
    else:
        out["batch_invariant"] = "vLLM reads VLLM_BATCH_INVARIANT when it starts"
    deterministic = _deterministic_refused(config.device)
    if deterministic:
        out["deterministic_algorithms"] = deterministic
    return out | {flag.name: why for flag in _known(config.device) if (why := _stuck(flag, config.device))}


def notes(config: SideConfig) -> list[str]:
    """`refused` as an arm's notes."""
    return [f"{NOT_FLIPPED}{name}: {why}" for name, why in refused(config).items()]


def facts(name: str, product: Product, x_MK: torch.Tensor, exact_MN: torch.Tensor, flags: Sequence[Flag]) -> dict[str, torch.Tensor]:
    """``flag/...`` facts of one product. exact_MN: float64, of the same rows. Every flag is back, and read back, on return."""
    out: dict[str, torch.Tensor] = {}
    for rows in dict.fromkeys(min(m, x_MK.shape[0]) for m in ROWS):
        x_mK, exact_mN = x_MK[:rows].contiguous(), exact_MN[:rows]

        def taken(x_mK: torch.Tensor = x_mK) -> list[torch.Tensor]:
            return [product(x_mK).double() for _ in range(REPEATS)]

        native = taken()
        for flag in flags:
            with flipped(flag) as (before, after):
                other = taken()
            if after == before:
                raise RuntimeError(f"the flag {flag.name} was flipped, and still reads {before}")
            again = product(x_mK).double()
            first = native[0]
            fact = FlagFacts(
                count=first.numel(),
                unequal_floor=_moved(first, native),
                unequal=_moved(first, other),
                unequal_after=_moved(first, [again]),
                native_error=float((first - exact_mN).abs().sum()),
                flipped_error=max(float((o - exact_mN).abs().sum()) for o in other),
                difference=max(float((o - first).abs().sum()) for o in other),
                scale=float(exact_mN.abs().sum()),
                largest=max(float((o - first).abs().max()) for o in other),
            )
            out[f"flag/{flag.name}/{before}/{after}/{name}/{rows}"] = packed(fact)
    return out


def _moved(first: torch.Tensor, others: Sequence[torch.Tensor]) -> float:
    """Elements that are another number in any of `others`."""
    return float(torch.stack([first != other for other in others]).any(dim=0).sum())


def _word(on: bool) -> str:
    return "on" if on else "off"


def _attribute(name: str, holder: Any, attribute: str) -> Flag:
    """A boolean of torch's that is an attribute."""

    @contextlib.contextmanager
    def flip() -> Iterator[None]:
        before = bool(getattr(holder, attribute))
        setattr(holder, attribute, not before)
        try:
            yield
        finally:
            setattr(holder, attribute, before)

    return Flag(name=name, live=lambda: _word(bool(getattr(holder, attribute))), flip=flip)


def _onednn() -> Any:
    """oneDNN's own switches for products; None in a torch before 2.9, which has none."""
    return getattr(torch.backends.mkldnn, "matmul", None)


def _matmul_precision() -> str:
    return str(gemm_flags.matmul_precision_reading().value)


@contextlib.contextmanager
def _float32(write: Callable[[], None]) -> Iterator[None]:
    """`write` in force. torch's switches for float32 products write each other, so all of them are kept and put back together."""
    legacy = gemm_flags.matmul_precision_reading().value
    newer = [(holder, holder.fp32_precision) for holder in (torch.backends.cuda.matmul, _onednn()) if hasattr(holder, "fp32_precision")]
    try:
        write()
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for holder, precision in newer:
            holder.fp32_precision = precision


def _other_tf32() -> None:
    matmul = torch.backends.cuda.matmul
    if gemm_flags.matmul_precision_reading().value is None:  # the newer switch is in use, and the older one would raise
        matmul.fp32_precision = "ieee" if gemm_flags.tf32_allowed() else "tf32"
    else:
        matmul.allow_tf32 = not gemm_flags.tf32_allowed()


def _other_matmul_precision() -> None:
    torch.set_float32_matmul_precision("highest" if _matmul_precision() == "medium" else "medium")


def _onednn_precision() -> str:
    return str(getattr(_onednn(), "fp32_precision", None))


def _other_onednn_precision() -> None:
    _onednn().fp32_precision = "ieee" if _onednn_precision() == "bf16" else "bf16"


def _deterministic_word() -> str:
    return _word(torch.are_deterministic_algorithms_enabled())


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before, only_warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(not before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def _deterministic_refused(device: str) -> str:
    """Why torch's deterministic algorithms cannot be turned on; empty where they can."""
    if device == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in gemm_flags.CUBLAS_FIXED:
        return "torch refuses cuBLAS's products under it unless CUBLAS_WORKSPACE_CONFIG was set when the process started"
    return ""


def _has_split_k() -> bool:
    """Whether this torch lets a split of K be forbidden."""
    return hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k")


def _bf16_reduction() -> tuple[bool, bool]:
    """(whether partials may be added in bf16, whether K may be split)."""
    matmul = torch.backends.cuda.matmul
    split = bool(matmul.allow_bf16_reduced_precision_reduction_split_k) if _has_split_k() else True
    return bool(matmul.allow_bf16_reduced_precision_reduction), split


@contextlib.contextmanager
def _reduction(other: Callable[[bool, bool], tuple[bool, bool]]) -> Iterator[None]:
    """Both switches of split-K in one: torch sets them together, and a bare boolean would allow the split again."""
    before = _bf16_reduction()
    _set_bf16_reduction(*other(*before))
    try:
        yield
    finally:
        _set_bf16_reduction(*before)


def _set_bf16_reduction(reduced: bool, split: bool) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (reduced, split) if _has_split_k() else reduced


def _other_reduced(reduced: bool, split: bool) -> tuple[bool, bool]:
    return (False, split) if reduced else (True, True)


def _other_split_k(reduced: bool, split: bool) -> tuple[bool, bool]:
    # torch forbids a split of K only together with partials in bf16.
    return (False, False) if split else (reduced, True)


def _has_workspace() -> bool:
    """Whether this torch lets cuBLAS's workspace be changed while the process lives."""
    return hasattr(torch._C, "_cuda_setCublasWorkspaceSize")


def _workspace() -> str:
    return f"{torch.backends.cuda.cublas_workspace_size()} bytes"


@contextlib.contextmanager
def _other_workspace() -> Iterator[None]:
    """No workspace at all: what a split of K needs it for cannot run. Handles that are in use keep theirs until it is cleared."""
    before = torch.backends.cuda.cublas_workspace_size()
    try:
        torch.backends.cuda.cublas_workspace_size(0 if before else 2**23)
        torch._C._cuda_clearCublasWorkspaces()
        yield
    finally:
        torch.backends.cuda.cublas_workspace_size(before)
        torch._C._cuda_clearCublasWorkspaces()


def _blas_library() -> str:
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()


@contextlib.contextmanager
def _other_blas_library() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublas" if _blas_library() == "cublaslt" else "cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
