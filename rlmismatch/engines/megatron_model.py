"""Builds the GPTModel of a checkpoint: its config, its layer spec, and what Megatron-core needs to run without a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional

from rlmismatch.engines import megatron_cp
from rlmismatch.engines.gemm_flags import asked_flag
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import EnvironmentUnfitError
from rlmismatch.pins.context_parallel import ContextParallel
from rlmismatch.pins.hooks import Patch, installed

if TYPE_CHECKING:
    from rlmismatch.checkpoint import ModelConfig

# Rows that Megatron's own trainer pads the vocabulary to (--make-vocab-size-divisible-by), times TP.
VOCAB_MULTIPLE = 128


class TrainerRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm where Megatron's local spec wants it.

    The local spec's own wrapper builds this very class, but refuses sequence parallelism and leaves the weights in float32
    (a trainer casts them with Float16Module). The arithmetic is torch's, unchanged.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _NoRngTracker:
    """Dropout on the CPU draws from torch's default generator; Megatron's tracker holds CUDA states only."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def has_te_loss(gpt: Any) -> bool:
    """Whether Megatron can call Transformer Engine's cross entropy here."""
    from megatron.core.models.common.language_module import language_module

    return language_module.te_parallel_cross_entropy is not None and next(gpt.parameters()).is_cuda


@contextlib.contextmanager
def fused_loss(config: Any, fusion: str) -> Iterator[None]:
    """Turns Megatron's own fused cross entropy on (native, te) or off (anything else), which it reads at every call."""
    before = config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl
    config.cross_entropy_loss_fusion = fusion in ("native", "te")
    config.cross_entropy_fusion_impl = fusion if fusion in ("native", "te") else before[1]
    try:
        yield
    finally:
        config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = before


def cpu_shims() -> contextlib.AbstractContextManager[Any]:
    """Makes Megatron-core's few hard-wired CUDA calls point at the CPU while the context is open. Process-wide."""
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import layers

    cpu, tracker = torch.device("cpu"), _NoRngTracker()
    return installed(
        [
            Patch(target=torch.cuda, name="current_device", make=lambda _: lambda: cpu, pins=()),
            Patch(target=tensor_parallel, name="get_cuda_rng_tracker", make=lambda _: lambda *a, **k: tracker, pins=()),
            Patch(target=layers, name="get_cuda_rng_tracker", make=lambda _: lambda *a, **k: tracker, pins=()),
            Patch(target=fused_softmax, name="get_sliding_window_causal_mask", make=lambda _: _window_mask, pins=()),
        ]
    )


def _window_mask(queries: int, keys: int, window_size: tuple[int, int]) -> torch.Tensor:
    """Megatron's own mask of a sliding window, bool [queries, keys], True where a query may not look, on the CPU."""
    seen = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries - window_size[0]).tril(keys - queries + window_size[1])
    return ~seen


@contextlib.contextmanager
def model_parallel(*, tp: int, cp: int) -> Iterator[None]:
    """Megatron's process groups, some thirty of them; and their end, which Megatron itself leaves out: each keeps threads that poll."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    made = [group for group in parallel_state._global_process_group_list or [] if isinstance(group, dist.ProcessGroup)]
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        for group in made:
            if group in dist.distributed_c10d._world.pg_map:  # some Megatron does end
                dist.destroy_process_group(group)


def have_transformer_engine() -> bool:
    """Whether transformer_engine really imports here: Megatron-core replaces a broken one by stubs without a word."""
    try:
        import transformer_engine.pytorch  # noqa: F401  the import is the question
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def check_spec(config: SideConfig) -> None:
    """Raises EnvironmentUnfitError if the TE spec is asked for and can not run here."""
    if config.trainer_spec == "te" and (config.device != "cuda" or not have_transformer_engine()):
        raise EnvironmentUnfitError(
            "transformer-engine-not-usable",
            "the trainer spec 'te' needs a CUDA device and a transformer_engine that imports",
            where="trainer",
            hint="use --trainer-spec local",
        )


def build_model(config: SideConfig, model: ModelConfig, cp: ContextParallel) -> Any:
    """A GPTModel in eval mode with weights not yet loaded, on this rank's device. parallel_state must be initialised.

    Raises EnvironmentUnfitError if the TE spec is asked for and can not run here.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    te = config.trainer_spec == "te"
    check_spec(config)
    transformer_config = _transformer_config(config, model)
    layer, final_norm = (_te_spec if te else _local_spec)(model)
    if cp.size > 1 and not te:
        core = functools.partial(megatron_cp.ContextParallelAttention, cp=cp, impl=config.impl)
        layer.submodules.self_attention.submodules.core_attention = core
    # A second model in one process would find the choice of the first in these and refuse its own.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    rope = model.rope
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Apex, TE and deprecation notices of the engine are not about this run
        gpt = GPTModel(
            config=transformer_config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * model.num_layers, layer_norm=final_norm),
            vocab_size=model.padded_vocab_size(config.tp, VOCAB_MULTIPLE),
            max_sequence_length=config.max_model_len,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            rotary_percent=1.0,
            rotary_base=rope.theta,
            seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
        )
    if rope.kind == "llama3":
        # Megatron takes the factor only and hard-codes the other three numbers, so the frequencies are set, not derived.
        set_inv_freq(gpt, rope.inv_freq(model.head_dim))
    return gpt.eval()


