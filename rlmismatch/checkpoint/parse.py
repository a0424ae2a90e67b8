"""config.json -> `ModelConfig`, or one error that says why the model can not be used.

Both forms are read: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` that transformers 5 writes. A field that only
one of the engines would obey (a sliding window, a bias on o_proj) is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from rlmismatch.checkpoint.config import ARCHITECTURES, DTYPES, ModelConfig, RopeSpec
from rlmismatch.errors import UsageError

# Keys of the rope parameters that each kind may carry beside rope_type and rope_theta; all of them are required.
_ROPE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_MOE_KEYS: Final[tuple[str, ...]] = ("num_experts", "num_local_experts", "n_routed_experts")


def parse_config(data: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The model behind a config.json; `dtype` is empty if the file names none. Raises UsageError."""
    architecture = _architecture(data, where)
    _refuse_features(data, where, architecture)
    qwen = architecture != "LlamaForCausalLM"
    # Left out, these mean different things to different readers of the two Qwen families, so they must be there.
    required = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ]
    required += ["num_key_value_heads"] if qwen else []
    required += ["head_dim"] if architecture == "Qwen3ForCausalLM" else []
    missing = [name for name in required if data.get(name) is None]
    rope = _rope_parameters(data, where)
    if rope.get("rope_theta") is None and qwen:
        missing.append("rope_theta (or rope_parameters.rope_theta)")
    missing += [f"rope {name} (of rope type {rope['rope_type']!r})" for name in _ROPE_KEYS[rope["rope_type"]] if rope.get(name) is None]
    if missing:
        raise UsageError(
            "checkpoint-config-incomplete",
            f"config.json lacks {', '.join(missing)}",
            where=where,
            hint="complete it from the model's original config.json",
        )
    heads = _integer(data, "num_attention_heads", where)
    hidden = _integer(data, "hidden_size", where)
    if data.get("head_dim") is None and hidden % heads:
        raise _malformed(f"hidden_size {hidden} is not a multiple of {heads} attention heads, and there is no head_dim", where)
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "").removeprefix("torch.")
    if dtype and dtype not in DTYPES:
        raise UsageError(
            "checkpoint-dtype-unsupported", f"config.json asks for dtype {dtype!r}", where=where, hint=f"supported: {', '.join(DTYPES)}"
        )
    try:
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=_integer(data, "intermediate_size", where),
            num_layers=_integer(data, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=_integer(data, "num_key_value_heads", where) if data.get("num_key_value_heads") is not None else heads,
            head_dim=_integer(data, "head_dim", where) if data.get("head_dim") is not None else hidden // heads,
            vocab_size=_integer(data, "vocab_size", where),
            max_positions=_integer(data, "max_position_embeddings", where),
            rms_eps=_number(data, "rms_norm_eps", where),
            tied=_flag(data, "tie_word_embeddings", where),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope=_rope_spec(rope, where),
            dtype=dtype,
            bos_token_id=next(iter(_token_ids(data, "bos_token_id", where)), None),
            eos_token_ids=_token_ids(data, "eos_token_id", where),
            sliding_window=(
                _integer(data, "sliding_window", where)
                if architecture == "MistralForCausalLM" and data.get("sliding_window") is not None
                else None
            ),
        )
    except ValueError as error:
        raise _malformed(str(error), where) from None


