"""The head's rows that no token names: counted, and told apart by what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.make import write
from fixtures.recipes import FIXTURES
from rlmismatch.assemble import head
from rlmismatch.checkpoint import Checkpoint
from rlmismatch.checkpoint.head import kind_of, tokenizer_size, unused_rows
from rlmismatch.errors import UsageError

ROWS, TOKENS = 1100, 1000  # of tiny-qwen3, and of the tokenizer that it is given here
NORMAL = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) * 0.02


def checkpoint(root: Path, edit: Callable[[torch.Tensor], object], tokens: int | None = TOKENS) -> Checkpoint:
    root.mkdir(exist_ok=True)
    write(FIXTURES["tiny-qwen3"], root)
    tensors = load_file(root / "model.safetensors")
    edit(tensors["lm_head.weight"])
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    if tokens is not None:
        vocab = {f"t{i}": i for i in range(tokens - 2)}
        added = [{"id": tokens - 1, "content": "<end>"}]
        (root / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}))
    return Checkpoint.open(root)


def report_of(found: dict[str, Any] | None) -> Any:
    return SimpleNamespace(run={"checkpoint": {"unused_rows": found}})


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (torch.zeros(5, 64), "zeros"),
        (torch.full((5, 64), 0.25) + 0.003, "copies of the mean row"),
        (torch.linspace(-1, 1, 64).repeat(5, 1), "one row repeated"),
        (NORMAL, "normal(0.02)"),
        (NORMAL + 0.01, "other"),  # a mean, as trained rows have it
        (NORMAL**3, "other"),  # long tails
    ],
)
def test_what_the_rows_hold_is_named(rows: torch.Tensor, kind: str) -> None:
    assert kind_of(rows, torch.full((64,), 0.253)) == kind


def test_rows_beyond_the_tokenizer_are_counted_and_are_no_padding(tmp_path: Path) -> None:
    def zero(weight_VH: torch.Tensor) -> None:
        weight_VH[TOKENS:] = 0

    found = unused_rows(checkpoint(tmp_path, zero))
    assert (found.rows, found.tokenizer, found.first, found.count, found.kind) == (ROWS, TOKENS, TOKENS, 100, "zeros")
    assert (found.norm_mean, found.norm_max) == (0.0, 0.0)
    assert found.used_norm_mean is not None
    assert found.used_norm_mean > 0
    evidence = report_of(found.to_json())
    count, norm = head.measures(evidence)
    assert (count.what, count.value, count.unit) == ("rows of the head beyond the tokenizer's 1000 ids", 100.0, "rows")
    assert norm.value == 0.0
    assert "no padding, and both engines count them" in head.note(evidence)


def test_as_many_rows_as_ids_leave_nothing_to_say(tmp_path: Path) -> None:
    evidence = report_of(unused_rows(checkpoint(tmp_path, lambda weight_VH: None, tokens=ROWS)).to_json())
    assert [(m.value, m.note) for m in head.measures(evidence)] == [(0.0, "none")]
    assert head.note(evidence) == ""
    assert head.measures(report_of(None)) == ()


def test_without_a_tokenizer_equal_rows_at_the_end_are_seen(tmp_path: Path) -> None:
    def padded(weight_VH: torch.Tensor) -> None:
        weight_VH[-7:] = weight_VH[:-7].float().mean(dim=0)

    found = unused_rows(checkpoint(tmp_path, padded, tokens=None))
    assert (found.tokenizer, found.count, found.kind) == (None, 7, "copies of the mean row")
    assert "last 7 rows are all alike" in head.note(report_of(found.to_json()))
    assert unused_rows(checkpoint(tmp_path / "b", lambda weight_VH: None, tokens=None)).count == 0


def test_a_unigram_model_numbers_its_pieces_in_order(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}))
    assert tokenizer_size(tmp_path) == 2
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError) as error:
        tokenizer_size(tmp_path)
    assert error.value.slug == "tokenizer-malformed"
