"""Flags of a process flipped in turn: each reads back as flipped and as before, and what it moves is counted against a floor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmismatch.arms import GEMM
from rlmismatch.assemble import flips as assembled
from rlmismatch.engines import gemm_flags, gemm_flips
from rlmismatch.engines.gemm_facts import NOT_FLIPPED, FlagFacts, unpacked
from rlmismatch.engines.gemm_flips import Flag, flipped
from rlmismatch.engines.protocol import SideConfig

M, K, N = 20, 16, 6
FLAGS = {flag.name: flag for flag in gemm_flips.live_flags("cpu")}


def float32_state() -> tuple[Any, ...]:
    matmul, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return gemm_flags.matmul_precision_reading().value, matmul.fp32_precision, onednn.fp32_precision


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_reads_back_as_flipped_and_is_put_back_after_an_error_too(name: str) -> None:
    flag, state = FLAGS[name], float32_state()
    with flipped(flag) as (before, after):
        assert after != before
        with flipped(flag) as (inner, again):  # nested
            assert inner == after != again
        assert flag.live() == after
    with pytest.raises(ZeroDivisionError), flipped(flag):
        _ = 1 / 0
    assert (flag.live(), float32_state()) == (before, state)


def test_the_newer_tf32_switch_is_put_back_too() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with flipped(FLAGS["tf32"]) as words:
            assert words == ("on", "off")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def switch(*, sticks: bool = False, holds: bool = True) -> tuple[Flag, Callable[[], bool]]:
    """A flag that stays flipped, or never is, if asked to; and how a product sees it."""
    state = SimpleNamespace(on=False)

    @contextlib.contextmanager
    def flip() -> Iterator[None]:
        state.on = holds
        yield
        state.on = sticks

    return Flag(name="switch", live=lambda: "on" if state.on else "off", flip=flip), lambda: state.on


def facts(flag: Flag, product: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, FlagFacts]:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    found = unpacked(gemm_flips.facts("layers.3.qkv", product, x, product(x).double(), [flag]), "flag", FlagFacts)
    assert {key[:4] for key in found} == {("switch", "off", "on", "layers.3.qkv")}
    return {key[4]: f for key, f in found.items()}


def test_what_a_flag_moves_is_counted_at_each_row_count() -> None:
    flag, on = switch()
    found = facts(flag, lambda x: x[:, :N] * (2 if on() and len(x) > 8 else 1))  # as a library that splits K at some row counts
    assert set(found) == {"8", "20"}
    assert (found["8"].count, found["8"].unequal, found["8"].difference) == (8 * N, 0, 0)
    many = found["20"]
    assert (many.count, many.unequal, many.unequal_floor, many.unequal_after, many.native_error) == (M * N, M * N, 0, 0, 0)
    assert many.difference == many.flipped_error == pytest.approx(many.scale)


def test_a_product_that_does_not_repeat_itself_is_the_floor() -> None:
    flag, _ = switch()
    calls = iter(range(1000))
    found = facts(flag, lambda x: x[:, :N] + next(calls))
    assert found["8"].unequal_floor == found["8"].unequal == found["8"].count


def test_a_flag_that_does_not_turn_or_does_not_come_back_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="was flipped, and still reads off"):
        facts(switch(holds=False)[0], lambda x: x)
    with pytest.raises(RuntimeError, match="was off before it was flipped, and is on after"):
        facts(switch(sticks=True)[0], lambda x: x)


def test_a_flag_that_this_torch_cannot_turn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good, unmoved = switch()[0], switch(holds=False)[0]

    def raising() -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("no such backend\nand more")

    flags = [
        dataclasses.replace(good, name="good"),
        dataclasses.replace(unmoved, name="unmoved"),
        dataclasses.replace(good, name="raising", flip=raising),
    ]
    monkeypatch.setattr(gemm_flips, "_known", lambda device: flags)
    assert [flag.name for flag in gemm_flips.live_flags("cpu")] == ["good"]
    config = SideConfig(side="rollout", engine="vllm", ckpt="x", device="cpu")
    refused = gemm_flips.refused(config)
    assert (refused["unmoved"], refused["raising"]) == ("it still reads off when it is flipped", "RuntimeError: no such backend")
    assert "good" not in refused
    monkeypatch.setattr(gemm_flips, "_known", lambda device: [switch(sticks=True)[0]])
    with pytest.raises(gemm_flips.NotPutBackError):
        gemm_flips.live_flags("cpu")


def test_a_process_that_cannot_take_deterministic_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cuda = SideConfig(side="rollout", engine="vllm", ckpt="x", device="cuda")
    assert "CUBLAS_WORKSPACE_CONFIG" in gemm_flips.refused(cuda)["deterministic_algorithms"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert "deterministic_algorithms" not in gemm_flips.refused(cuda)
    assert "deterministic_algorithms" in FLAGS


def book(product: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    """Captures of a trainer whose two products see the flag as `product` does, and whose mode cannot be flipped."""
    flag, on = switch()
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, torch.Tensor] = {}
    for name in ("layers.0.qkv", "layers.0.down_proj"):
        moves = name.endswith("qkv")
        tensors |= gemm_flips.facts(name, lambda x, moves=moves: product(x, on() and moves), x, x.double(), [flag])  # type: ignore[misc]
    arm = SimpleNamespace(boundaries=tensors, notes=[f"{NOT_FLIPPED}mode: read when it starts", "another note"])
    return SimpleNamespace(arms={"trainer": {GEMM: arm}, "rollout": {}})


def test_the_measures_name_the_worst_flag_what_it_moves_and_what_cannot_be_flipped() -> None:
    captures = book(lambda x, on: x * (1 + on))
    rows = assembled.measures(SimpleNamespace(), captures)  # type: ignore[arg-type]
    assert [(r.side, r.what, r.value) for r in rows] == [
        ("", "elements that the worst flipped flag moves", 50.0),
        ("", "elements that move with no flag flipped", 0.0),
        ("trainer", "flipped: switch off → on", 50.0),
        ("trainer", "flipped: switch off → on, qkv", 100.0),
        ("trainer", "flipped: switch off → on, down_proj", 0.0),
        ("trainer", "not flipped: mode", None),
    ]
    assert rows[0].note == "trainer, switch off → on"
    assert "448 of 896 elements in 2 products at M = 8 and 20; floor 0; moved by 0.5" in rows[2].note
    assert rows[-1].note == "read when it starts"
    (control,) = assembled.controls(captures)
    assert (control.ok, control.got) == (True, "1 flags read back; 0 elements of products differ")


def test_a_product_that_stays_moved_is_a_control_that_failed() -> None:
    seen: list[bool] = []

    def product(x: torch.Tensor, on: bool) -> torch.Tensor:
        seen.append(on)
        return x * (1 + any(seen))

    (control,) = assembled.controls(book(product))
    assert not control.ok


def test_nothing_flipped_has_no_row() -> None:
    empty = SimpleNamespace(arms={"trainer": {}, "rollout": {}})
    assert assembled.measures(SimpleNamespace(), empty) == ()  # type: ignore[arg-type]
    assert assembled.controls(empty) == ()  # type: ignore[arg-type]
