"""A sink on request: what is refused, and that the oracle's attention has it."""

from __future__ import annotations

import types

import pytest
import torch

from rlmismatch.engines import attention_sinks
from rlmismatch.engines.oracle import _exact_attention
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import UsageError


def config(sink: str | None = "1.5", **changed: object) -> SideConfig:
    knobs = {} if sink is None else {attention_sinks.KNOB: sink}
    return SideConfig(side="trainer", engine="megatron", ckpt="x", **{"knobs": knobs, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(("sink", "logit"), [(None, None), ("0", 0.0), ("1.5", 1.5), ("0.3", 0.30078125)])
def test_a_sink_is_what_the_models_dtype_holds(sink: str | None, logit: float | None) -> None:
    attention_sinks.check(config(sink))
    assert attention_sinks.asked(config(sink)) == attention_sinks.given(config(sink)) == logit


def test_a_dropped_sink_is_asked_for_and_not_given() -> None:
    planted = config(plants=("sink_dropped",))
    assert (attention_sinks.asked(planted), attention_sinks.given(planted)) == (1.5, None)
    assert attention_sinks.why_not_dropped(planted, None) is None
    assert attention_sinks.why_not_dropped(config(None), None) == "there is no sink to drop; use --sink"


@pytest.mark.parametrize("sink", ["-1", "5", "nan", "inf"])
def test_a_sink_that_no_trial_could_see_is_refused(sink: str) -> None:
    with pytest.raises(UsageError) as error:
        attention_sinks.check(config(sink))
    assert error.value.slug == "sink-out-of-range"


@pytest.mark.parametrize(
    "changed", [{"cp": 2}, {"trainer_spec": "te"}, {"grads": True}, {"knobs": {attention_sinks.KNOB: "1", "attention.accum_dtype": "bf16"}}]
)
def test_a_sink_has_no_place_everywhere(changed: dict[str, object]) -> None:
    with pytest.raises(UsageError) as error:
        attention_sinks.check(config(**changed))
    assert error.value.slug == "sink-not-built"


def test_the_oracles_attention_has_the_sink() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator).double() for heads in (4, 2, 2))
    out, _ = _exact_attention(types.SimpleNamespace(num_key_value_groups=2), q, k, v, None, scaling=0.3, sink=1.5)
    for h in range(4):
        for t in range(5):
            weights = torch.tensor([float(0.3 * q[0, h, t] @ k[0, h // 2, n]) for n in range(t + 1)], dtype=torch.float64).exp()
            want = weights @ v[0, h // 2, : t + 1] / (weights.sum() + torch.tensor(1.5).double().exp())
            assert torch.allclose(out[0, t, h], want, rtol=0, atol=1e-12)
