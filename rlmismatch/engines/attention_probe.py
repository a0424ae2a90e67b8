"""Known Q, K and V, and what an attention operation's answers to them say about it: mask, window, sinks, scale, cap, head map.

What an attribute says an operation does and what it does are two things (a backend may take a sink and drop it), so the live operation
is asked. Two sets of inputs are enough, and each property is read from them on its own:

*mask*: Q and K are zero, so every visible token counts alike, and V marks positions: which rows see a mark is the mask and the window,
what is missing from the sum is the sink, and a mark per key/value head shows which of them serves a query head.

*scores*: each of the first three tokens' V is a unit vector, so an output element is the weight of one token, and the logarithm of the
ratio of two weights is the difference of their scores, whatever else is in the denominator. A factor a head makes heads tell apart.

T tokens, Hq / Hkv heads, D head dim (at least 8). Pure functions of tensors; the adapters put them through the live operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from rlmismatch.contract import Reading, read, unknown
from rlmismatch.errors import UsageError

Setup = Literal["mask", "scores"]
SETUPS: Final[tuple[Setup, ...]] = ("mask", "scores")
PLAIN_TOKENS: Final = 24  # of a trial where no window is asked for
SCORE_TOKENS: Final = 5  # of a prefill of the set-up scores: few, so that a window hides none of them
BEYOND_WINDOW: Final = 3  # rows that a trial has behind the window, so that a longer one shows as what it is
_EARLY: Final = 5  # positions 0..4 are marked in columns 0..4; a decode step behind a window still sees the last of them
_MID, _LAST, _HEAD = 5, 6, 7  # columns of the other marks
_SCORE: Final = 1.5  # of token 1 for query head 0, below token 0's
_SAME: Final = 0.01  # relative: bfloat16 scores and probabilities are good to 0.5 %
_MAX_CAP: Final = 1e4


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What one attention operation was found to do. None: its answers fit nothing that is known here."""

    mask: str | None  # causal | full | leaks N later tokens
    window: int | None  # tokens, the current one included; 0: none within the trial's length
    sink_logits: tuple[float, ...] | None  # per query head; (): no sink
    kv_head_of: tuple[int, ...] | None  # per query head of this rank
    head_order: tuple[int, ...] | None  # which query head each slot answers for
    scale: float | None
    soft_cap: float | None  # 0: none

    @property
    def gqa(self) -> str | None:
        """``block``, ``tiled``, or what else the map is."""
        if self.kv_head_of is None or self.head_order is None:
            return None
        if self.head_order != tuple(range(len(self.head_order))):
            return f"query heads in the order {list(self.head_order)}"
        return gqa_name(self.kv_head_of)


