"""Attention backends that could stand in for an engine's own, tried on known operands: SDPA, FlashAttention, FlashInfer, TE.

A candidate is judged in each form that it has (full prefill, chunk, pages, decode): does it repeat itself, does a sequence get the same
bits alone and in a batch, and only then how far is it from float64. What cannot run here says why; nothing stands in for it.

R query rows, the last of N tokens; Hq / Hkv heads, D head dim.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from rlmismatch import attention_policies
from rlmismatch.attention_policies import Operands

Form = Literal["full", "chunked", "paged", "decode"]
FORMS: Final[tuple[Form, ...]] = ("full", "chunked", "paged", "decode")
NAMES: Final = ("te", "flash_attn", "flashinfer", "sdpa")
COMPILED: Final = ("flashinfer",)  # when first called on a machine, for each head size and form: minutes
FACTS: Final = ("repeats", "batch_invariant", "largest_error", "mean_error", "mean_size")
_CHUNK: Final = 16  # rows of a chunk
# Of FlashInfer, by the static assertions of its Hopper kernels; vLLM's FlashInfer backend has the same list. Each call with
# another head size would compile for a while, fail, and do it again at the next call.
_FLASHINFER_HEADS: Final = (64, 128, 256)
PAGE: Final = 16  # tokens; FlashAttention's own package wants 256
_BATCH: Final = 3
# Of a library's call; the last two where it compiles or loads something only then.
FAILURES: Final = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, OSError, ImportError)

# Sequences of equal shape -> their outputs [R, Hq, D], each in the dtype of its q.
Attend = Callable[[Form, Sequence[Operands]], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One library here. why_not: why it cannot run at all; lacks: form -> why it does not have it."""

    name: str
    version: str
    attend: Attend
    why_not: str = ""
    lacks: Mapping[Form, str] | None = None


def find(name: str, device: torch.device) -> Candidate:
    """The candidate called `name` as it is installed here."""
    return _FINDERS[name](device)


def missing(name: str, reason: str) -> Candidate:
    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        raise RuntimeError(reason)

    return Candidate(name=name, version="", attend=attend, why_not=reason)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _sdpa(device: torch.device) -> Candidate:
    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        q, k, v = (torch.stack([getattr(x, name) for x in given]).transpose(1, 2) for name in ("q_THD", "k_THD", "v_THD"))
        rows, keys = q.shape[2], k.shape[2]
        mask = None if rows in (1, keys) else torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=rows == keys, scale=given[0].scale, enable_gqa=True
        )
        return list(out.transpose(1, 2))

    lacks: dict[Form, str] = {"paged": "scaled_dot_product_attention reads no block table"}
    return Candidate(name="sdpa", version=f"torch {torch.__version__}", attend=attend, lacks=lacks)


def _flash_attn(device: torch.device) -> Candidate:
    if device.type != "cuda":
        return missing("flash_attn", "FlashAttention needs a GPU")
    if importlib.util.find_spec("flash_attn") is not None:
        return _flash_attn_package()
    if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.vllm_flash_attn") is not None:
        found: Candidate = importlib.import_module("rlmismatch.engines.vllm_flash_attn").candidate()
        return found
    return missing("flash_attn", "flash_attn is not installed here, nor is vLLM's build of it")


def _flash_attn_package() -> Candidate:
    import flash_attn

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        q, k, v = (torch.stack([getattr(x, name) for x in given]) for name in ("q_THD", "k_THD", "v_THD"))
        if form != "paged":
            return list(flash_attn.flash_attn_func(q, k, v, softmax_scale=given[0].scale, causal=True))
        k_cache, v_cache, table = pages(given, 256)
        lengths = torch.full((len(given),), k.shape[1], dtype=torch.int32, device=q.device)
        out = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, softmax_scale=given[0].scale, causal=True
        )
        return list(out)

    return Candidate(name="flash_attn", version=f"flash_attn {version_of('flash_attn')}", attend=attend)


