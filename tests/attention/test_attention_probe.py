"""Reading an attention operation from its answers: every property on its own, on a plain softmax that has the fault or has it not."""

from __future__ import annotations

import pytest
import torch

from rlmismatch.engines import attention_probe
from rlmismatch.engines.attention_probe import Operator

HEADS, KV_HEADS, DIM, SCALE, PROMPT, DECODE = 4, 2, 16, 0.25, 12, 2
CPU = torch.device("cpu")


def softmax_attention(q, k, v, *, scale=SCALE, window=0, cap=0.0, sink=None, ahead=0, tiled=False, swap=False):  # type: ignore[no-untyped-def]
    """bfloat16 probabilities, as the least precise native kernel has them; the formula written out on its own."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    of = [h % k.shape[1] if tiled else h // group for h in range(q.shape[1])]
    slots = list(range(q.shape[1]))
    if swap:
        slots[0], slots[-1] = slots[-1], slots[0]
    q, k, v = q.float()[:, slots], k.float()[:, of], v.float()[:, of]
    score = torch.einsum("qhd,nhd->hqn", q, k).to(dtype).float() * scale
    score = cap * torch.tanh(score / cap) if cap else score
    t, n = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    hidden = n > t + ahead
    hidden = hidden | (n <= t - window) if window else hidden
    score = score.masked_fill(hidden, -torch.inf)
    logits = score if sink is None else torch.cat([score, torch.full((*score.shape[:2], 1), sink)], -1)
    weight = logits.softmax(-1)[..., : len(k)].to(dtype).float()
    return torch.einsum("hqn,nhd->qhd", weight, v).to(dtype)


def found(
    rows: slice | None = None,
    *,
    score_rows: slice | None = None,
    prompt: int = PROMPT,
    dtype: torch.dtype = torch.bfloat16,
    **fault: object,
) -> Operator:
    outs, given = {}, {}
    for setup in attention_probe.SETUPS:
        given[setup] = attention_probe.inputs(
            setup,
            prompt=prompt,
            decode=DECODE,
            heads=HEADS,
            kv_heads=KV_HEADS,
            dim=DIM,
            scale=SCALE,
            dtype=dtype,
            device=CPU,
        )
        x = given[setup]
        outs[setup] = softmax_attention(x.q_THD, x.k_THD, x.v_THD, **fault)
    rows = rows or slice(0, prompt)
    return attention_probe.read_operator(
        outs["mask"], rows, prompt, scores=given["scores"], scores_out_THD=outs["scores"], score_rows=score_rows or rows
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [slice(0, PROMPT), slice(PROMPT, PROMPT + DECODE)], ids=["prefill", "decode"])
def test_a_clean_operation_is_read_as_it_is(rows: slice, dtype: torch.dtype) -> None:
    got = found(rows, dtype=dtype)
    assert (got.mask, got.window, got.sink_logits, got.gqa, got.soft_cap) == ("causal", 0, (), "block", 0.0)
    assert attention_probe.as_asked(got.scale, SCALE) == SCALE


@pytest.mark.parametrize("one_more", [0, 1])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_window_is_counted_with_the_current_token(one_more: int, phase: str) -> None:
    asked = 9
    prompt, reached = attention_probe.trial_tokens(asked, 4096)
    assert reached
    rows = slice(0, prompt) if phase == "prefill" else slice(prompt, prompt + DECODE)
    got = found(rows, prompt=prompt, window=asked + one_more, score_rows=slice(0, attention_probe.SCORE_TOKENS))
    assert (got.window, got.mask, got.sink_logits, got.gqa) == (asked + one_more, "causal", (), "block")
    assert attention_probe.as_asked(got.scale, SCALE) == SCALE


@pytest.mark.parametrize("scale", [SCALE * 2.0047, SCALE * 1.1, SCALE / 2])
def test_another_scale_is_named(scale: float) -> None:
    got = found(scale=scale)
    assert got.scale == pytest.approx(scale, rel=0.01)
    assert (got.soft_cap, got.gqa) == (0.0, "block")


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_a_soft_cap_is_named_beside_an_unchanged_scale(cap: float) -> None:
    got = found(cap=cap)
    assert got.soft_cap == pytest.approx(cap, rel=0.1)
    assert got.scale == pytest.approx(SCALE, rel=0.03)


@pytest.mark.parametrize("rows", [slice(0, PROMPT), slice(PROMPT, PROMPT + DECODE)], ids=["prefill", "decode"])
def test_a_sink_is_seen_by_what_the_weights_lack(rows: slice) -> None:
    got = found(rows, sink=1.5)
    assert got.sink_logits == pytest.approx([1.5] * HEADS, abs=0.1)
    assert (got.mask, got.window) == ("causal", 0)
    assert attention_probe.as_asked(got.scale, SCALE) == SCALE


def test_the_head_map_and_the_order_of_heads() -> None:
    assert found(tiled=True).gqa == "tiled"
    assert found(swap=True).gqa == "query heads in the order [3, 1, 2, 0]"


@pytest.mark.parametrize(("ahead", "word"), [(1, "leaks 1 later tokens"), (PROMPT, "full")])
def test_a_mask_that_leaks(ahead: int, word: str) -> None:
    assert found(ahead=ahead).mask == word


def test_nonsense_fits_nothing() -> None:
    given = attention_probe.inputs(
        "scores",
        prompt=PROMPT,
        decode=0,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        scale=SCALE,
        dtype=torch.float32,
        device=CPU,
    )
    nothing = torch.full_like(given.q_THD, torch.nan)
    rows = slice(0, PROMPT)
    got = attention_probe.read_operator(nothing, rows, PROMPT, scores=given, scores_out_THD=nothing, score_rows=rows)
    assert (got.mask, got.window, got.sink_logits, got.kv_head_of, got.head_order, got.scale) == (None,) * 6
    assert got.gqa is None


def test_how_many_tokens_a_trial_needs() -> None:
    assert attention_probe.trial_tokens(0, 4096) == (24, True)
    assert attention_probe.trial_tokens(64, 4096) == (67, True)
    assert attention_probe.trial_tokens(4096, 2048) == (24, False)
    with pytest.raises(ValueError, match="tokens"):
        attention_probe.inputs("mask", prompt=2, decode=0, heads=1, kv_heads=1, dim=8, scale=1.0, dtype=torch.float32, device=CPU)
