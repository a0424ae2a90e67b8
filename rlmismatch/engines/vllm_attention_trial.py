"""The rollout's live attention, rotary embedding and loader, asked: short requests with known inputs, through the engine's own steps.

A request runs as any other does (scheduler, block table, slots, metadata), but every attention layer is handed the trial's Q, K and V in
place of its own. What the layer's kernel is called with is recorded on the way, so what is reported of the backend is what ran.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlmismatch.checkpoint import Checkpoint
from rlmismatch.engines import attention_lse, attention_merges, attention_probe, head_canary, rope_probe, vllm_kernel_calls
from rlmismatch.engines.attention_lse import LseFound
from rlmismatch.engines.attention_probe import Inputs, Operator, Setup
from rlmismatch.engines.rope_probe import Rotation
from rlmismatch.engines.vllm_scoring import Scorer
from rlmismatch.pins.hooks import Patch, installed
from rlmismatch.pins.vllm_live import LiveModel

_DECODE: Final = 2  # steps of one token behind a trial's prefill
_FACTS: Final = ("fa_version", "num_splits", "causal", "window_size", "sliding_window", "softcap", "softmax_scale", "scale")


@dataclass(frozen=True, kw_only=True)
class AttentionTrial:
    """What the live rollout was found to do, on this rank.

    prefill, decode: one operator a layer. reaches_window: whether the engine's longest sequence is beyond the window that is set.
    kernels: phase -> the kernel calls seen in it, each with the arguments that tell them apart. ran: phase -> of each layer how often which
    kernel was called in one trial of a prefill and two decode steps. kv_splits: the number of KV splits that
    they were called with, ``auto`` where the kernel chooses, None where it is not known. heads: checkpoint heads by (q, k, v).
    """

    prefill: tuple[Operator, ...]
    decode: tuple[Operator, ...]
    reaches_window: bool
    kernels: dict[str, list[str]]
    ran: dict[str, list[Counter[str]]]
    kv_splits: str | None
    rotation: Rotation
    positions_passed: list[int]  # what the engine handed to its rotary embedding, prefill and decode steps in one row
    lse: LseFound | None  # None: the kernel exports none
    merged: LseFound | None  # what a merge of KV splits takes; None: none was seen
    heads: tuple[list[int] | None, ...]  # of q, k, v


@dataclass
class _Record:
    """Outputs of one request, a layer each, rows in order of position; and what was seen beside them."""

    rows: list[list[torch.Tensor]]
    kernels: dict[str, list[str]] = field(default_factory=dict)
    running: int = 0  # the layer whose implementation runs
    ran: dict[str, list[Counter[str]]] = field(default_factory=dict)
    lse: torch.Tensor | None = None  # of the first prefill call, where its kernel exports one


def ask(live: LiveModel, scorer: Scorer, checkpoint: Checkpoint, *, window: int, longest: int, scale: float) -> AttentionTrial:
    """Run the trials. window: the longest one that is asked for or set; longest: tokens of a sequence that the engine takes."""
    prompt, reaches = attention_probe.trial_tokens(window, longest - _DECODE)
    outs: dict[Setup, list[torch.Tensor]] = {}
    given: dict[Setup, Inputs] = {}
    kernels: dict[str, list[str]] = {}
    ran: dict[str, list[Counter[str]]] = {}
    first = live.layers[0].self_attn.attn
    prompts: dict[Setup, int] = {"mask": prompt, "scores": attention_probe.SCORE_TOKENS}
    for setup in attention_probe.SETUPS:
        given[setup] = attention_probe.inputs(
            setup,
            prompt=prompts[setup],
            decode=_DECODE,
            heads=first.impl.num_heads,
            kv_heads=first.impl.num_kv_heads,
            dim=first.impl.head_size,
            scale=scale,
            dtype=first.dtype,
            device=live.inv_freq.device,
        )
        with _given(live, given[setup]) as record:
            scorer.request([head_canary.TOKEN] * prompts[setup], new_tokens=_DECODE + 1)
        outs[setup] = [torch.cat(rows) for rows in record.rows]
        kernels, ran = kernels or record.kernels, ran or record.ran
    lse, merged = _lse(live, scorer, min(attention_merges.TOKENS, longest - _DECODE), window or None)
    read = {
        phase: tuple(
            attention_probe.read_operator(
                mask_out,
                _rows(phase, prompt),
                prompt,
                scores=given["scores"],
                scores_out_THD=scores_out,
                score_rows=_rows(phase, attention_probe.SCORE_TOKENS),
            )
            for mask_out, scores_out in zip(outs["mask"], outs["scores"], strict=True)
        )
        for phase in ("prefill", "decode")
    }
    positions, heads = _watched(live, scorer, checkpoint, min(prompt, attention_probe.PLAIN_TOKENS))
    return AttentionTrial(
        prefill=read["prefill"],
        decode=read["decode"],
        reaches_window=reaches,
        kernels=kernels,
        ran=ran,
        kv_splits=_kv_splits(kernels),
        rotation=rotation(live),
        positions_passed=positions,
        lse=lse,
        merged=merged,
        heads=heads,
    )


def _lse(live: LiveModel, scorer: Scorer, prompt: int, window: int | None) -> tuple[LseFound | None, LseFound | None]:
    """(the LSE that the kernel exports, the LSE that a merge of KV splits takes), each as it was found; None where there is none."""
    impl = live.layers[0].self_attn.attn.impl
    heads = (impl.num_heads, impl.num_kv_heads, impl.head_size)
    q, k, v = attention_merges.trial_operands(prompt + _DECODE, *heads, live.layers[0].self_attn.attn.dtype, live.inv_freq.device)
    given = Inputs(q_THD=q, k_THD=k, v_THD=v, prompt=prompt)
    with _given(live, given) as record, attention_merges.consumed() as merges:
        scorer.request([head_canary.TOKEN] * prompt, new_tokens=_DECODE + 1)
    scale = float(impl.scale)
    merged = attention_merges.diagnose_merges(merges, q, k, scale)
    if record.lse is None:
        return None, merged
    return attention_lse.diagnose(record.lse, attention_lse.exact(q[:prompt], k[:prompt], scale, window=window)), merged


def _rows(phase: str, prompt: int) -> slice:
    return slice(0, prompt) if phase == "prefill" else slice(prompt, prompt + _DECODE)


def rotation(live: LiveModel) -> Rotation:
    """What the first layer's rotary embedding makes of unit vectors."""
    rotary = live.layers[0].self_attn.rotary_emb
    dim = int(rotary.head_size)
    device = live.inv_freq.device
    dtype = live.layers[0].self_attn.attn.dtype
    x_TDD = rope_probe.unit_vectors(dim, dtype=dtype, device=device)
    flat = x_TDD.reshape(rope_probe.TOKENS, dim * dim)
    with torch.inference_mode():
        out, _ = rotary(torch.arange(rope_probe.TOKENS, device=device), flat.clone(), flat.clone())
    # The live frequencies are the angles at position 1: another theta is another field's matter.
    cos_P, sin_P = rotary.cos_sin_cache[1].double().chunk(2)
    return rope_probe.read_rotation(out.view_as(x_TDD), torch.atan2(sin_P, cos_P))


