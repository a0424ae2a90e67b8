"""Runs that several files of this folder read: each is made once a session, when the first test asks for it."""

from __future__ import annotations

import pytest

from tests.cli_runs import MASK, MID, TP2, Done, run


@pytest.fixture(scope="session")
def attributed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """``probe --attribute`` on mid-qwen3 at TP1."""
    return run("probe", "--attribute", "--ckpt", MID, *MASK, out=tmp_path_factory.mktemp("attributed") / "mid-tp1").exits(0)


@pytest.fixture(scope="session")
def attributed_tp2(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The same at TP2 on both sides."""
    return run("probe", "--attribute", "--ckpt", MID, *MASK, *TP2, out=tmp_path_factory.mktemp("attributed") / "mid-tp2").exits(0)


@pytest.fixture(scope="session")
def attributed_unequal_tp(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Trainer TP2 against rollout TP1, accepted by name."""
    options = ("--trainer-tp", "2", "--waive", "gemm.runtime_flags:tensor_parallel_size", "--oracle", "off", "--max-new-tokens", "8")
    return run("probe", "--attribute", "--ckpt", MID, *MASK, *options, out=tmp_path_factory.mktemp("attributed") / "mid-unequal").exits(0)
