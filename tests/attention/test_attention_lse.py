"""An exported LSE is named by its slope and its axes, against a log-sum-exp written out on its own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlmismatch import attention_policies
from rlmismatch.assemble import attention_lse as report
from rlmismatch.attention_policies import Operands, Partial
from rlmismatch.engines import attention_lse, attention_merges

HEADS, KV_HEADS, TOKENS, DIM, SCALE = 4, 2, 6, 8, 0.3


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, HEADS, DIM, generator=generator), torch.randn(TOKENS, KV_HEADS, DIM, generator=generator)


def truth() -> torch.Tensor:
    q, k = operands()
    out = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for h in range(HEADS):
        for t in range(TOKENS):
            scores = [SCALE * float(q[t, h].double() @ k[n, h // 2].double()) for n in range(t + 1)]
            out[h, t] = math.log(sum(map(math.exp, scores)))
    return out


def test_the_exact_one_is_the_formula() -> None:
    assert torch.allclose(attention_lse.exact(*operands(), SCALE), truth(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("base", "factor"), [("e", 1.0), ("2", 1 / math.log(2))])
@pytest.mark.parametrize("shape", ["[head, token]", "[token, head]"])
def test_base_and_axes(base: str, factor: float, shape: str) -> None:
    live = (truth() * factor).float()
    found = attention_lse.diagnose(live if shape == "[head, token]" else live.T, truth())
    assert (found.base, found.shape, found.domain, found.masked_row) == (base, shape, "attention scores", None)
    assert found.slope == pytest.approx(factor, rel=1e-5)
    assert found.worst_nats < 1e-5


def test_rows_that_see_nothing_are_told_apart() -> None:
    exact_HT, live_HT = truth(), truth().float()
    exact_HT[:, 0] = -torch.inf
    live_HT[:, 0] = 0.0
    assert attention_lse.diagnose(live_HT, exact_HT).masked_row == "0.0"
    live_HT[:, 0] = -torch.inf
    assert attention_lse.diagnose(live_HT, exact_HT).masked_row == "-inf"


def test_the_lse_of_something_else_fits_nothing() -> None:
    found = attention_lse.diagnose(torch.randn(HEADS, TOKENS, generator=torch.Generator().manual_seed(1)) + 10, truth())
    assert (found.base, found.shape, found.domain) == (None, None, None)


def test_nothing_is_fitted_to_other_sizes() -> None:
    with pytest.raises(ValueError, match="either order"):
        attention_lse.diagnose(torch.zeros(HEADS, TOKENS + 1), truth())


def merges_of(factor: float) -> tuple[list[list[Partial]], torch.Tensor, torch.Tensor]:
    """What a merge of two splits is handed in a prefill and in the decode step behind it, each LSE times `factor`."""
    q, k, _ = attention_merges.trial_operands(TOKENS + 1, HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    seen = []
    for rows, end in ((slice(0, TOKENS), TOKENS), (slice(TOKENS, TOKENS + 1), TOKENS + 1)):
        given = Operands(q_THD=q[rows], k_THD=k[:end], v_THD=k[:end], scale=SCALE)
        parts = attention_policies.partials(given, [0, 4, end])
        with attention_merges.consumed() as merges:
            attention_policies.merge([dataclasses.replace(p, lse_HT=p.lse_HT * factor) for p in parts])
        seen += merges
    return [list(parts) for parts in seen], q, k


def test_the_base_of_what_a_merge_takes_is_read() -> None:
    said = {}
    for name, factor in (("e", 1.0), ("2", 1 / math.log(2)), ("neither", 1.2)):
        found = attention_merges.diagnose_merges(*merges_of(factor), SCALE)
        fields = attention_merges.fields(found, "nothing matters", "trial")
        said[name] = {field: (r.evidence.value, r.value) for field, r in fields.items() if r.evidence.value != "not_applicable"}
    assert said["e"] == {}
    assert said["2"] == {"lse_base": ("read", "2")}
    assert said["neither"] == dict.fromkeys(("lse_domain", "lse_base", "lse_shape"), ("unknown", None))


def test_without_a_merge_no_convention_matters() -> None:
    assert attention_merges.diagnose_merges([], *operands(), SCALE) is None
    assert {r.evidence.value for r in attention_merges.fields(None, "no merge", "trial").values()} == {"not_applicable"}


def exports(factor: float, masked: float) -> dict[str, torch.Tensor]:
    q, k = operands()
    lse_TH = (truth() * factor).float().T
    return {"layers.0.q": q, "layers.0.k": k, "lse/pin/layers.0": lse_TH, "lse/pin/masked": torch.tensor(masked)}


@pytest.mark.parametrize(("factor", "offset", "ok"), [(1.0, 0.0, True), (1.0, 1e-3, False), (1.1, 0.0, False)])
def test_our_own_lse_has_a_limit(factor: float, offset: float, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_exact", lambda *_: truth() + offset)  # the operands of this file have a scale of their own
    native, ours = report.of_side("trainer", exports(factor, -math.inf))
    assert (native.value, native.note.partition(":")[0]) == (None, "not applicable")
    assert ours.ok is ok
    assert "a row that sees nothing: -inf" in ours.note