def _watched(live: LiveModel, scorer: Scorer, checkpoint: Checkpoint, prompt: int) -> tuple[list[int], tuple[list[int] | None, ...]]:
    """The positions that the engine passes on, and which checkpoint heads the first layer's are, before RoPE. Collective.

    Both are empty where no hook is called.
    """
    seen: list[torch.Tensor] = []
    qkv: list[torch.Tensor] = []
    layer = live.layers[0].self_attn

    def first_heads(*tensors: torch.Tensor) -> None:
        qkv.extend(x[0].view(-1, layer.head_dim).clone() for x in tensors)

    def rotated(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
            seen.append(positions.clone())
            first_heads(query, key)
            return native(positions, query, key)

        return forward

    def attend(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(attn: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            first_heads(value)
            return native(attn, query, key, value, *args, **kwargs)

        return forward

    hooks = [
        Patch(target=layer.rotary_emb, name="forward", make=rotated, pins=(), label="trial: positions, heads"),
        Patch(target=layer.attn.impl, name="forward", make=attend, pins=(), label="trial: heads"),
    ]
    with installed(hooks):
        scorer.request([head_canary.TOKEN] * prompt, new_tokens=_DECODE + 1)
    if not seen:
        return [], ()  # compiled code calls no module by itself
    layers = len(live.layers)  # one shared object: its first call of a step is the first layer's
    shared = all(x.self_attn.rotary_emb is layer.rotary_emb for x in live.layers)
    passed = torch.cat(seen[:: layers if shared else 1]).tolist()
    known = head_canary.of_checkpoint(checkpoint)
    whole = [torch.cat(live.tp.gathered(x)) for x in qkv[:3]]
    return passed, tuple(head_canary.named(x, k) for x, k in zip(whole, known, strict=True))


@contextlib.contextmanager
def _given(live: LiveModel, inputs: Inputs) -> Iterator[_Record]:
    """Every attention layer gets `inputs` in place of its Q, K and V while the context is open, for one request."""
    record = _Record(rows=[[] for _ in live.layers])
    patches: list[Patch] = []
    for i, attn in enumerate(layer.self_attn.attn for layer in live.layers):
        patches += _substituted(attn.impl, inputs, record, i)
    with installed([*patches, *vllm_kernel_calls.hooks(live.layers[0].self_attn.attn.impl, _noted(record, inputs.prompt))]):
        yield record


def _substituted(impl: Any, inputs: Inputs, record: _Record, index: int) -> list[Patch]:
    written = read = 0

    def update(native: Callable[..., Any]) -> Callable[..., Any]:
        def do_kv_cache_update(layer: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal written
            here = slice(written, written + len(key))
            written += len(key)
            return native(layer, inputs.k_THD[here].view_as(key), inputs.v_THD[here].view_as(value), *args, **kwargs)

        return do_kv_cache_update

    def attend(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            nonlocal read
            here = slice(read, read + len(query))
            read += len(query)
            record.running = index
            q, k, v = (x[here] for x in (inputs.q_THD, inputs.k_THD, inputs.v_THD))
            out = native(layer, q.view_as(query), k.view_as(key), v.view_as(value), kv_cache, metadata, output, *args, **kwargs)
            record.rows[index].append(output.view_as(q).clone())
            return out

        return forward

    hooks = [Patch(target=impl, name="forward", make=attend, pins=(), label="trial: attention")]
    if hasattr(impl, "do_kv_cache_update"):
        hooks.append(Patch(target=impl, name="do_kv_cache_update", make=update, pins=(), label="trial: cache"))
    return hooks


def _noted(record: _Record, prompt: int) -> vllm_kernel_calls.Called:
    """Notes each kind of kernel call once a phase, as every layer of a step makes it, and once asks for the LSE beside the output."""
    kernels = record.kernels

    def called(name: str, kwargs: dict[str, Any], native: Callable[..., Any]) -> None:
        query = kwargs.get("q", kwargs.get("query"))
        phase = "prefill" if query is None or len(query) >= prompt else "decode"
        record.ran.setdefault(phase, [Counter() for _ in record.rows])[record.running][name] += 1
        text = f"{name}({', '.join(f'{k}={_word(kwargs[k])}' for k in _FACTS if k in kwargs)})"
        if text not in kernels.setdefault(phase, []):
            kernels[phase].append(text)
        if phase == "prefill" and record.lse is None:
            record.lse = vllm_kernel_calls.exported_lse(name, kwargs, native)

    return called


def _kv_splits(kernels: dict[str, list[str]]) -> str | None:
    """From the calls: FlashAttention is told a number, of which 0 is its own choice; the CPU's plan is made by an environment variable."""
    texts = [text for calls in kernels.values() for text in calls]
    if texts and all(text.startswith("cpu_attention_with_kv_cache") for text in texts):
        import vllm.envs

        return "auto" if vllm.envs.VLLM_CPU_ATTN_SPLIT_KV else "1"
    found = {m[1] for text in texts if (m := re.search(r"num_splits=(\d+)", text))}
    return (found.pop() if found != {"0"} else "auto") if len(found) == 1 else None


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
