"""One rounding, the tree, and the choice of the implementation."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rlmismatch.kernels
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.kernels import gemm, reduce
from rlmismatch.kernels.common.rounding import round_once
from rlmismatch.kernels.common.tree import pairwise_tree
from tests.kernels.conftest import DEVICE, OPS

_PACKAGE = Path(rlmismatch.kernels.__path__[0])


def test_round_once_sees_what_is_behind_float32() -> None:
    tie = 1 + 2.0**-8  # between the bfloat16 neighbours 1 and 1 + 2^-7
    x = torch.tensor([tie, tie + 2.0**-30, tie - 2.0**-30, -tie - 2.0**-30], dtype=torch.float64)
    assert round_once(x, torch.bfloat16).tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]
    assert x.to(torch.bfloat16).tolist() == [1.0, 1.0, 1.0, -1.0]  # torch rounds twice: the reason for the function


def test_round_once_is_to_nearest_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-30, 20, (20000,), generator=generator)
    x = torch.randn(20000, generator=generator, dtype=torch.float64) * 2.0**exponent
    near_tie = x.to(dtype).double() * (1 + torch.finfo(dtype).eps / 2)
    x = torch.cat([x, near_tie, near_tie * (1 + 2.0**-40)])
    rounded = round_once(x, dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for step in (-1, 1):
        neighbour = (rounded.view(bits) + step).view(dtype)
        finite = torch.isfinite(neighbour) & torch.isfinite(rounded) & (rounded != 0)
        mine, other = (rounded.double() - x).abs()[finite], (neighbour.double() - x).abs()[finite]
        even = (rounded.view(bits)[finite] & 1) == 0
        assert ((mine < other) | ((mine == other) & even)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e300, -1e300, 5e-324])
def test_round_once_keeps_special_values(value: float, dtype: torch.dtype) -> None:
    x = torch.tensor([value], dtype=torch.float64)
    expected = x.float().to(dtype)
    actual = round_once(x, dtype)
    assert torch.equal(torch.signbit(actual), torch.signbit(expected)) or value != value
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_round_once_takes_float64_alone() -> None:
    with pytest.raises(ValueError, match="float64"):
        round_once(torch.zeros(1), torch.bfloat16)


@pytest.mark.parametrize(
    ("parts", "order"), [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (6, "(((0+1)+(2+3))+(4+5))"), (8, "(((0+1)+(2+3))+((4+5)+(6+7)))")]
)
def test_tree_order_is_frozen(parts: int, order: str) -> None:
    assert pairwise_tree([str(i) for i in range(parts)], lambda a, b: f"({a}+{b})") == order


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tree_of_subtrees_is_the_tree(ranks: int) -> None:
    def add(a: str, b: str) -> str:
        return f"({a}+{b})"

    parts = [str(i) for i in range(8)]
    per_rank = 8 // ranks
    subtrees = [pairwise_tree(parts[r * per_rank : (r + 1) * per_rank], add) for r in range(ranks)]
    assert pairwise_tree(subtrees, add) == pairwise_tree(parts, add)


def test_tree_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        pairwise_tree([], lambda a, b: a)


def test_unknown_impl_is_refused() -> None:
    with pytest.raises(UsageError, match="cublas") as error:
        gemm.linear(torch.zeros(1, 16), torch.zeros(1, 16), impl="cublas")  # type: ignore[arg-type]
    assert error.value.slug == "kernel-impl-unknown"


def test_operands_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="different devices"):
        reduce.fold([torch.zeros(1), torch.zeros(1, device="meta")], impl="reference", out_dtype=torch.float32)


def test_triton_refuses_to_drop_a_gradient(randn: Callable[..., torch.Tensor]) -> None:
    x, weight = randn(2, 16).requires_grad_(), randn(3, 16)
    with pytest.raises(EnvironmentUnfitError) as error:
        gemm.linear(x, weight, impl="triton")
    assert error.value.slug == "triton-forward-only"
    with torch.no_grad():
        assert gemm.linear(x, weight, impl="triton").shape == (2, 3)


def test_triton_missing_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch, randn: Callable[..., torch.Tensor]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError) as error:
        gemm.linear(randn(1, 16), randn(1, 16), impl="triton")
    assert error.value.slug == "triton-missing"


@pytest.mark.skipif(DEVICE != "cpu", reason="looks at the interpreter, which runs where there is no GPU")
def test_interpreter_refuses_gpu_tensors() -> None:
    from rlmismatch.kernels.common import dispatch

    with pytest.raises(EnvironmentUnfitError) as error:
        dispatch.implementation("gemm", "triton", torch.zeros(1, device="meta"))
    assert error.value.slug == "triton-interpreter-on-gpu"


def test_cpu_without_interpreter_is_an_error_and_reference_needs_no_triton() -> None:
    code = (
        "import sys, torch\n"
        "from rlmismatch.kernels import attention, gemm, logprob, norm, reduce, rope, swiglu\n"
        "from rlmismatch.errors import EnvironmentUnfitError\n"
        "x = torch.ones(1, 16)\n"
        "gemm.linear(x, x, impl='reference')\n"
        "assert 'triton' not in sys.modules\n"
        "try:\n"
        "    gemm.linear(x, x, impl='triton')\n"
        "except EnvironmentUnfitError as error:\n"
        "    print(error.slug, error.hint)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=_PACKAGE.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("triton-needs-interpreter set TRITON_INTERPRET=1")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("module", ["reference", "triton"])
def test_reference_and_kernel_do_not_know_each_other(op: str, module: str) -> None:
    tree = ast.parse((_PACKAGE / op / f"{module}.py").read_text())
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    other = "triton" if module == "reference" else "reference"
    assert not [name for name in imported if other in name.split(".") and name.startswith("rlmismatch")]
    assert module == "triton" or "triton" not in imported


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_states_its_order_first(op: str) -> None:
    tree = ast.parse((_PACKAGE / op / "triton.py").read_text())
    kernels = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel")]
    assert kernels
    for kernel in kernels:
        assert (ast.get_docstring(kernel) or "").startswith("Order: "), kernel.name
