"""Runs a function on several gloo ranks of this machine and returns what each of them returned."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmismatch.pins.collectives import TpGroup


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(tp, *args)`` on ranks 0 .. size - 1; results in rank order. An error on any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(size, folder, function, args), nprocs=size)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    torch.save(function(TpGroup(group=group, size=size, rank=rank), *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
