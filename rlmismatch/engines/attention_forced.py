"""One side's attention by another backend, in one arm: what the choice of a backend alone moves in the log-probs.

A backend is forced by replacing the live attention of every layer with it. Only what ran on operands of the model's own shape before is
forced, so that no arm breaks on it; the rest says why it cannot run here.

S sequences; R query rows, the last of N tokens; Hq / Hkv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlmismatch.attention_policies import Operands
from rlmismatch.engines import attention_candidates
from rlmismatch.engines.attention_candidates import Candidate, Form
from rlmismatch.engines.logprob_knobs import Outcome, applied, outcome
from rlmismatch.engines.protocol import Arm

SETTING: Final = "attention.forced_backend"
FORMS: Final[tuple[Form, ...]] = ("full", "chunked", "decode")
_SDPA: Final = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_TOKENS: Final = 24  # of the trial before a backend is forced


@dataclass(frozen=True, kw_only=True)
class Shape:
    """This rank's heads, as its attention sees them."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Calls:
    """How often the backend that is forced was called."""

    count: int = 0


def asked(arm: Arm) -> str | None:
    """The backend that `arm` forces, or None."""
    name = arm.settings.get(SETTING)
    return None if name is None else str(name)


def names(device: torch.device) -> tuple[str, ...]:
    """Every backend that this module knows for a device."""
    return (*_SDPA, *(() if device.type == "cpu" else ("te", "flash_attn", "flashinfer")))


def find(name: str, device: torch.device) -> Candidate:
    """The backend called `name`."""
    return _one_sdpa(name, device) if name in _SDPA else attention_candidates.find(name, device)


def facts(shape: Shape) -> dict[str, str]:
    """Name -> version of each backend that can be forced here, or why it cannot. JSON for the side's provenance."""
    return {name: _tried(find(name, shape.device), shape) for name in names(shape.device)}


def _tried(candidate: Candidate, shape: Shape) -> str:
    if candidate.why_not:
        return f"not run: {candidate.why_not}"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(_TOKENS, n, shape.dim, generator=generator).to(shape.device, shape.dtype)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    given = Operands(q_THD=q, k_THD=k, v_THD=v, scale=shape.dim**-0.5)
    try:
        with torch.no_grad():
            for form in FORMS:
                candidate.attend(form, [attention_candidates.rows_of(form, given)])
    except attention_candidates.FAILURES as error:
        return f"not run: {attention_candidates.first_line(error)}"
    return candidate.version


def _one_sdpa(name: str, device: torch.device) -> Candidate:
    """scaled_dot_product_attention with one of its kernels and no other; K and V are repeated, as not every kernel takes groups."""

    def attend(form: Form, given: Sequence[Operands]) -> list[torch.Tensor]:
        out = []
        for x in given:
            group = x.q_THD.shape[1] // x.k_THD.shape[1]
            q, k, v = (t.transpose(0, 1)[None] for t in (x.q_THD, x.k_THD.repeat_interleave(group, 1), x.v_THD.repeat_interleave(group, 1)))
            rows, keys = len(x.q_THD), len(x.k_THD)
            mask = None if rows in (1, keys) else torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
            with sdpa_kernel([_SDPA[name]]):
                found = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None and rows == keys, scale=x.scale
                )
            out.append(found[0].transpose(0, 1))
        return out

    missing = "torch has this kernel for GPUs alone" if name == "sdpa_efficient" and device.type == "cpu" else ""
    return Candidate(name=name, version=f"torch {torch.__version__}", attend=attend, why_not=missing)


def attend(candidate: Candidate, calls: Calls, given: Operands) -> torch.Tensor:
    """[R, Hq, D] of one sequence in its dtype, in the form that its rows make."""
    rows = len(given.q_THD)
    form: Form = "full" if rows == len(given.k_THD) else "decode" if rows == 1 else "chunked"
    calls.count += 1
    return candidate.attend(form, [given])[0]


def came_of(name: str, calls: Calls) -> Outcome:
    """The outcome of the setting behind the arm."""
    if calls.count:
        return applied(name, f"{calls.count} calls")
    return outcome(name, None, "fell_back", "it was never called")


def trainer_forward(candidate: Candidate, calls: Calls) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The replacement of Megatron's core attention: [s, B = 1, heads, D] -> [s, 1, Hq * D]."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            q, k, v = (x[:, 0] for x in (query, key, value))
            out_SHD = attend(candidate, calls, Operands(q_THD=q, k_THD=k, v_THD=v, scale=float(q.shape[-1] ** -0.5)))
            return out_SHD.flatten(1)[:, None].contiguous()

        return forward

    return make
