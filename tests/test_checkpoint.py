"""Checkpoints: what is read, and every reason for which one is refused.

More than 400 lines, because each refusal has a test and all take the same small checkpoint to pieces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.make import write
from fixtures.recipes import FIXTURES, LIKE, VARIANTS, Recipe
from rlmismatch.checkpoint import Checkpoint, ModelConfig, RopeSpec, combine_digests, digest
from rlmismatch.errors import UsageError

RECIPES = {**FIXTURES, **VARIANTS}
DEFAULT, LINEAR = RopeSpec(theta=1e4), RopeSpec(kind="linear", theta=1e6, factor=4.0)
LLAMA3 = RopeSpec(kind="llama3", theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def build(root: Path, recipe: Recipe | str = "tiny-qwen3") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    write(RECIPES[recipe] if isinstance(recipe, str) else recipe, root)
    return root


def edit_config(root: Path, **changes: Any) -> None:
    """Set fields of config.json; the value ... removes the field."""
    path = root / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def edit_weights(root: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(root / "model.safetensors")
    edit(tensors)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})


def refused(root: Path | str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        Checkpoint.open(root)
    assert caught.value.where, "an error about a checkpoint says where"
    return caught.value


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_open_reads_every_recipe_as_it_was_meant(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    checkpoint = Checkpoint.open(build(tmp_path, recipe))
    assert checkpoint.config == recipe.config
    shapes = recipe.config.tensor_shapes()
    tensors = dict(checkpoint.tensors())
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shapes
    assert list(tensors) == list(shapes)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert not checkpoint.has_tokenizer


def test_sharded_equals_single_file(tmp_path: Path) -> None:
    sharded = build(tmp_path / "sharded", "variant-sharded")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert Checkpoint.open(sharded).digests() == Checkpoint.open(build(tmp_path / "single")).digests()


def test_old_and_new_config_forms_mean_the_same(tmp_path: Path) -> None:
    root = build(tmp_path, "variant-old-config")
    old = Checkpoint.open(root).config
    edit_config(
        root,
        rope_scaling=...,
        rope_theta=...,
        torch_dtype=...,
        dtype="bfloat16",
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
    )
    assert Checkpoint.open(root).config == old
    edit_config(root, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=20000)
    assert Checkpoint.open(root).config == old


def test_a_llama_may_leave_out_what_it_always_left_out(tmp_path: Path) -> None:
    recipe = FIXTURES["tiny-llama"]
    config = dataclasses.replace(recipe.config, hidden_size=128, num_kv_heads=4)
    root = build(tmp_path, dataclasses.replace(recipe, config=config))
    edit_config(root, head_dim=..., num_key_value_heads=None, rope_parameters=..., dtype=..., hidden_act=...)
    assert Checkpoint.open(root).config == config


@pytest.mark.parametrize("rope", [DEFAULT, LINEAR, LLAMA3], ids=lambda rope: rope.kind)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_inv_freq_has_the_bits_of_transformers(rope: RopeSpec, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters={key: value for key, value in parameters.items() if value is not None},
        )
    )
    ours = rope.inv_freq(head_dim)
    assert ours.dtype == torch.float32
    assert ours.shape == (head_dim // 2,)
    assert torch.equal(ours, theirs.inv_freq)
    assert theirs.attention_scaling == 1.0


def test_rope_scaling_is_written_as_the_contract_writes_it() -> None:
    assert [rope.scaling for rope in (DEFAULT, LINEAR, LLAMA3)] == ["default", "linear(4.0)", "llama3(32.0,1.0,4.0,8192)"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "linear"},
        {"kind": "default", "factor": 2.0},
        {"kind": "llama3", "factor": 2.0},
        {"theta": float("nan")},
        {"theta": 0.0},
        {"kind": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_positions": 8},
    ],
)
def test_rope_refuses_nonsense(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope"):
        RopeSpec(**{"theta": 1e4, **fields})


# --- refused: the path ---


@pytest.mark.parametrize(("path", "hint"), [("Qwen/Qwen3-0.6B", "nothing is downloaded"), ("/no/such/place", "")])
def test_a_path_that_does_not_exist(path: str, hint: str) -> None:
    error = refused(path)
    assert error.slug == "checkpoint-not-found"
    assert path in error.what
    assert (hint in error.hint) if hint else (error.hint == "")


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file").slug == "checkpoint-not-a-directory"
    assert refused(tmp_path).slug == "checkpoint-no-config"


def test_weights_in_another_format(tmp_path: Path) -> None:
    root = build(tmp_path)
    (root / "model.safetensors").rename(root / "pytorch_model.bin")
    error = refused(root)
    assert error.slug == "checkpoint-no-weights"
    assert "pytorch_model.bin" in error.what
    assert "safe_serialization" in error.hint


# --- refused: config.json ---

REFUSED_CONFIGS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # case: (recipe, changes, slug, words of the message)
    "architecture": ("tiny-llama", {"architectures": ["GemmaForCausalLM"]}, "checkpoint-architecture-unsupported", "GemmaForCausalLM"),
    "two architectures": ("tiny-llama", {"architectures": ["A", "B"]}, "checkpoint-architecture-unsupported", "'A', 'B'"),
    "no architecture": ("tiny-llama", {"architectures": ...}, "checkpoint-config-incomplete", "architectures"),
    "moe by name": ("tiny-qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}, "checkpoint-moe-unsupported", "mixture of experts"),
    "moe by field": ("tiny-qwen3", {"num_experts": 8}, "checkpoint-moe-unsupported", "mixture of experts"),
    "quantised": ("tiny-qwen3", {"quantization_config": {"quant_method": "awq"}}, "checkpoint-quantised", "awq"),
    "yarn": (
        "tiny-qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        "checkpoint-rope-unsupported",
        "'yarn'",
    ),
    "dynamic": (
        "tiny-llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...},
        "checkpoint-rope-unsupported",
        "'dynamic'",
    ),
    "longrope": (
        "tiny-llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "checkpoint-rope-unsupported",
        "'longrope'",
    ),
    "partial rotary": ("tiny-llama", {"partial_rotary_factor": 0.5}, "checkpoint-rope-unsupported", "partial rotary"),
    "mrope": (
        "tiny-llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}},
        "checkpoint-rope-unsupported",
        "mrope_section",
    ),
    "rope per layer type": (
        "tiny-llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "checkpoint-rope-unsupported",
        "per layer type",
    ),
    "rope said twice": ("tiny-qwen3", {"rope_theta": 10000.0}, "checkpoint-config-malformed", "rope_theta is 1000000.0 and also 10000.0"),
    "rope not an object": ("tiny-qwen3", {"rope_parameters": [1]}, "checkpoint-config-malformed", "rope parameters"),
    "sliding window": ("tiny-qwen3", {"use_sliding_window": True, "sliding_window": 64}, "checkpoint-sliding-window", "sliding-window"),
    "sliding layers": ("tiny-qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "checkpoint-sliding-window", "layer_types"),
    "a window of 0": ("tiny-mistral", {"sliding_window": 0}, "checkpoint-config-malformed", "sliding_window must be a positive integer"),
    "mistral that mixes layers": (
        "tiny-mistral",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "checkpoint-sliding-window",
        "s",
    ),
    "llama with a window": ("tiny-llama", {"sliding_window": 64}, "checkpoint-sliding-window", "sliding-window"),
    "activation": ("tiny-llama", {"hidden_act": "gelu"}, "checkpoint-feature-unsupported", "'gelu'"),
    "attention bias": ("tiny-llama", {"attention_bias": True}, "checkpoint-feature-unsupported", "o_proj"),
    "mlp bias": ("tiny-llama", {"mlp_bias": True}, "checkpoint-feature-unsupported", "mlp_bias"),
    "fields missing": ("tiny-qwen3", {"head_dim": ..., "rms_norm_eps": ...}, "checkpoint-config-incomplete", "rms_norm_eps, head_dim"),
    "qwen without theta": ("tiny-qwen3", {"rope_parameters": ...}, "checkpoint-config-incomplete", "rope_theta"),
    "llama3 without factor": (
        "variant-rope-llama3",
        {"rope_parameters": {"rope_type": "llama3"}},
        "checkpoint-config-incomplete",
        "high_freq_factor",
    ),
    "dtype": ("tiny-llama", {"dtype": "float8_e4m3fn"}, "checkpoint-dtype-unsupported", "float8_e4m3fn"),
    "a size that is text": ("tiny-llama", {"hidden_size": "64"}, "checkpoint-config-malformed", "hidden_size"),
    "a size that is true": ("tiny-llama", {"num_hidden_layers": True}, "checkpoint-config-malformed", "num_hidden_layers"),
    "eps zero": ("tiny-llama", {"rms_norm_eps": 0.0}, "checkpoint-config-malformed", "rms_norm_eps"),
    "tied is text": ("tiny-llama", {"tie_word_embeddings": "yes"}, "checkpoint-config-malformed", "tie_word_embeddings"),
    "eos is text": ("tiny-llama", {"eos_token_id": "</s>"}, "checkpoint-config-malformed", "eos_token_id"),
    "heads": ("tiny-llama", {"num_key_value_heads": 3}, "checkpoint-config-malformed", "4 heads are not a multiple of 3 kv heads"),
    "odd head dim": ("tiny-llama", {"head_dim": 31}, "checkpoint-config-malformed", "even head dim"),
    "no head dim to derive": ("tiny-llama", {"head_dim": ..., "hidden_size": 66}, "checkpoint-config-malformed", "no head_dim"),
    "llama heads and hidden size": ("tiny-llama", {"hidden_size": 66}, "checkpoint-config-malformed", "multiple of its 4 heads"),
    "qwen2 with its own head dim": ("variant-qwen2-bias", {"head_dim": 64}, "checkpoint-config-malformed", "ignore head_dim 64"),
}


@pytest.mark.parametrize("case", sorted(REFUSED_CONFIGS))
def test_a_config_that_is_refused(case: str, tmp_path: Path) -> None:
    recipe, changes, slug, words = REFUSED_CONFIGS[case]
    root = build(tmp_path, recipe)
    edit_config(root, **changes)
    error = refused(root)
    assert error.slug == slug
    assert words in error.what
    assert error.where == str(root / "config.json")
    if slug == "checkpoint-architecture-unsupported":
        assert error.hint == "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"


def test_config_that_is_not_json(tmp_path: Path) -> None:
    for text in ("{", "[1]", "\xff"):
        root = build(tmp_path)
        (root / "config.json").write_text(text, encoding="latin-1")
        assert refused(root).slug == "checkpoint-config-malformed"


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}, {"layer_types": ["full_attention"] * 2}]
)
def test_a_window_that_is_off_is_no_reason_to_refuse(changes: dict[str, Any], tmp_path: Path) -> None:
    root = build(tmp_path)
    edit_config(root, **changes)
    assert Checkpoint.open(root).config == FIXTURES["tiny-qwen3"].config


# --- refused: the weights ---


def test_missing_surplus_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    root = build(tmp_path)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.q_norm.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 128)

    edit_weights(root, edit)
    error = refused(root)
    assert error.slug == "checkpoint-tensors-do-not-match"
    assert "2 tensors missing, 1 surplus, 1 misshapen" in error.what
    assert error.details == (
        "missing: model.layers.0.self_attn.q_norm.weight [32]",
        "missing: model.norm.weight [64]",
        "surplus: model.layers.0.self_attn.q_proj.bias [256]",
        "misshapen: model.layers.1.mlp.up_proj.weight is [64, 128], config.json implies [128, 64]",
    )


def test_an_untied_config_of_tied_weights_is_told_so(tmp_path: Path) -> None:
    root = build(tmp_path, "tiny-llama")
    edit_config(root, tie_word_embeddings=False)
    error = refused(root)
    assert error.details == ("missing: lm_head.weight [1003, 64]",)
    assert "tie_word_embeddings" in error.hint


def test_rotary_buffers_of_old_checkpoints_are_tolerated(tmp_path: Path) -> None:
    root = build(tmp_path)
    before = Checkpoint.open(root).digests()
    edit_weights(root, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    assert Checkpoint.open(root).digests() == before


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    root = build(tmp_path, "tiny-llama")
    before = Checkpoint.open(root).digests()
    edit_weights(root, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert Checkpoint.open(root).digests() == before
    edit_weights(root, lambda tensors: tensors["lm_head.weight"][7, 7].add_(1.0))
    with pytest.raises(UsageError, match=r"another lm_head\.weight") as caught:
        Checkpoint.open(root).digests()
    assert caught.value.slug == "checkpoint-tied-head-differs"
    edit_weights(root, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}))
    assert refused(root).slug == "checkpoint-tied-head-differs"


@pytest.mark.parametrize("damage", ["truncated", "empty", "header", "garbage"])
def test_a_corrupt_file(damage: str, tmp_path: Path) -> None:
    path = build(tmp_path) / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[:-100], "empty": b"", "header": raw[:200], "garbage": raw[:8] + b"#" * 64 + raw[72:]}[damage])
    error = refused(path.parent)
    assert error.slug == "checkpoint-corrupt"
    assert error.where == str(path)
    assert "truncated or corrupt" in error.what


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(build(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="truncated or corrupt") as caught:
        checkpoint.tensor("model.norm.weight")
    assert caught.value.slug == "checkpoint-corrupt"


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    root = build(tmp_path, "variant-sharded")
    gone = sorted(root.glob("*.safetensors"))[1]
    gone.unlink()
    error = refused(root)
    assert error.slug == "checkpoint-shard-missing"
    assert gone.name in error.what


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    root = build(tmp_path, "variant-sharded")
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = dict(index["weight_map"])
    files = list(moved.values())
    first, last = files[0], files[2]
    name = next(key for key, file in moved.items() if file == last)
    moved[name] = first
    moved["model.layers.9.mlp.up_proj.weight"] = first
    path.write_text(json.dumps({"weight_map": moved}))
    error = refused(root)
    assert error.slug == "checkpoint-index-malformed"
    assert error.details == (
        f"{name} stands in {last}; the index says {first}",
        f"{name} is said to stand in {first}, but does not",
        f"model.layers.9.mlp.up_proj.weight is said to stand in {first}, but does not",
    )
    path.write_text("{}")
    assert refused(root).slug == "checkpoint-index-malformed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_supported(dtype: torch.dtype, tmp_path: Path) -> None:
    root = build(tmp_path)
    edit_weights(root, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)}))
    error = refused(root)
    assert error.slug == "checkpoint-dtype-unsupported"
    assert "model.norm.weight" in error.what


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    root = build(tmp_path)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = torch.nan
        tensors["lm_head.weight"][0, :2] = torch.inf

    edit_weights(root, edit)
    with pytest.raises(UsageError) as caught:
        Checkpoint.open(root).digests()
    assert caught.value.slug == "weights-not-finite"
    assert caught.value.details == ("model.norm.weight: 1 NaN, 0 Inf of 64", "lm_head.weight: 0 NaN, 2 Inf of 70400")


# --- digests ---


def test_digests_report_progress_and_round_first(tmp_path: Path) -> None:
    root = build(tmp_path)
    checkpoint = Checkpoint.open(root)
    seen: list[tuple[int, int]] = []
    stored = checkpoint.digests(progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(stored)) for i in range(len(stored))]
    edit_weights(root, lambda tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}))
    wider = Checkpoint.open(root)
    assert wider.digests(dtype="bfloat16") == stored
    assert set(wider.digests().values()).isdisjoint(stored.values())


def test_a_value_that_overflows_the_run_dtype_is_not_finite(tmp_path: Path) -> None:
    root = build(tmp_path)
    edit_weights(root, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    Checkpoint.open(root).digests()
    with pytest.raises(UsageError, match=r"model\.norm\.weight: 0 NaN, 64 Inf"):
        Checkpoint.open(root).digests(dtype="float16")


def test_digest_sees_value_shape_and_dtype_but_not_strides() -> None:
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert digest(x) == digest(x.t().contiguous().t())
    assert digest(x) == digest(torch.nn.Parameter(x))
    others = [x.t(), x.reshape(3, 2), x.flatten(), x.float(), x.half(), x + 1, torch.tensor(1.0), torch.empty(0)]
    digests = [digest(x), *map(digest, others)]
    assert len(set(digests)) == len(digests)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([1.0], dtype=torch.bfloat16)) == hashlib.sha256(b'["bfloat16", [1]]\x80\x3f').hexdigest()


def test_combined_digest_ignores_the_order_only() -> None:
    assert combine_digests({"a": "1", "b": "2"}) == combine_digests({"b": "2", "a": "1"})
    assert combine_digests({"a": "1", "b": "2"}) != combine_digests({"a": "2", "b": "1"})


def test_a_tokenizer_is_seen(tmp_path: Path) -> None:
    root = build(tmp_path)
    (root / "vocab.json").write_text("{}")
    assert not Checkpoint.open(root).has_tokenizer
    (root / "merges.txt").write_text("")
    assert Checkpoint.open(root).has_tokenizer


# --- tensor parallelism ---


def test_a_model_that_does_not_fit_says_everything_at_once() -> None:
    config = dataclasses.replace(
        FIXTURES["tiny-llama"].config, hidden_size=576, intermediate_size=1535, num_heads=9, num_kv_heads=3, head_dim=64
    )
    with pytest.raises(UsageError) as caught:
        config.check_fits(2, side="trainer")
    error = caught.value
    assert error.slug == "checkpoint-does-not-fit-tp"
    assert error.where == "trainer"
    assert error.what == "this model does not fit trainer TP2: 9 attention heads can not be dealt evenly to 2 ranks"
    assert error.details == (
        "9 attention heads can not be dealt evenly to 2 ranks",
        "3 kv heads are neither a multiple nor a divisor of 2 ranks",
        "ffn (intermediate_size) 1535 is not a multiple of 2 ranks",
    )
    assert error.hint == "9 heads, 3 kv heads and ffn of 1535 fit TP 1"


def test_a_vocabulary_smaller_than_the_ranks_is_refused() -> None:
    config = dataclasses.replace(FIXTURES["tiny-qwen3-kv4"].config, vocab_size=3)
    with pytest.raises(UsageError) as caught:
        config.check_fits(4, side="trainer")
    assert caught.value.what == "this model does not fit trainer TP4: the vocabulary of 3 is smaller than 4 ranks"


def test_the_vocabulary_is_a_reason_on_the_rollout_side_only() -> None:
    config = dataclasses.replace(FIXTURES["tiny-llama"].config, num_heads=6, num_kv_heads=3, hidden_size=66, intermediate_size=96)
    config.check_fits(3, side="trainer")
    with pytest.raises(UsageError, match=r"vocabulary of 1003, which the engine pads to 1024 rows"):
        config.check_fits(3, side="rollout")


def test_sequence_parallelism_needs_ranks() -> None:
    config = FIXTURES["tiny-qwen3"].config
    config.check_fits(2, side="trainer", sp=True)
    with pytest.raises(UsageError, match="at least 2 ranks"):
        config.check_fits(1, side="trainer", sp=True)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_fixtures_fit(name: str, tp: int) -> None:
    FIXTURES[name].config.check_fits(tp, side="trainer")
    FIXTURES[name].config.check_fits(tp, side="rollout")


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(1100, 1, 1152), (1100, 2, 1280), (151936, 1, 151936), (151936, 2, 152064), (151936, 8, 152576)]
)
def test_padded_vocabulary(vocab: int, tp: int, padded: int) -> None:
    assert dataclasses.replace(FIXTURES["tiny-qwen3"].config, vocab_size=vocab).padded_vocab_size(tp) == padded


def test_tensor_shapes_of_a_real_model() -> None:
    config: ModelConfig = LIKE["qwen3-0.6b"].config
    shapes = config.tensor_shapes()
    assert len(shapes) == 28 * 11 + 2
    assert shapes["model.layers.27.self_attn.k_proj.weight"] == (1024, 1024)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (1024, 2048)
    assert "lm_head.weight" not in shapes


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    build(tmp_path)
    code = "import sys; from rlmismatch.checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
