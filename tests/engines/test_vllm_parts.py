"""Parts of the rollout adapter that need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
