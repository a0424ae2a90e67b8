"""Parts of the rollout adapter that need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlmismatch.checkpoint import ModelConfig
from rlmismatch.engines import vllm_weights
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.engines.vllm_memory import kv_cache_bytes
from rlmismatch.engines.vllm_probe import HeadRows, prompt_rows
from rlmismatch.engines.vllm_scoring import tokenised
from rlmismatch.errors import UsageError
from rlmismatch.pins.collectives import TpGroup
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.tokens import Prompt, Sequence
from tests.logprob.gloo import on_ranks


def _tokenizer(text: str) -> Any:
    return SimpleNamespace(input_ids=[1, *map(ord, text)] if text != "nothing" else [])


def test_text_is_tokenised_once_and_ids_pass_through() -> None:
    given = (Prompt(id="a", token_ids=(5, 6)), Prompt(id="b", text="hi"))
    first, second = tokenised(given, _tokenizer)
    assert first == given[0]
    assert (second.token_ids, second.text) == ((1, 104, 105), "hi")


@pytest.mark.parametrize(("text", "tokenizer", "slug"), [("hi", None, "prompt-needs-tokenizer"), ("nothing", _tokenizer, "prompt-empty")])
def test_text_that_gives_no_ids_is_refused(text: str, tokenizer: Any, slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        tokenised((Prompt(id="a", text=text),), tokenizer)
    assert caught.value.slug == slug


def _live(tp: TpGroup, model: Any = None) -> LiveModel:
    fields: dict[str, Any] = {"sampler": None, "all_reduce": None, "eps": 1e-6, "inv_freq": torch.ones(1), "chain": None}
    return LiveModel(model=model, tp=tp, num_kv_heads=2, vocab_size=8, **fields)


def _keys(tp: TpGroup, stale: bool) -> torch.Tensor:
    """k_proj of two heads over four ranks, which are copied once; on one rank the copy is another."""
    live = _live(tp)
    head = 20.0 + tp.rank // live.kv_copies
    weight = torch.cat([torch.full((2, 3), 10.0 + tp.rank), torch.full((1, 3), head), torch.full((1, 3), head)])
    if stale and tp.rank == 1:
        weight[2] = 99.0
    return dict(vllm_weights._qkv(live, SimpleNamespace(qkv_proj=SimpleNamespace(weight=weight, bias=None), q_size=2, kv_size=1), "a"))[
        "a.k_proj.weight"
    ]


def test_a_copy_of_a_kv_head_that_differs_is_no_checkpoints() -> None:
    sound, stale = (on_ranks(4, _keys, stale) for stale in (False, True))
    assert [x.tolist() for x in sound] == [[[20.0] * 3, [21.0] * 3]] * 4
    assert stale[0].shape == (4, 1, 3)


def _names(tp: TpGroup) -> list[str]:
    """Of a tied model whose head computes with other numbers on one rank, as a stale copy of packed weights would."""
    weight = torch.ones(4, 3)
    packed = weight * (2 if tp.rank == 1 else 1)
    head = SimpleNamespace(
        weight=weight, cpu_linear=lambda unit, w, b: unit @ packed.t(), input_size_per_partition=3, params_dtype=torch.float32
    )
    inner = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight), layers=[], norm=SimpleNamespace(weight=torch.ones(3)))
    live = _live(tp, SimpleNamespace(lm_head=head, model=inner))
    return list(dict(vllm_weights.tensors(live, cast(ModelConfig, SimpleNamespace(tied=True, vocab_size=8)))))


def test_a_head_that_is_tied_on_some_ranks_alone_is_tied_on_none() -> None:
    """Or those ranks would leave out an exchange that the others wait in."""
    assert on_ranks(2, _names) == [["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]] * 2


QWEN3_8B = SimpleNamespace(num_layers=36, num_kv_heads=8, head_dim=128)  # 147456 bytes a token in bf16


@pytest.mark.parametrize(
    ("device", "tp", "length", "bytes_"),
    [
        ("cpu", 1, 10, 128 * 10 * 147456),
        ("cpu", 1, 100, 2**30),
        ("cpu", 1, 40960, 2 * 40960 * 147456),  # two sequences at least
        ("cuda", 1, 100, 128 * 100 * 147456),  # what a step can fill
        ("cuda", 2, 100, 128 * 100 * 147456 // 2),
        ("cuda", 16, 100, 128 * 100 * 147456 // 8),  # a KV head is not divided
        ("cuda", 1, 4096, 56 * 10**9 - 16 * 10**9 - 2**30),  # what the fraction leaves beside the weights
        ("cuda", 1, 262144, 2 * 262144 * 147456),  # too much, and vLLM says so
    ],
)
def test_the_cache_holds_what_a_step_can_fill(monkeypatch: pytest.MonkeyPatch, device: str, tp: int, length: int, bytes_: int) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _rank: SimpleNamespace(total_memory=140 * 10**9))
    config = cast("SideConfig", SimpleNamespace(tp=tp, dtype="bfloat16", device=device, gpu_memory_fraction=0.4))
    assert kv_cache_bytes(config, cast("ModelConfig", QWEN3_8B), weights=16 * 10**9, length=length, local_rank=0) == bytes_


def _head_calls(*rows: int) -> HeadRows:
    """Calls of the head with so many rows each; every value is the number of the call."""
    filled = [torch.full((n, 2), float(i)) for i, n in enumerate(rows)]
    return HeadRows(hidden=filled, logits=filled)


SCORED = (
    Sequence(id="two tokens", prompt_ids=(5,), response_ids=(7,)),
    Sequence(id="prompt alone", prompt_ids=(5,), response_ids=()),
    Sequence(id="four", prompt_ids=(7, 9, 11), response_ids=(3,)),
)


def test_the_prompts_rows_are_the_second_call_of_each_prefill() -> None:
    found = prompt_rows(_head_calls(1, 1, 1, 1, 3), SCORED)
    assert [hidden[:, 0].tolist() for hidden, _ in found] == [[1.0], [], [4.0, 4.0, 4.0]]


@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (1, 1, 1, 3), (1, 1, 1, 1, 3, 1), (1, 1, 1, 1, 2), (1, 1, 1, 3, 1), ()])
def test_other_calls_of_the_head_are_no_rows(rows: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="the head saw calls"):
        prompt_rows(_head_calls(*rows), SCORED)
