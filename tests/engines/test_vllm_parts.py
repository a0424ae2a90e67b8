"""Parts of the rollout adapter that need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlmismatch.checkpoint import ModelConfig
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.engines.vllm_memory import kv_cache_bytes
from rlmismatch.engines.vllm_scoring import tokenised
from rlmismatch.errors import UsageError
from rlmismatch.tokens import Prompt


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