def set_inv_freq(gpt: Any, inv_freq: torch.Tensor) -> None:
    """Replace the live rotary frequencies. The embedding caches its table per length, hence the clearing."""
    rotary = gpt.rotary_pos_emb
    rotary.inv_freq = inv_freq.to(rotary.inv_freq.device)
    clear_rope_cache(gpt)


def clear_rope_cache(gpt: Any) -> None:
    """Forget the rotary tables; the cache lives on the class and keeps every model it has seen alive."""
    type(gpt.rotary_pos_emb).forward.cache_clear()


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, length, length], True where a query may not look. Without a mask Megatron-core builds one on the GPU."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


def batch_invariant(config: SideConfig) -> bool:
    """Whether Megatron's batch-invariant mode is asked for where it can be had."""
    return asked_flag(config, "batch_invariant") is True and not no_batch_invariance(config)


def no_batch_invariance(config: SideConfig) -> str:
    """Why Megatron's batch-invariant mode cannot be had here, or nothing."""
    if config.trainer_spec != "te":
        return "Megatron's batch-invariant kernels stand in for Transformer Engine's"
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

    if not (FlashAttentionUtils.is_installed or FlashAttentionUtils.v3_is_installed):
        return "Megatron's batch-invariant mode takes Transformer Engine's FlashAttention: no flash-attn is installed that it would take"
    return ""


@contextlib.contextmanager
def official_modes(config: SideConfig) -> Iterator[None]:
    """What Megatron's own trainer turns on beside its config for the deterministic and the batch-invariant mode, while it is open.

    Raises EnvironmentUnfitError if the TE spec is asked for and can not run here.
    """
    check_spec(config)
    before = torch.are_deterministic_algorithms_enabled()
    if asked_flag(config, "deterministic_mode"):
        torch.use_deterministic_algorithms(True)
    try:
        if not batch_invariant(config):
            yield
            return
        from megatron.core.transformer.custom_layers import batch_invariant_kernels

        batch_invariant_kernels.enable_batch_invariant_mode()
        try:
            yield
        finally:
            batch_invariant_kernels.disable_batch_invariant_mode()
    finally:
        torch.use_deterministic_algorithms(before)


def _transformer_config(config: SideConfig, model: ModelConfig) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, config.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_heads,
            num_query_groups=model.num_kv_heads,
            kv_channels=model.head_dim,
            # Megatron's pair counts the tokens beside the current one.
            window_size=None if model.sliding_window is None else (model.sliding_window - 1, 0),
            ffn_hidden_size=model.intermediate_size,
            tensor_model_parallel_size=config.tp,
            context_parallel_size=config.cp,
            cp_comm_type=megatron_cp.comm_type(config) if config.cp > 1 else None,
            sequence_parallel=config.sp,
            normalization="RMSNorm",
            layernorm_epsilon=model.rms_eps,
            qk_layernorm=model.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=model.qkv_bias,
            gated_linear_unit=True,
            activation_func=functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            deterministic_mode=bool(asked_flag(config, "deterministic_mode")),
            **({"batch_invariant_mode": True, "attention_backend": AttnBackend.flash} if batch_invariant(config) else {}),
            use_cpu_initialization=config.device == "cpu",
            perform_initialization=False,
            # Each of these needs Apex or Megatron's own CUDA extensions, and falls back per shape, silently, without them.
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )


def _local_spec(model: ModelConfig) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = TrainerRMSNorm
    layer.submodules.pre_mlp_layernorm = TrainerRMSNorm
    if model.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = TrainerRMSNorm
    return layer, TrainerRMSNorm


def _te_spec(model: ModelConfig) -> tuple[Any, Any]:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm), TENorm
