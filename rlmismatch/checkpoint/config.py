"""The model that a checkpoint holds: its shape, its constants, and the parallel sizes it can be cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rlmismatch.errors import UsageError

if TYPE_CHECKING:
    import torch

ARCHITECTURES: Final[tuple[str, ...]] = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES: Final[tuple[str, ...]] = ("bfloat16", "float16", "float32")

# Rows that vLLM pads its vocabulary to before it cuts it into shards (vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE).
_ROLLOUT_VOCAB_MULTIPLE: Final = 64


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over the whole head. The four scaling fields are None where the kind has no use for them."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None

    def __post_init__(self) -> None:
        llama3 = (self.low_freq_factor, self.high_freq_factor, self.original_max_positions)
        if (self.kind != "default") != (self.factor is not None) or any((self.kind == "llama3") != (x is not None) for x in llama3):
            raise ValueError(f"wrong scaling fields for rope kind {self.kind!r}: {self}")
        numbers = [x for x in (self.theta, self.factor, *llama3) if x is not None]
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            raise ValueError(f"rope numbers must be positive: {self}")
        if self.low_freq_factor is not None and self.low_freq_factor == self.high_freq_factor:
            raise ValueError("rope low_freq_factor and high_freq_factor must differ")

    @property
    def scaling(self) -> str:
        """The scaling as the contract writes it: ``default``, ``linear(factor)`` or ``llama3(factor,low,high,original)``."""
        if self.kind == "default":
            return "default"
        if self.kind == "linear":
            return f"linear({self.factor})"
        return f"llama3({self.factor},{self.low_freq_factor},{self.high_freq_factor},{self.original_max_positions})"

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """Inverse frequencies, float32 [head_dim / 2] on the CPU, bit for bit those of transformers.

        The bits hold because every operation is the one transformers does, in its order and in float32. Formula of the llama3
        kind: Llama 3.1's published rope scaling (wavelengths beyond ``original / low`` are stretched by ``factor``, those under
        ``original / high`` are kept, those between are interpolated).
        """
        import torch

        inv_freq = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if self.factor is None:
            return inv_freq
        if self.kind == "linear":
            return inv_freq / self.factor
        assert self.low_freq_factor is not None
        assert self.high_freq_factor is not None
        assert self.original_max_positions is not None
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_positions
        wavelength = 2 * math.pi / inv_freq
        stretched = torch.where(wavelength > original / low, inv_freq / self.factor, inv_freq)
        smooth = (original / wavelength - low) / (high - low)
        interpolated = (1 - smooth) * stretched / self.factor + smooth * stretched
        between = ~(wavelength < original / high) & ~(wavelength > original / low)
        return torch.where(between, interpolated, stretched)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the constants of a dense decoder. `vocab_size` is the real one: rows of the stored embedding, no padding."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tied: bool  # lm_head is the embedding
    qkv_bias: bool
    qk_norm: bool
    rope: RopeSpec
    dtype: str  # what config.json asks for; if it is silent, what the embedding is stored in
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None  # tokens that a token sees in every layer, itself included

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} kv heads")
        if self.sliding_window is not None and (self.sliding_window < 1 or self.architecture != "MistralForCausalLM"):
            raise ValueError(f"{self.architecture} with a sliding window of {self.sliding_window}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head dim, not {self.head_dim}")
        if self.architecture == "LlamaForCausalLM" and self.hidden_size % self.num_heads:
            raise ValueError(f"LlamaForCausalLM needs a hidden size ({self.hidden_size}) that is a multiple of its {self.num_heads} heads")
        if self.architecture == "Qwen2ForCausalLM" and self.hidden_size != self.num_heads * self.head_dim:
            raise ValueError(
                f"Qwen2ForCausalLM has {self.num_heads} heads of hidden_size / {self.num_heads}; engines ignore head_dim {self.head_dim}"
            )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every logical tensor under its HF name, in order of the forward pass; a tied head is no tensor of its own."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
                shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
                if self.qkv_bias:
                    shapes[f"{layer}.self_attn.{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q_rows)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.mlp.gate_proj.weight"] = (ffn, hidden)
            shapes[f"{layer}.mlp.up_proj.weight"] = (ffn, hidden)
            shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def padded_vocab_size(self, tp: int, multiple: int = 128) -> int:
        """Vocabulary rows that a Megatron trainer allocates: the next multiple of ``multiple * tp``."""
        return math.ceil(self.vocab_size / (multiple * tp)) * multiple * tp

    def check_fits(self, tp: int, *, side: Literal["trainer", "rollout", "oracle"], sp: bool = False) -> None:
        """Refuse, in one UsageError that lists every reason, a tensor parallel size that the model can not be cut into."""
        reasons = self._misfits(tp, side)
        if sp and tp == 1:
            reasons.append("sequence parallelism needs at least 2 ranks")
        if not reasons:
            return
        fitting = [str(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 16) if not self._misfits(n, side)]
        raise UsageError(
            "checkpoint-does-not-fit-tp",
            f"this model does not fit {side} TP{tp}: {reasons[0]}",
            where=side,
            hint=f"{self.num_heads} heads, {self.num_kv_heads} kv heads and ffn of {self.intermediate_size} fit TP {', '.join(fitting)}",
            details=tuple(reasons),
        )

    def _misfits(self, tp: int, side: str) -> list[str]:
        reasons = []
        if self.num_heads % tp:
            reasons.append(f"{self.num_heads} attention heads can not be dealt evenly to {tp} ranks")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            reasons.append(f"{self.num_kv_heads} kv heads are neither a multiple nor a divisor of {tp} ranks")
        if self.intermediate_size % tp:
            reasons.append(f"ffn (intermediate_size) {self.intermediate_size} is not a multiple of {tp} ranks")
        rows = math.ceil(self.vocab_size / _ROLLOUT_VOCAB_MULTIPLE) * _ROLLOUT_VOCAB_MULTIPLE
        if self.vocab_size < tp:
            reasons.append(f"the vocabulary of {self.vocab_size} is smaller than {tp} ranks")
        if side == "rollout" and rows % tp:
            reasons.append(f"the vocabulary of {self.vocab_size}, which the engine pads to {rows} rows, is not a multiple of {tp} ranks")
        return reasons
