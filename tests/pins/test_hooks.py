"""Hooks go in, count, nest and come out again; probes look on and their numbers add up over ranks."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.assemble.defects import is_defect
from rlmismatch.pins.hooks import OpSwitch, Patch, Probe, Recorder, installed, ulp_distance

Forward = Callable[..., Any]


class Doubling(torch.nn.Module):
    def forward(self, x: int) -> int:
        return 2 * x


def plus(n: int) -> Callable[[Forward], Forward]:
    return lambda native: lambda x: native(x) + n


def patch(target: object, change: Callable[[Forward], Forward], *, name: str = "forward", pins: tuple[str, ...] = ("gemm",)) -> Patch:
    return Patch(target=target, name=name, make=change, pins=pins, label="the hook")


def test_replaces_one_object_and_gives_it_back() -> None:
    one, other = Doubling(), Doubling()
    with installed([patch(one, plus(1))]):
        assert (one(5), other(5)) == (11, 10)
    assert one(5) == 10
    assert "forward" not in vars(one)


def test_gives_back_an_attribute_of_the_instance() -> None:
    module = Doubling()
    own = vars(module)["forward"] = lambda x: -x
    with installed([patch(module, plus(1))]):
        assert module(5) == -4
    assert vars(module)["forward"] is own


def test_replaces_a_global_of_a_python_module() -> None:
    namespace = types.ModuleType("namespace")
    namespace.rotate = lambda x: x  # type: ignore[attr-defined]
    native = namespace.rotate
    with installed([patch(namespace, plus(3), name="rotate")]):
        assert namespace.rotate(1) == 4
    assert namespace.rotate is native


def test_nests_and_restores_the_outer_replacement() -> None:
    module = Doubling()
    with installed([patch(module, plus(1))]):
        with installed([patch(module, plus(100))]):
            assert module(5) == 111
        assert module(5) == 11
    assert module(5) == 10


def test_restores_after_an_error_inside() -> None:
    module = Doubling()
    with pytest.raises(RuntimeError, match="half way"), installed([patch(module, plus(1))]):
        raise RuntimeError("half way")
    assert module(5) == 10


def test_restores_what_went_in_before_a_hook_that_cannot() -> None:
    module = Doubling()

    def broken(native: Forward) -> Forward:
        raise LookupError("no such weight")

    with pytest.raises(LookupError), installed([patch(module, plus(1)), patch(Doubling(), broken)]):
        pass
    assert "forward" not in vars(module)


def test_refuses_one_place_twice_and_a_class() -> None:
    module = Doubling()
    with pytest.raises(ValueError, match="patched twice"), installed([patch(module, plus(1)), patch(module, plus(2))]):
        pass
    with pytest.raises(TypeError, match="cannot patch a type"), installed([patch(Doubling, plus(1))]):
        pass
    with pytest.raises(AttributeError), installed([patch(module, plus(1), name="forwrd")]):
        pass
    assert module(5) == 10


def test_names_the_hook_that_never_ran() -> None:
    called, silent = Doubling(), Doubling()
    quiet = Patch(target=silent, name="forward", make=plus(1), pins=("norm",), label="layers.1.norm")
    with installed([patch(called, plus(1)), quiet]) as counter:
        called(1)
    assert counter.silent() == ("layers.1.norm",)


def run_one(switch: OpSwitch, pin: str = "gemm", **changes: Any) -> torch.Tensor:
    ops: dict[str, Any] = {
        "native": lambda: torch.tensor([[1.0, 2.0]]),
        "pinned": lambda: torch.tensor([[1.0, 2.5]]),
        "exact": lambda: torch.tensor([[1.0, 2.25]], dtype=torch.float64),
    }
    out: torch.Tensor = switch.run(pin, **{**ops, **changes}, parts=lambda y: {"here": y}, split="whole")
    return out


def switch_of(*pins: str, probe: Probe = "none") -> OpSwitch:
    return OpSwitch(active=frozenset(pins), probe=probe, recorder=Recorder())


@pytest.mark.parametrize("probe", ["none", "local", "boundary"])
def test_switch_returns_what_the_arm_says(probe: Probe) -> None:
    on, off = switch_of("gemm", probe=probe), switch_of(probe=probe)
    assert run_one(on)[0, 1] == 2.5
    assert run_one(off)[0, 1] == 2.0
    assert (on.calls["gemm"], off.calls["gemm"]) == (1, 0)


def test_switch_runs_only_what_is_asked_for() -> None:
    def never() -> torch.Tensor:
        raise AssertionError("not asked for")

    assert run_one(switch_of("gemm"), native=never, exact=never)[0, 1] == 2.5
    assert run_one(switch_of(), pinned=never, exact=never)[0, 1] == 2.0
    # The boundary probe must not pay for the float64 reference.
    assert run_one(switch_of("gemm", probe="boundary"), exact=never)[0, 1] == 2.5


def test_switch_runs_each_operation_once_under_a_probe() -> None:
    runs = []

    def native() -> torch.Tensor:
        runs.append("native")
        return torch.ones(1, 2)

    run_one(switch_of(probe="local"), native=native)
    assert runs == ["native"]


def test_switch_counts_every_pin_that_the_result_holds() -> None:
    switch = switch_of("forward_reduce")
    mixed = torch.tensor([[7.0, 7.0]])
    out = switch.run(
        "gemm",
        native=lambda: mixed * 0,
        pinned=lambda: mixed * 0,
        exact=lambda: mixed.double(),
        parts=lambda y: {"here": y},
        split="whole",
        chosen=lambda: mixed,
        also=("forward_reduce",),
    )
    assert torch.equal(out, mixed)
    assert dict(switch.calls) == {"forward_reduce": 1}


def test_hooks_of_an_arm() -> None:
    patches = [patch(Doubling(), plus(1), pins=("gemm",)), patch(Doubling(), plus(1), pins=("norm", "rope"))]
    assert switch_of("rope").hooks(patches) == (patches[1],)
    assert switch_of().hooks(patches) == ()
    assert switch_of(probe="local").hooks(patches) == tuple(patches)


def test_local_error_adds_up_over_calls() -> None:
    switch = switch_of(probe="local")
    for _ in range(3):
        run_one(switch)
    (error,) = switch.recorder.local_errors()
    assert (error.boundary, error.pin, error.rows, error.count, error.unequal) == ("here", "gemm", 3, 6, 3)
    assert (error.native_vs_pin_max, error.native_vs_pin_mean) == (0.5, 0.25)
    assert (error.native_vs_fp64_max, error.pin_vs_fp64_max) == (0.25, 0.25)
    assert (error.native_vs_fp64_mean, error.pin_vs_fp64_mean) == (0.125, 0.125)
    assert error.fp64_scale == 1.625


@pytest.mark.parametrize("first", [True, False])
def test_a_nan_is_unequal_and_wins_the_maximum(first: bool) -> None:
    recorder = Recorder()
    bad, good = torch.tensor([[math.nan]]), torch.tensor([[1.0]])
    for x in (bad, good) if first else (good, bad):
        recorder.observe("here", "gemm", native=x, pinned=x, fp64=x.double(), split="whole")
    (error,) = recorder.local_errors()
    assert (error.count, error.unequal) == (2, 1)
    assert math.isnan(error.native_vs_pin_max)
    assert math.isnan(error.pin_vs_fp64_mean)


def test_nothing_compared_is_no_zero() -> None:
    recorder = Recorder()
    empty = torch.empty(0, 4)
    recorder.observe("here", "gemm", native=empty, pinned=empty, fp64=empty.double(), split="rows")
    (error,) = recorder.local_errors()
    assert error.count == 0
    assert math.isnan(error.native_vs_pin_mean)


@pytest.mark.parametrize("pinned", [torch.ones(1, 3), torch.ones(1, 2, dtype=torch.bfloat16)])
def test_refuses_to_compare_unlike_tensors(pinned: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        Recorder().observe("here", "gemm", native=torch.ones(1, 2), pinned=pinned, fp64=torch.ones(1, 2).double(), split="whole")


def test_keeps_a_copy_and_each_boundary_once() -> None:
    recorder, tensor = Recorder(), torch.ones(2, 2)
    recorder.keep("here", tensor, split="whole")
    tensor.zero_()
    assert torch.equal(recorder.boundaries()["here"], torch.ones(2, 2))
    with pytest.raises(ValueError, match="recorded twice"):
        recorder.keep("here", tensor, split="whole")


def _two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    recorder = Recorder()
    for name, split, shape in (("whole", "whole", (4, 2)), ("columns", "columns", (4, 1 + rank)), ("rows", "rows", (3 - 2 * rank, 2))):
        native = torch.full(shape, float(rank))
        recorder.observe(name, "gemm", native=native, pinned=native + 1 + rank, fp64=native.double(), split=split)  # type: ignore[arg-type]
        recorder.keep(name, native, split=split)  # type: ignore[arg-type]
    wrong = torch.full((4, 2), torch.nan if rank == 1 else 0.0)
    recorder.observe("wrong", "norm", native=wrong, pinned=torch.zeros(4, 2), fp64=torch.zeros(4, 2).double(), split="whole")
    torch.save((recorder.local_errors(group), recorder.boundaries(group)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_merges_over_ranks(tmp_path: Path) -> None:
    mp.spawn(_two_ranks, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    (errors, joined), (errors_1, joined_1) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert repr(errors) == repr(errors_1)  # a NaN is not equal to itself
    whole, columns, rows, wrong = errors
    # The same tensor on every rank counts once, as the worst rank has it.
    assert (whole.rows, whole.count, whole.native_vs_pin_mean, whole.native_vs_pin_max) == (4, 8, 2.0, 2.0)
    assert (wrong.rows, wrong.count, wrong.unequal) == (4, 8, 8)
    assert all(math.isnan(x) for x in (wrong.native_vs_pin_mean, wrong.native_vs_fp64_mean, wrong.native_vs_pin_max))
    assert is_defect(wrong)
    assert (columns.rows, columns.count, columns.native_vs_pin_mean) == (4, 4 + 8, (4 * 1 + 8 * 2) / 12)
    assert (rows.rows, rows.count, rows.native_vs_pin_mean) == (3 + 1, 6 + 2, (6 * 1 + 2 * 2) / 8)
    assert {name: tuple(x.shape) for name, x in joined.items()} == {"whole": (4, 2), "columns": (4, 3), "rows": (4, 2)}
    assert joined["columns"][0].tolist() == [0.0, 1.0, 1.0]
    assert joined_1 == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulps_count_representable_values_across_zero(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    above = torch.nextafter(one.float(), torch.tensor([2.0])) if dtype is torch.float32 else one + torch.finfo(dtype).eps
    tiny = torch.tensor([torch.finfo(dtype).smallest_normal], dtype=dtype)
    assert int(ulp_distance(one, one)) == 0
    assert int(ulp_distance(one, above.to(dtype))) == 1
    assert int(ulp_distance(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))) == 0
    assert int(ulp_distance(tiny, -tiny)) == 2 * int(ulp_distance(tiny, torch.zeros(1, dtype=dtype)))
