"""Prompt and rollout files: what is read, what is refused, and what the digests see."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from rlmismatch.errors import UsageError
from rlmismatch.tokens import Prompt, Sequence, check_ids, digest, read_prompts, read_rollout, write_rollout

FIXTURES = Path(__file__).parents[1] / "fixtures"
SEQUENCE = Sequence(id="a", prompt_ids=(1, 2), response_ids=(3, 4), recorded_logprobs=(-0.5, -1.25), text="one two")


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    return path


def test_read_prompts_reads_text_and_ids(tmp_path: Path) -> None:
    path = file(tmp_path, '{"id": "a", "text": "hello"}\n\n{"token_ids": [5, 6]}\n')
    assert read_prompts(path) == (Prompt(id="a", text="hello"), Prompt(id="1", token_ids=(5, 6)))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_only_a_line_feed_ends_a_line(inside: str, end: str, tmp_path: Path) -> None:
    raw = inside if inside > "\x1f" else f"\\u{ord(inside):04x}"  # JSON has its control characters as escapes
    path = tmp_path / "in.jsonl"
    path.write_bytes((f'{{"text": "a{raw}b"}}{end}' * 2).encode())
    assert read_prompts(path) == (Prompt(id="0", text=f"a{inside}b"), Prompt(id="1", text=f"a{inside}b"))


def test_a_doubled_id_among_many_is_found_at_once(tmp_path: Path) -> None:
    lines = [f'{{"id": "{i}", "token_ids": [5]}}' for i in range(30_000)]
    started = time.process_time()
    with pytest.raises(UsageError, match="'29999' stands on more than one line"):
        read_prompts(file(tmp_path, "\n".join([*lines, lines[-1]])))
    assert time.process_time() - started < 5  # minutes, when each id was counted in the list of all


@pytest.mark.parametrize(
    ("text", "slug", "line"),
    [
        ("", "file-empty", None),
        ("\n \n", "file-empty", None),
        ("{", "jsonl-malformed", 1),
        ('{"text": "a"}\n[1]', "jsonl-malformed", 2),
        ('{"text": "a"}\n{"id": ' + "1" * 5000 + "}", "jsonl-malformed", 2),
        ("[" * 100_000, "jsonl-malformed", 1),
        ("{}", "prompt-malformed", 1),
        ('{"text": "a", "token_ids": [1]}', "prompt-malformed", 1),
        ('{"text": ""}', "prompt-malformed", 1),
        ('{"text": 3}', "prompt-malformed", 1),
        ('{"token_ids": []}', "jsonl-malformed", 1),
        ('{"token_ids": [1, "2"]}', "jsonl-malformed", 1),
        ('{"token_ids": [true]}', "jsonl-malformed", 1),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "ids-not-unique", None),
    ],
)
def test_read_prompts_refuses(text: str, slug: str, line: int | None, tmp_path: Path) -> None:
    path = file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_prompts(path)
    assert caught.value.slug == slug
    assert caught.value.where == (str(path) if line is None else f"{path}:{line}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(UsageError, match="cannot read") as caught:
            read_prompts(path)
        assert caught.value.slug == "file-unreadable"


def test_rollout_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    sequences = (SEQUENCE, Sequence(id="b", prompt_ids=(9,), response_ids=(8,)))
    write_rollout(path, sequences)
    assert read_rollout(path) == sequences


@pytest.mark.parametrize(
    ("text", "slug", "words"),
    [
        ('{"prompt_ids": [1], "response_ids": []}', "jsonl-malformed", "response_ids"),
        ('{"prompt_ids": [], "response_ids": [1]}', "jsonl-malformed", "prompt_ids"),
        ('{"response_ids": [1]}', "jsonl-malformed", "prompt_ids"),
        ('{"prompt_ids": [1], "response_ids": [1, 2], "logprobs": [-1.0]}', "rollout-malformed", "1 recorded log-probs for 2"),
        ('{"prompt_ids": [1], "response_ids": [1], "logprobs": "x"}', "rollout-malformed", "list of numbers"),
        ('{"prompt_ids": [1], "response_ids": [1], "logprobs": [NaN]}', "rollout-not-finite", "nan"),
        ('{"prompt_ids": [1], "response_ids": [1], "logprobs": [-Infinity]}', "rollout-not-finite", "-inf"),
        ('{"prompt_ids": [1], "response_ids": [1], "logprobs": [-' + "9" * 400 + "]}", "rollout-not-finite", "0 is -inf"),
    ],
)
def test_read_rollout_refuses(text: str, slug: str, words: str, tmp_path: Path) -> None:
    path = file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_rollout(path)
    assert caught.value.slug == slug
    assert words in caught.value.what
    assert caught.value.where == f"{path}:1"


def test_a_sequence_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="no prompt token"):
        Sequence(id="a", prompt_ids=(), response_ids=(1,))


@pytest.mark.parametrize("bad", [1100, -1])
def test_check_ids_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    sequence = dataclasses.replace(SEQUENCE, response_ids=(3, bad))
    with pytest.raises(UsageError, match=f"token id {bad} of 'a' is outside the vocabulary of 1100") as caught:
        check_ids([sequence], vocab_size=1100, max_positions=8, source="p.jsonl")
    assert (caught.value.slug, caught.value.where) == ("token-id-out-of-range", "p.jsonl")


def test_check_ids_counts_the_tokens_to_come() -> None:
    prompt = Prompt(id="a", token_ids=(1, 2, 3))
    check_ids([prompt, SEQUENCE], vocab_size=5, max_positions=4)
    check_ids([prompt], vocab_size=5, max_positions=4, reserve=1)
    with pytest.raises(UsageError, match=r"'a' has 3 tokens and 2 are to be sampled, but the model allows 4 positions") as caught:
        check_ids([prompt], vocab_size=5, max_positions=4, reserve=2)
    assert caught.value.slug == "prompt-too-long"


def test_digest_sees_which_part_changed() -> None:
    base = digest([SEQUENCE])
    assert digest([dataclasses.replace(SEQUENCE, recorded_logprobs=None, text="")]) == base
    changes = {
        "another response": ({"response_ids": (3, 5)}, {"response_ids"}),
        "another prompt": ({"prompt_ids": (1, 3)}, {"prompt_ids"}),
        "a second bos": ({"prompt_ids": (1, 1, 2)}, {"prompt_ids", "mask"}),
        "the boundary moved": ({"prompt_ids": (1, 2, 3), "response_ids": (4,)}, {"prompt_ids", "response_ids", "mask"}),
        "another id": ({"id": "b"}, {"prompt_ids", "response_ids", "mask"}),
    }
    for name, (change, fields) in changes.items():
        other = digest([dataclasses.replace(SEQUENCE, recorded_logprobs=None, **change)])  # type: ignore[arg-type]
        assert {field for field in base if other[field] != base[field]} == fields, name
    assert digest([SEQUENCE, dataclasses.replace(SEQUENCE, id="b")]) != digest([dataclasses.replace(SEQUENCE, id="b"), SEQUENCE])


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts-tiny.jsonl"])
def test_the_prompts_that_come_with_the_project(name: str) -> None:
    prompts = read_prompts(FIXTURES / name)
    assert 4 <= len(prompts) <= 6
    if name == "prompts-tiny.jsonl":
        assert [len(p.token_ids) for p in prompts] == [5, 17, 33, 12]
        check_ids(prompts, vocab_size=1000, max_positions=512, reserve=64)
    else:
        assert all(p.text for p in prompts)
