"""Parts of the rollout adapter that need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.engines.vllm_collectives import AllReduceLog
from rlmismatch.engines.vllm_scoring import tokenised
from rlmismatch.errors import UsageError
from rlmismatch.pins.hooks import installed
from rlmismatch.tokens import Prompt


class _Backend:
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Communicator:
    """Sums small payloads by a backend of its own and large ones by none it names, as vLLM's CUDA communicator does."""

    def __init__(self) -> None:
        self.pynccl_comm = _Backend()
        self.ca_comm = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.pynccl_comm.all_reduce(x) if x.numel() < 8 else x


def test_all_reduces_are_counted_by_what_ran_and_by_size() -> None:
    communicator = _Communicator()
    log = AllReduceLog(communicator)
    with installed(log.patches()):
        for size in (4, 4, 8):
            communicator.all_reduce(torch.zeros(size, dtype=torch.bfloat16))
    communicator.all_reduce(torch.zeros(4))  # no longer looked at
    assert log.calls() == {"_Backend": {"8": 2}, "torch.distributed": {"16": 1}}


def test_one_rank_reduces_nothing() -> None:
    log = AllReduceLog(None)
    assert log.patches() == []
    assert log.calls() == {}


def test_torch_distributed_itself_is_not_patched() -> None:
    """On a CPU without shared memory vLLM calls the module that everyone else in the process calls too."""
    communicator = SimpleNamespace(dist_module=torch.distributed, all_reduce=lambda x: x)
    assert [patch.label for patch in AllReduceLog(communicator).patches()] == ["all_reduce"]


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