def _flashinfer(device: torch.device) -> Candidate:
    if device.type != "cuda":
        return missing("flashinfer", "FlashInfer needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        return missing("flashinfer", "flashinfer is not installed here")
    import flashinfer

    @functools.cache
    def workspace() -> torch.Tensor:
        return torch.empty(128 << 20, dtype=torch.uint8, device=device)

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        rows, keys = len(given[0].q_THD), len(given[0].k_THD)
        (heads, dim), kv_heads = given[0].q_THD.shape[1:], given[0].k_THD.shape[1]
        if dim not in _FLASHINFER_HEADS:
            raise ValueError(f"no kernel for heads of {dim}; it has {', '.join(map(str, _FLASHINFER_HEADS))}")
        q = torch.cat([x.q_THD for x in given])
        starts = {n: torch.arange(len(given) + 1, dtype=torch.int32, device=device) * n for n in (rows, keys)}
        asked: dict[str, Any] = {"causal": True, "sm_scale": given[0].scale, "q_data_type": q.dtype}
        if form == "paged":
            k_cache, v_cache, table = pages(given, PAGE)
            each = table.shape[1]
            indptr = torch.arange(len(given) + 1, dtype=torch.int32, device=device) * each
            last = torch.full((len(given),), (keys - 1) % PAGE + 1, dtype=torch.int32, device=device)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
            wrapper.plan(starts[rows], indptr, table.flatten(), last, heads, kv_heads, dim, PAGE, **asked)
            return list(wrapper.run(q, (k_cache, v_cache)).split(rows))
        k, v = (torch.cat([getattr(x, name) for x in given]) for name in ("k_THD", "v_THD"))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(starts[rows], starts[keys], heads, kv_heads, dim, **asked)
        return list(wrapper.run(q, k, v).split(rows))

    return Candidate(name="flashinfer", version=f"flashinfer {version_of('flashinfer-python')}", attend=attend)


def _te(device: torch.device) -> Candidate:
    if device.type != "cuda":
        return missing("te", "Transformer Engine needs a GPU")
    if importlib.util.find_spec("transformer_engine") is None:
        return missing("te", "transformer_engine is not installed here")
    try:
        from transformer_engine.pytorch import DotProductAttention
    except (ImportError, OSError, RuntimeError) as error:
        return missing("te", f"transformer_engine does not import here: {error}")

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        q, k, v = (torch.stack([getattr(x, name) for x in given]) for name in ("q_THD", "k_THD", "v_THD"))
        core = DotProductAttention(
            num_attention_heads=q.shape[2],
            kv_channels=q.shape[3],
            num_gqa_groups=k.shape[2],
            qkv_format="bshd",
            attn_mask_type="causal" if form == "full" else "causal_bottom_right",
            softmax_scale=given[0].scale,
        ).eval()
        out = core(q.contiguous(), k.contiguous(), v.contiguous())
        return list(out.view(*q.shape))

    lacks: dict[Form, str] = {"paged": "DotProductAttention reads pages only of a cache of its own (InferenceParams)"}
    return Candidate(name="te", version=f"transformer_engine {version_of('transformer_engine')}", attend=attend, lacks=lacks)


_FINDERS: Final[Mapping[str, Callable[[torch.device], Candidate]]] = {
    "te": _te,
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
    "sdpa": _sdpa,
}


def pages(given: Sequence[Operands], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(K, V, block table) of all sequences in one cache [pages, size, Hkv, D] whose pages stand in reverse; the rest of a page is 0."""
    keys = len(given[0].k_THD)
    each = -(-keys // size)
    caches = []
    for name in ("k_THD", "v_THD"):
        rows = torch.stack([getattr(x, name) for x in given])
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, each * size - keys))
        caches.append(padded.view(-1, size, *rows.shape[2:]).flip(0).contiguous())
    table = torch.arange(len(given) * each, device=caches[0].device, dtype=torch.int32).flip(0).view(len(given), each)
    return caches[0], caches[1], table.contiguous()


def splitting_by_load(candidate: Candidate) -> Candidate:
    """The fault auto_split_under_invariance_claim: a decode step is cut into two KV splits where a batch has room for one only."""

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        if form != "decode" or len(given) > 1:
            return candidate.attend(form, given)
        (one,) = given
        parts = attention_policies.partials(one, attention_policies.even_bounds(len(one.k_THD), 2))
        # Each split's output is written in the model dtype, as split-KV kernels with a low-precision workspace do.
        rounded = [replace(part, out_HTD=part.out_HTD.to(one.q_THD.dtype).float()) for part in parts]
        return [attention_policies.merge(rounded).transpose(0, 1).to(one.q_THD.dtype)]

    return replace(candidate, attend=attend)


def rows_of(form: Form, given: Operands) -> Operands:
    """The part of a sequence that `form` computes at once: all rows, the last chunk, or the last row."""
    rows = {"full": len(given.q_THD), "chunked": _CHUNK, "paged": _CHUNK, "decode": 1}[form]
    return replace(given, q_THD=given.q_THD[-rows:].contiguous(), out_THD=None)


def trial(candidate: Candidate, form: Form, given: Operands) -> torch.Tensor:
    """float64 [5]: FACTS of `candidate` in one form on one sequence. Raises what the candidate raises."""
    asked = rows_of(form, given)
    others = [_another(asked, shift) for shift in range(1, _BATCH)]
    with torch.no_grad():
        first, again = (candidate.attend(form, [asked])[0].clone() for _ in range(2))
        batched = candidate.attend(form, [asked, *others])[0].clone()
    truth = attention_policies.exact(asked)
    error = (first.double() - truth).abs()
    exactly = [float(torch.equal(first, other)) for other in (again, batched)]
    return torch.tensor([*exactly, float(error.max()), float(error.mean()), float(truth.abs().mean())], dtype=torch.float64)


def _another(given: Operands, shift: int) -> Operands:
    """Another sequence of the same shape."""
    q, k, v = (x.roll(shift, dims=0).flip(-1).contiguous() for x in (given.q_THD, given.k_THD, given.v_THD))
    return replace(given, q_THD=q, k_THD=k, v_THD=v)


def synthetic(device: torch.device, dtype: torch.dtype) -> dict[str, Operands]:
    """Normal numbers in shapes of common models: grouped heads, and one key/value head for all. Larger ones on a GPU."""
    shapes = {"200 tokens, 8/2 heads of 64": (200, 8, 2, 64), "130 tokens, 4/1 heads of 128": (130, 4, 1, 128)}
    if device.type == "cuda":
        shapes["1024 tokens, 32/8 heads of 128"] = (1024, 32, 8, 128)
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, (tokens, heads, kv_heads, dim) in shapes.items():
        q, k, v = (torch.randn(tokens, n, dim, generator=generator).to(device, dtype) for n in (heads, kv_heads, kv_heads))
        out[name] = Operands(q_THD=q, k_THD=k, v_THD=v, scale=dim**-0.5)
    return out


def measure(candidates: Sequence[Candidate], given: Mapping[str, Operands]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """``backend/NAME/FORM/SHAPE`` -> FACTS of every candidate that runs, in every form that it has; and why others have none."""
    tensors: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    for candidate in candidates:
        if candidate.why_not:
            continue
        for form in FORMS:
            if form in (candidate.lacks or {}):
                continue
            for shape, operands in given.items():
                try:
                    tensors[f"backend/{candidate.name}/{form}/{shape}"] = trial(candidate, form, operands)
                except FAILURES as error:
                    notes.append(f"backend candidate {candidate.name}, {form}, {shape}: {first_line(error)}")
    return tensors, notes


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def capability(candidate: Candidate, device: torch.device, dtype: torch.dtype) -> str:
    """What the candidate can promise, in the contract's words, from trials on synthetic operands."""
    found: dict[Form, torch.Tensor] = {}
    given = next(iter(synthetic(device, dtype).values()))
    for form in FORMS:
        if form not in (candidate.lacks or {}):
            try:
                found[form] = trial(candidate, form, given)
            except FAILURES:
                continue
    if not found:
        return "no form"
    facts = torch.stack(list(found.values())).amin(0)
    repeats = "repeatable" if facts[0] == 1.0 else "not repeatable"
    invariant = "batch invariant" if facts[1] == 1.0 else "not batch invariant"
    return f"{', '.join(found)}; {repeats}; {invariant}"