def gqa_name(kv_head_of: tuple[int, ...]) -> str:
    """The name of a map from query heads to key/value heads; where both names fit, ``block``."""
    heads, kv_heads = len(kv_head_of), max(kv_head_of) + 1
    if all(kv == h * kv_heads // heads for h, kv in enumerate(kv_head_of)):
        return "block"
    return "tiled" if all(kv == h % kv_heads for h, kv in enumerate(kv_head_of)) else str(list(kv_head_of))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Q [T, Hq, D], K and V [T, Hkv, D] of one set-up. `prompt`: tokens that a prefill holds; the rest are for decode steps."""

    q_THD: torch.Tensor
    k_THD: torch.Tensor
    v_THD: torch.Tensor
    prompt: int


def trial_tokens(window: int, longest: int) -> tuple[int, bool]:
    """(tokens of a prefill that can show a window of `window`, whether the engine takes that many: it takes `longest`)."""
    if longest < _EARLY + 1:
        raise UsageError("max-model-len-too-short", f"sequences of {longest} tokens: the trials of live attention need {_EARLY + 1}")
    needed = window + BEYOND_WINDOW if window else PLAIN_TOKENS
    return (needed, True) if needed <= longest else (min(PLAIN_TOKENS, longest), not window)


def inputs(
    setup: Setup, *, prompt: int, decode: int, heads: int, kv_heads: int, dim: int, scale: float, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """The inputs of one set-up, for a prefill of `prompt` tokens and `decode` steps of one token behind it. scale: the one asked for."""
    if dim <= _HEAD or prompt < _EARLY:
        raise ValueError(f"a trial needs heads of more than {_HEAD} and {_EARLY} tokens, got {dim} and {prompt}")
    tokens = prompt + decode
    q, k, v = (torch.zeros(tokens, n, dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    if setup == "mask":
        for p in range(_EARLY):
            v[p, :, p] = 1.0
        v[prompt // 2, :, _MID] = 1.0
        v[prompt - 1, :, _LAST] = 1.0
        v[:, :, _HEAD] = torch.arange(1.0, kv_heads + 1)
    else:
        q[:, :, 0] = _head_factors(heads)
        k[1, :, 0] = -_SCORE / scale
        k[2, :, 0] = -_SCORE * _steepness(dtype) / scale
        k[3:, :, 0] = -_SCORE / scale
        for p in range(_EARLY):
            v[p, :, p] = 1.0
    return Inputs(q_THD=q.to(device, dtype), k_THD=k.to(device, dtype), v_THD=v.to(device, dtype), prompt=prompt)


def _head_factors(heads: int) -> torch.Tensor:
    return 1.0 + torch.arange(heads, dtype=torch.float64) / heads


def _steepness(dtype: torch.dtype) -> float:
    """How much further down token 2's score lies than token 1's: as far as a probability still keeps its precision."""
    return 4.0 if dtype is torch.float16 else 8.0


def read_operator(
    mask_out_THD: torch.Tensor, rows: slice, prompt: int, *, scores: Inputs, scores_out_THD: torch.Tensor, score_rows: slice
) -> Operator:
    """What the operation did in some rows of the two set-ups' outputs: `rows` of mask, `score_rows` of scores (from row 2 on).

    prompt: tokens of the set-up mask's prefill. In decode rows the mask cannot leak; a window shows in the first marks.
    """
    out = mask_out_THD.double().cpu()
    row_numbers = list(range(*rows.indices(len(out))))
    sinks = _sinks(out, row_numbers)
    order, scale, cap = _scores(scores, scores_out_THD, list(range(*score_rows.indices(len(scores_out_THD)))))
    return Operator(
        mask=_mask(out, prompt) if row_numbers[0] == 0 else "causal",
        window=_window(out, row_numbers),
        sink_logits=sinks,
        kv_head_of=_kv_heads(out, row_numbers),
        head_order=order,
        scale=scale,
        soft_cap=cap,
    )


def _seen(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x.abs() > 0.1 / tokens


def _mask(out: torch.Tensor, prompt: int) -> str | None:
    """From who sees the middle of the prompt."""
    mid = prompt // 2
    seen = _seen(out[:, :, _MID], len(out))
    if not bool(seen[mid].all()):
        return None
    early = [t for t in range(mid) if bool(seen[t].any())]
    if not early:
        return "causal"
    ahead = mid - early[0]
    return "full" if ahead == mid else f"leaks {ahead} later tokens"


def _window(out: torch.Tensor, rows: list[int]) -> int | None:
    """From the first of the marked early positions that a row still sees; all rows and heads must say the same."""
    found = set()
    for t in rows:
        for head in out[t]:
            marks = [p for p in range(min(_EARLY, t + 1)) if bool(_seen(head[p], len(out)))]
            if marks and marks != list(range(marks[0], min(_EARLY, t + 1))):
                return None
            if marks and marks[0] > 0:
                found.add(t - marks[0] + 1)
            elif not marks and t == rows[0]:
                return None  # hidden from the first row on: the window is shorter than can be read here
    if len(found) > 1:
        return None
    return found.pop() if found else 0


def _first_mark(out: torch.Tensor, t: int) -> int | None:
    """The first of the marked early positions that row `t` sees, in every head; None if none of them."""
    return next((p for p in range(min(_EARLY, t + 1)) if bool(_seen(out[t, :, p], len(out)).all())), None)


def _sinks(out: torch.Tensor, rows: list[int]) -> tuple[float, ...] | None:
    """What a row's weights lack to one is the sink's: one mark's weight times the tokens that a causal row sees."""
    t = rows[0]
    first = _first_mark(out, t)
    if first is None:
        return None
    visible = t + 1 - first
    lacking = [1.0 / float(w) - visible for w in out[t, :, first]]
    if all(abs(x) <= 2 * _SAME * visible for x in lacking):
        return ()
    return tuple(math.log(x) if x > 0 else -math.inf for x in lacking)


def _kv_heads(out: torch.Tensor, rows: list[int]) -> tuple[int, ...] | None:
    """The mark of the head over the weight that all visible tokens have together."""
    t = rows[0]
    first = _first_mark(out, t)
    if first is None:
        return None
    mark_H = out[t, :, _HEAD] / (out[t, :, first] * (t + 1 - first))
    rounded = mark_H.round()
    return tuple(int(x) - 1 for x in rounded) if bool(((mark_H - rounded).abs() < 0.3).all()) else None


def _scores(given: Inputs, out_THD: torch.Tensor, rows: list[int]) -> tuple[tuple[int, ...] | None, float | None, float | None]:
    """(head order, scale, soft cap) from the weights of tokens 1 and 2 over token 0's."""
    useful = [t for t in rows if t >= 2]
    if not useful:
        return None, None, None
    out = out_THD.double().cpu()[useful]
    small_H, large_H = (torch.log(out[:, :, p] / out[:, :, 0]).mean(0) for p in (1, 2))
    if not bool(torch.isfinite(small_H).all() and torch.isfinite(large_H).all()):
        return None, None, None
    q_H = given.q_THD[0, :, 0].double().cpu()
    k_small, k_large = (float(given.k_THD[p, 0, 0]) for p in (1, 2))
    cap = _fit_cap(float(small_H.mean()), float(large_H.mean()), k_large / k_small)
    plain_H = small_H if cap == 0.0 else cap * torch.atanh(small_H / cap)
    scale = float(plain_H.sum() / (q_H.sum() * k_small))
    distance_HH = (plain_H[:, None] - scale * q_H[None] * k_small).abs()
    order = tuple(int(h) for h in distance_HH.argmin(1))
    if sorted(order) != list(range(len(order))):
        return None, scale, cap
    return order, scale, cap


def _fit_cap(small: float, large: float, ratio: float) -> float:
    """The cap c with ``atanh(large / c) = ratio * atanh(small / c)``; 0 where the scores are as far apart as without one."""
    if abs(large / small / ratio - 1.0) <= _SAME:
        return 0.0
    low, high = abs(large) * (1 + 1e-9), _MAX_CAP
    for _ in range(100):
        middle = math.sqrt(low * high)
        if math.atanh(abs(large) / middle) > ratio * math.atanh(abs(small) / middle):
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def as_asked(found: float | None, asked: float) -> float | None:
    """`asked` if the trial reproduces it; else what was found, to three digits."""
    if found is None:
        return None
    return asked if abs(found - asked) <= _SAME * abs(asked) else float(f"{found:.3g}")


def operator_fields(
    operators: Sequence[Operator], *, scale: Any, soft_cap: Any, window: Any, reaches_window: bool, source: str
) -> dict[str, Reading]:
    """The fields of attention.provenance that a trial of every layer answers.

    scale, soft_cap, window: what the engine says they are (a list where layers differ); the trial's word counts where it can tell.
    """

    def field(of: Callable[[Operator], Any], said: Any = None) -> Reading:
        found = list(dict.fromkeys(map(of, operators)))
        if None in found:
            return unknown(f"{source}: its answers fit nothing that is known")
        if len(found) > 1 and isinstance(said, list):
            return read(said, source)
        return read(found[0] if len(found) == 1 else found, source)

    windows = (
        field(lambda o: o.window, window)
        if reaches_window
        else read(window, "as the engine says: it takes no sequence that is longer than the window")
    )
    return {
        "mask": field(lambda o: o.mask),
        "sliding_window": windows,
        "softmax_scale": field(lambda o: as_asked(o.scale, scale), scale) if isinstance(scale, float) else read(scale, source),
        "logit_soft_cap": field(lambda o: as_asked(o.soft_cap, soft_cap)) if isinstance(soft_cap, float) else read(soft_cap, source),
        "sinks": field(lambda o: None if o.sink_logits is None else bool(o.sink_logits)),
    }


def gqa_field(operators: Sequence[Operator], source: str) -> Reading:
    """attention.layout:gqa_mapping of all layers."""
    found = list(dict.fromkeys(o.gqa for o in operators))
    if None in found:
        return unknown(f"{source}: its answers fit no map of heads")
    return read(found[0] if len(found) == 1 else found, source)