def _architecture(data: Mapping[str, Any], where: str) -> str:
    names = data.get("architectures")
    if not names:
        raise UsageError(
            "checkpoint-config-incomplete", "config.json lacks architectures", where=where, hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else str(names)
    if "moe" in name.lower() or name.startswith("Mixtral") or any(data.get(key) not in (None, 0, 1) for key in _MOE_KEYS):
        raise UsageError(
            "checkpoint-moe-unsupported",
            f"{name} is a mixture of experts",
            where=where,
            hint=f"dense models only: {', '.join(ARCHITECTURES)}",
        )
    if name not in ARCHITECTURES:
        raise UsageError(
            "checkpoint-architecture-unsupported", f"{name} is not supported", where=where, hint=f"supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_features(data: Mapping[str, Any], where: str, architecture: str) -> None:
    quantised = data.get("quantization_config") or data.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else str(quantised)
        raise UsageError(
            "checkpoint-quantised",
            f"the weights are quantised ({method})",
            where=where,
            hint="use the bfloat16, float16 or float32 checkpoint",
        )
    layer_types = set(data.get("layer_types") or ())
    windowed = data.get("use_sliding_window") or (architecture == "LlamaForCausalLM" and data.get("sliding_window"))
    if windowed or layer_types - {"full_attention"}:
        raise UsageError(
            "checkpoint-sliding-window",
            "the model uses sliding-window attention (use_sliding_window, sliding_window or layer_types in config.json)",
            where=where,
            hint="a window is built for MistralForCausalLM alone, where every layer has the same",
        )
    features = []
    if data.get("hidden_act", "silu") != "silu":
        features.append(f"hidden_act {data['hidden_act']!r}: only silu (SwiGLU) is built")
    if data.get("attention_bias") and architecture != "Qwen2ForCausalLM":
        features.append("attention_bias: it puts a bias on o_proj too, which the engines do not load alike")
    if data.get("mlp_bias"):
        features.append("mlp_bias: a bias in the MLP is not built")
    if features:
        raise UsageError("checkpoint-feature-unsupported", f"config.json sets {features[0]}", where=where, details=tuple(features))


def _rope_parameters(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One dict out of both forms, with ``rope_type`` and, if there is one, ``rope_theta``; what the forms say twice must agree."""
    merged: dict[str, Any] = {}
    top_level = {key: data[key] for key in ("rope_theta", "partial_rotary_factor") if data.get(key) is not None}
    for source in (data.get("rope_parameters") or {}, data.get("rope_scaling") or {}, top_level):
        if not isinstance(source, dict):
            raise _malformed(f"rope parameters must be an object, not {source!r}", where)
        if any(isinstance(value, dict) for value in source.values()):
            raise _rope_unsupported("rope parameters per layer type", where)
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            if merged.setdefault(name, value) != value:
                raise _malformed(f"config.json says {name} is {merged[name]!r} and also {value!r}", where)
    kind = merged.setdefault("rope_type", "default")
    if kind not in _ROPE_KEYS:
        raise _rope_unsupported(f"rope type {kind!r}", where)
    if merged.pop("partial_rotary_factor", 1.0) != 1.0:
        raise _rope_unsupported("partial rotary embedding (partial_rotary_factor other than 1)", where)
    strange = sorted(set(merged) - {"rope_type", "rope_theta", *_ROPE_KEYS[kind]})
    if strange:
        raise _rope_unsupported(f"rope type {kind!r} with {', '.join(strange)}", where)
    return merged


def _rope_spec(rope: Mapping[str, Any], where: str) -> RopeSpec:
    present = {key: rope[key] for key in _ROPE_KEYS[rope["rope_type"]]}
    original = present.pop("original_max_position_embeddings", None)
    return RopeSpec(
        kind=rope["rope_type"],
        theta=_number({"rope_theta": 10000.0, **rope}, "rope_theta", where),  # Llama before rope_theta was a field
        original_max_positions=None if original is None else _integer(rope, "original_max_position_embeddings", where),
        **{key: _number(present, key, where) for key in present},
    )


def _malformed(what: str, where: str) -> UsageError:
    return UsageError("checkpoint-config-malformed", what, where=where)


def _rope_unsupported(what: str, where: str) -> UsageError:
    return UsageError(
        "checkpoint-rope-unsupported", f"{what} is not supported", where=where, hint=f"supported rope types: {', '.join(_ROPE_KEYS)}"
    )


def _integer(data: Mapping[str, Any], name: str, where: str) -> int:
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _malformed(f"{name} must be a positive integer, not {value!r}", where)
    return value


def _number(data: Mapping[str, Any], name: str, where: str) -> float:
    value = data[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _malformed(f"{name} must be a positive number, not {value!r}", where)
    return float(value)


def _flag(data: Mapping[str, Any], name: str, where: str) -> bool:
    value = data.get(name, False)  # absent means untied in all architectures
    if not isinstance(value, bool):
        raise _malformed(f"{name} must be true or false, not {value!r}", where)
    return value


def _token_ids(data: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    value = data.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise _malformed(f"{name} must be a token id or a list of them, not {value!r}", where)
    return tuple(ids)
