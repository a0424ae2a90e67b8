"""Where the trainer's readings take their evidence from: the table of documented facts, and small forms of `Reading`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch.contract import Reading, documented, not_applicable, read, unknown

if TYPE_CHECKING:
    from rlmismatch.engines.megatron import MegatronEngine

# Documented facts were read in the sources of these versions; of any other they are unknown.
DOCUMENTED_VERSIONS: Final = ("0.16.1",)
Fields = dict[str, Reading]


def by_table(value: Any, source: str) -> Reading:
    """A documented value, `source` being the file it was read in; unknown, with how to declare it, for a version outside the table."""
    version = core_version()
    if version not in DOCUMENTED_VERSIONS:
        return unknown(f"megatron-core {version} is not in the table ({', '.join(DOCUMENTED_VERSIONS)}); look in {source} and --declare it")
    return documented(value, f"megatron-core {version}: {source}")


def derived(reading: Reading, value: Callable[[Any], Any]) -> Reading:
    """A value that follows from another reading, with that one's evidence; unknown stays unknown."""
    return reading if reading.value is None else Reading(value=value(reading.value), evidence=reading.evidence, source=reading.source)


def forward_only(*names: str) -> Fields:
    """Fields of a backward axis, none of which applies while only the forward is run."""
    return fill(not_applicable("forward only: no backward is run"), *names)


def fill(reading: Reading, *names: str) -> Fields:
    """One reading for several fields."""
    return dict.fromkeys(names, reading)


def from_environment(name: str) -> Reading:
    """What this process's environment holds under `name`; None if nothing."""
    return read(os.environ.get(name), f"environment {name}")


def one_value(values: Iterable[Any]) -> Any:
    """The value all share; a list if they do not, which equals no single value."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else distinct


def dtype_of(*tensors: torch.Tensor) -> Any:
    """The torch name without prefix that all share; a list if they do not."""
    return one_value(str(t.dtype).removeprefix("torch.") for t in tensors)


def core_version() -> str:
    """Version of the megatron-core that is imported here."""
    import megatron.core

    return str(megatron.core.__version__)


def gemm_library(engine: MegatronEngine) -> str:
    """The library behind the spec's GEMM; which kernel it picks, it does not say."""
    if engine.device.type == "cpu":
        return "torch.matmul (oneDNN or MKL)"
    return "torch.matmul (cuBLAS)" if engine.config.trainer_spec == "local" else "transformer_engine general_gemm (cuBLASLt)"
