"""Prompts and rollouts: token ids travel, text is never re-tokenised later.

JSONL, one object a line. A prompt: ``{"id": "a", "text": "..."}`` or ``{"id": "a", "token_ids": [..]}``. A rollout:
``{"id": "a", "prompt_ids": [..], "response_ids": [..], "logprobs": [..]}``; ``logprobs`` are what the rollout engine recorded
while it decoded (nats), one per response id, and may be absent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmismatch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: token ids, or text that the rollout side tokenises once."""

    id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One prompt and its response. The scored (active) tokens are the response's."""

    id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    recorded_logprobs: tuple[float, ...] | None = None  # nats, as sampled
    text: str = ""  # the prompt's text if there was one; for people, never re-tokenised

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"sequence {self.id!r} has no prompt token: the first token can not be scored")
        if self.recorded_logprobs is not None and len(self.recorded_logprobs) != len(self.response_ids):
            raise ValueError(
                f"sequence {self.id!r}: {len(self.recorded_logprobs)} recorded log-probs for {len(self.response_ids)} response ids"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"id": self.id, "prompt_ids": list(self.prompt_ids), "response_ids": list(self.response_ids)}
        if self.recorded_logprobs is not None:
            out["logprobs"] = list(self.recorded_logprobs)
        if self.text:
            out["text"] = self.text
        return out


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a JSONL file. Errors name file and line."""
    out: list[Prompt] = []
    for where, data in _jsonl(path):
        prompt_id = str(data.get("id", len(out)))
        ids, text = data.get("token_ids"), data.get("text")
        if (ids is None) == (text is None):
            raise UsageError("prompt-malformed", "a prompt needs either text or token_ids", where=where)
        if (text is not None and not isinstance(text, str)) or text == "":
            raise UsageError("prompt-malformed", "text must be a string that is not empty", where=where)
        out.append(Prompt(id=prompt_id, token_ids=_ids(ids, where, "token_ids") if ids is not None else (), text=text or ""))
    _unique([p.id for p in out], path)
    return tuple(out)


def read_rollout(path: Path) -> tuple[Sequence, ...]:
    """Sequences of a rollout file. Errors name file and line."""
    out = [sequence_from_json({"id": str(n), **data}, where) for n, (where, data) in enumerate(_jsonl(path))]
    _unique([s.id for s in out], path)
    return tuple(out)


def sequence_from_json(data: Mapping[str, Any], where: str) -> Sequence:
    """One sequence from its JSON form. Raises UsageError naming `where`."""
    recorded = data.get("logprobs")
    if recorded is not None:
        if not isinstance(recorded, list) or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in recorded):
            raise UsageError("rollout-malformed", "logprobs must be a list of numbers", where=where)
        recorded = [_float(x) for x in recorded]
        bad = [i for i, x in enumerate(recorded) if not math.isfinite(x)]
        if bad:
            raise UsageError("rollout-not-finite", f"recorded log-prob {bad[0]} is {recorded[bad[0]]}", where=where)
    try:
        return Sequence(
            id=str(data["id"]),
            prompt_ids=_ids(data.get("prompt_ids"), where, "prompt_ids"),
            response_ids=_ids(data.get("response_ids"), where, "response_ids"),
            recorded_logprobs=None if recorded is None else tuple(recorded),
            text=str(data.get("text", "")),
        )
    except ValueError as error:
        raise UsageError("rollout-malformed", str(error), where=where) from None


def write_rollout(path: Path, sequences: Iterable[Sequence]) -> None:
    path.write_text("".join(json.dumps(s.to_json()) + "\n" for s in sequences))


def check_ids(sequences: Iterable[Prompt | Sequence], *, vocab_size: int, max_positions: int, reserve: int = 0, source: str = "") -> None:
    """Refuse token ids outside the vocabulary and sequences longer than the model allows (`reserve` = tokens still to be sampled)."""
    for s in sequences:
        bad = [t for t in s.token_ids if not 0 <= t < vocab_size]
        if bad:
            raise UsageError(
                "token-id-out-of-range",
                f"token id {bad[0]} of {s.id!r} is outside the vocabulary of {vocab_size}",
                where=source,
                hint="the file was made with another tokenizer, or for another model",
            )
        if len(s.token_ids) + reserve > max_positions:
            raise UsageError(
                "prompt-too-long",
                f"{s.id!r} has {len(s.token_ids)} tokens"
                + (f" and {reserve} are to be sampled" if reserve else "")
                + f", but the model allows {max_positions} positions",
                where=source,
                hint="shorten the prompt, or lower --max-new-tokens",
            )


def digest(sequences: Iterable[Sequence]) -> dict[str, str]:
    """sha256 of ids, prompt ids, response ids and active mask, each over all sequences in order: the fields of `model.tokens`."""
    parts = {"prompt_ids": hashlib.sha256(), "response_ids": hashlib.sha256(), "mask": hashlib.sha256()}
    for s in sequences:
        parts["prompt_ids"].update(json.dumps([s.id, list(s.prompt_ids)]).encode())
        parts["response_ids"].update(json.dumps([s.id, list(s.response_ids)]).encode())
        parts["mask"].update(json.dumps([s.id, len(s.prompt_ids), len(s.response_ids)]).encode())
    return {name: h.hexdigest() for name, h in parts.items()}


def _jsonl(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    try:
        # Not splitlines: JSON allows U+2028, U+2029 and U+0085 inside a string. CR LF becomes LF as the file is read.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("file-unreadable", f"cannot read {path}: {error}", where=str(path)) from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise UsageError("jsonl-malformed", f"not JSON: {getattr(error, 'msg', error)}", where=where) from None
        if not isinstance(data, dict):
            raise UsageError("jsonl-malformed", "each line must be a JSON object", where=where)
        rows.append((where, data))
    if not rows:
        raise UsageError("file-empty", f"{path} holds no line", where=str(path), hint="one JSON object a line; see fixtures/prompts.jsonl")
    return rows


def _ids(value: Any, where: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        raise UsageError("jsonl-malformed", f"{name} must be a list of token ids that is not empty", where=where)
    return tuple(value)


def _float(x: float) -> float:
    """A number of JSON as a float; an integer beyond all floats is infinite."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _unique(ids: list[str], path: Path) -> None:
    doubled = sorted(i for i, n in Counter(ids).items() if n > 1)
    if doubled:
        raise UsageError("ids-not-unique", f"id {doubled[0]!r} stands on more than one line", where=str(path))
