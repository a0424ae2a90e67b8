"""The oracle against a float64 forward pass written out here, with nothing of transformers in it.

Chain: oracle == this forward to 1e-9 nats on every architecture and RoPE kind -> the oracle holds no float32 step (one would show at
1e-7) -> its distance to an engine is that engine's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from fixtures.make import write
from fixtures.recipes import FIXTURES, VARIANTS
from rlmismatch.checkpoint import Checkpoint, digest
from rlmismatch.engines.oracle import OracleEngine
from rlmismatch.engines.protocol import Arm, SideConfig
from rlmismatch.errors import EngineError, UsageError
from rlmismatch.tokens import Prompt, Sequence, read_prompts

RECIPES = {**FIXTURES, **VARIANTS}
NAMES = ("tiny-qwen3", "tiny-llama", "variant-qwen2-bias", "variant-rope-llama3", "variant-old-config", "variant-mqa")
PROMPTS = read_prompts(Path(__file__).parents[2] / "fixtures" / "prompts-tiny.jsonl")
SEQUENCES = tuple(Sequence(id=p.id, prompt_ids=p.token_ids[:2], response_ids=p.token_ids[2:]) for p in PROMPTS)
# Longer than one block of the oracle's attention and of its head.
LONG = Sequence(id="long", prompt_ids=(1,), response_ids=tuple(i * 37 % 1000 for i in range(300)))
ORACLE = Arm(id="oracle", paths=("oracle",))
Load = Callable[..., OracleEngine]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name in NAMES:
        out[name] = tmp_path_factory.mktemp(name)
        write(RECIPES[name], out[name])
    return out


@pytest.fixture
def load(checkpoints: dict[str, Path], engine_run_log: Callable[[str, str, int], None]) -> Load:
    def load_one(name: str, **changes: object) -> OracleEngine:
        config = SideConfig(side="oracle", engine="oracle", ckpt=str(checkpoints[name]))
        engine = OracleEngine(dataclasses.replace(config, **changes))  # type: ignore[arg-type]
        engine.load()
        engine_run_log("oracle", "oracle", 0)
        return engine

    return load_one


def forward(checkpoint: Checkpoint, ids: tuple[int, ...]) -> torch.Tensor:
    """float64 logits [T, V], token by token and head by head."""
    c = checkpoint.config
    w = {name: tensor.double() for name, tensor in checkpoint.tensors()}
    inv_freq = c.rope.inv_freq(c.head_dim).double()
    angle = torch.arange(len(ids)).double()[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    half = c.head_dim // 2

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_eps).sqrt() * w[name]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        y = torch.einsum("ti,oi->to", x, w[f"{name}.weight"])
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = (linear(x, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        heads = []
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            qh, kh, vh = (t[:, h * c.head_dim : (h + 1) * c.head_dim] for t, h in ((q, head), (k, kv), (v, kv)))
            if c.qk_norm:
                qh, kh = norm(qh, f"{layer}.self_attn.q_norm.weight"), norm(kh, f"{layer}.self_attn.k_norm.weight")
            qh, kh = rotate(qh), rotate(kh)
            rows = [torch.softmax(kh[: t + 1] @ qh[t] / c.head_dim**0.5, 0) @ vh[: t + 1] for t in range(len(ids))]
            heads.append(torch.stack(rows))
        return linear(torch.cat(heads, -1), f"{layer}.self_attn.o_proj")

    x = w["model.embed_tokens.weight"][list(ids)]
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        x = x + attend(norm(x, f"{layer}.input_layernorm.weight"), layer)
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up = linear(h, f"{layer}.mlp.gate_proj"), linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(gate / (1 + (-gate).exp()) * up, f"{layer}.mlp.down_proj")
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight" if c.tied else "lm_head.weight"].T


def expected(checkpoint: Checkpoint, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    logits = forward(checkpoint, sequence.token_ids) / temperature
    first = len(sequence.prompt_ids)
    targets = torch.tensor(sequence.response_ids)
    return F.log_softmax(logits[first - 1 : -1], -1)[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("name", NAMES)
def test_oracle_equals_a_forward_written_out(name: str, load: Load) -> None:
    engine = load(name)
    sequences = (*SEQUENCES, LONG) if name == "tiny-qwen3" else SEQUENCES
    scores = engine.run(ORACLE, sequences).scores["oracle"]
    checkpoint = Checkpoint.open(engine.config.ckpt)
    for sequence in sequences:
        score = scores[sequence.id]
        assert score.dtype == torch.float64
        assert score.shape == (len(sequence.response_ids),)
        assert (score - expected(checkpoint, sequence)).abs().max() <= 1e-9


def test_temperature_divides_the_logits(load: Load) -> None:
    engine = load("tiny-llama", temperature=0.7)
    scores = engine.run(ORACLE, SEQUENCES[:1]).scores["oracle"]
    wanted = expected(Checkpoint.open(engine.config.ckpt), SEQUENCES[0], temperature=0.7)
    assert (scores[SEQUENCES[0].id] - wanted).abs().max() <= 1e-9


def test_float32_oracle_and_plain_stand_at_their_own_distance(load: Load) -> None:
    engine = load("tiny-qwen3", oracle_dtype="float32")
    result = engine.run(Arm(id="both", paths=("oracle", "plain")), SEQUENCES)
    checkpoint = Checkpoint.open(engine.config.ckpt)
    error = {path: max(float((s[q.id] - expected(checkpoint, q)).abs().max()) for q in SEQUENCES) for path, s in result.scores.items()}
    assert 1e-8 < error["oracle"] < 1e-4
    assert 1e-3 < error["plain"] < 1.0
    assert engine.provenance()["oracle_dtype"] == "float32"


def test_plain_is_the_untouched_model(load: Load) -> None:
    from transformers import AutoModelForCausalLM

    engine = load("tiny-qwen3")
    plain = engine.run(Arm(id="plain", paths=("plain",)), SEQUENCES[:1]).scores["plain"][SEQUENCES[0].id]
    model = AutoModelForCausalLM.from_pretrained(engine.config.ckpt, dtype=torch.bfloat16, attn_implementation="eager")
    first = len(SEQUENCES[0].prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([SEQUENCES[0].token_ids])).logits[0, first - 1 : -1]
    targets = torch.tensor(SEQUENCES[0].response_ids)
    assert torch.equal(plain, logits.double().log_softmax(-1)[torch.arange(len(targets)), targets])


def test_weights_are_those_of_the_run_dtype(load: Load) -> None:
    """A float16 run holds other weights than the bfloat16 checkpoint only where a value does not fit; the digests say which."""
    engine = load("tiny-llama")
    digests = dict(engine.weight_digests())
    config = Checkpoint.open(engine.config.ckpt).config
    assert digests.pop("tied") == "true"
    assert digests.pop("buffers.inv_freq") == digest(config.rope.inv_freq(config.head_dim))
    assert digests == Checkpoint.open(engine.config.ckpt).digests()
    half = dict(load("tiny-llama", dtype="float16").weight_digests())
    assert {name: half[name] for name in digests} == Checkpoint.open(engine.config.ckpt).digests(dtype="float16")


def test_scores_do_not_depend_on_the_company(load: Load) -> None:
    engine = load("tiny-llama")
    together = engine.run(ORACLE, SEQUENCES).scores["oracle"]
    alone = engine.run(ORACLE, SEQUENCES[2:3]).scores["oracle"]
    assert torch.equal(together[SEQUENCES[2].id], alone[SEQUENCES[2].id])


@pytest.mark.parametrize("cast", ["norm", "rotary", "attention"])
def test_a_float32_step_inside_the_oracle_is_an_error(cast: str, load: Load) -> None:
    engine = load("tiny-qwen3")
    if cast == "norm":
        del engine._exact.model.norm.forward
    elif cast == "rotary":
        del engine._exact.model.rotary_emb.forward
    else:
        engine._exact.set_attn_implementation("eager")
    with pytest.raises(EngineError, match=r"computed in torch\.float32 inside the torch\.float64 oracle") as caught:
        engine.run(ORACLE, SEQUENCES[:1])
    assert caught.value.slug == "oracle-not-exact"


def test_no_response_gives_no_score(load: Load) -> None:
    scores = load("tiny-llama").run(ORACLE, [Sequence(id="a", prompt_ids=(1, 2), response_ids=())]).scores
    assert scores["oracle"]["a"].shape == (0,)


@pytest.mark.parametrize(
    "arm",
    [
        Arm(id="x", paths=("forward",)),
        Arm(id="x", paths=("oracle",), pins=frozenset({"norm"})),
        Arm(id="x", paths=("oracle",), probe="local"),
        Arm(id="x", paths=("oracle",), settings={"logprob.reduce": "native"}),
    ],
    ids=["path", "pin", "probe", "setting"],
)
def test_an_arm_that_the_oracle_can_not_run(arm: Arm, load: Load) -> None:
    with pytest.raises(UsageError) as caught:
        load("tiny-llama").run(arm, SEQUENCES)
    assert caught.value.slug == "oracle-cannot-run-arm"


def test_what_the_oracle_does_not_do(checkpoints: dict[str, Path], load: Load) -> None:
    config = SideConfig(side="oracle", engine="oracle", ckpt=str(checkpoints["tiny-llama"]))
    for changes, slug in (({"tp": 2}, "oracle-is-one-rank"), ({"plants": ("eps",)}, "oracle-takes-no-plants")):
        with pytest.raises(UsageError) as caught:
            OracleEngine(dataclasses.replace(config, **changes))
        assert caught.value.slug == slug
    engine = load("tiny-llama")
    assert engine.readings() == {}
    with pytest.raises(UsageError, match="only the rollout engine samples"):
        engine.generate([Prompt(id="a", token_ids=(1,))], max_new_tokens=1, seed=0)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        engine.run(ORACLE, [Sequence(id="a", prompt_ids=(1,), response_ids=(1003,))])
