"""A backend that is forced computes attention, and what cannot run here says why."""

from __future__ import annotations

import pytest
import torch

from rlmismatch import attention_policies
from rlmismatch.attention_policies import Operands
from rlmismatch.engines import attention_forced
from rlmismatch.engines.attention_forced import Calls, Shape
from rlmismatch.engines.protocol import Arm

CPU = torch.device("cpu")
SHAPE = Shape(heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16, device=CPU)


def operands(rows: int, keys: int) -> Operands:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, heads, 16, generator=generator) for n, heads in ((rows, 4), (keys, 2), (keys, 2)))
    return Operands(q_THD=q, k_THD=k, v_THD=v, scale=0.25)


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("rows", [20, 7, 1], ids=["full", "chunked", "decode"])
def test_a_forced_backend_is_attention_in_every_form(name: str, rows: int) -> None:
    given, calls = operands(rows, 20), Calls()
    out = attention_forced.attend(attention_forced.find(name, CPU), calls, given)
    assert torch.allclose(out.double(), attention_policies.exact(given), rtol=0, atol=1e-5)
    assert attention_forced.came_of(name, calls)["status"] == "applied"


def test_the_trainers_layout() -> None:
    given, calls = operands(20, 20), Calls()
    make = attention_forced.trainer_forward(attention_forced.find("sdpa_math", CPU), calls)
    out = make(lambda *_: None)(*(x[:, None] for x in (given.q_THD, given.k_THD, given.v_THD)), None)
    assert out.shape == (20, 1, 64)
    assert torch.allclose(out.view(20, 4, 16).double(), attention_policies.exact(given), rtol=0, atol=1e-5)


def test_what_was_never_called_is_no_pass() -> None:
    assert attention_forced.came_of("sdpa_math", Calls())["status"] == "fell_back"


def test_what_cannot_run_here_says_why() -> None:
    found = attention_forced.facts(SHAPE)
    assert list(found) == ["sdpa_math", "sdpa_flash", "sdpa_efficient"]
    assert found["sdpa_efficient"] == "not run: torch has this kernel for GPUs alone"
    assert not any(found[name].startswith("not run") for name in ("sdpa_math", "sdpa_flash"))


def test_an_arm_says_which_backend_it_forces() -> None:
    assert attention_forced.asked(Arm(id="native")) is None
    assert attention_forced.asked(Arm(id="backend=x", settings={attention_forced.SETTING: "x"})) == "x"
