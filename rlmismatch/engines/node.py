"""The worker processes that one driver starts: their environment, their logs, and their end, group by group."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from rlmismatch.engines.protocol import SideConfig, SideName
from rlmismatch.engines.worker import WorkerConfig
from rlmismatch.errors import EngineError, EnvironmentUnfitError, RlmismatchError, UsageError
from rlmismatch.torchrun_exit import under_torchrun

if TYPE_CHECKING:
    from torch.distributed import Store

KILL_AFTER_S: Final = 3.0  # what a process is given to end by itself
# vLLM's switches of the all-reduces that need a GPU a rank; the one without a switch is an option of its engine.
_PEER_ALL_REDUCES: Final = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC")


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Where this driver stands: its rank, and whether torchrun started it."""

    rank: int
    size: int
    local_rank: int
    torchrun: bool
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str], nproc: int | None) -> World:
        """The world of this process. `nproc`: workers to start when torchrun did not start us."""
        if not under_torchrun(env):
            return cls(rank=0, size=nproc or 1, local_rank=0, torchrun=False)
        if nproc is not None:
            raise UsageError("nproc-under-torchrun", "--nproc is for runs without torchrun", hint="use torchrun --nproc-per-node")
        return cls(
            rank=_number(env, "RANK"),
            size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0,
            torchrun=True,
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT"),
        )


def _number(env: Mapping[str, str], name: str) -> int:
    """A number that torchrun sets."""
    text = env.get(name)
    if text is None or not text.isdecimal():
        raise UsageError(
            "torchrun-variable-missing" if text is None else "torchrun-variable-malformed",
            f"RANK and WORLD_SIZE say that torchrun started this, and {name} is {'not set' if text is None else repr(text)}",
            where="environment",
            hint="start it with torchrun, which sets all of them, or unset RANK and WORLD_SIZE",
        )
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideLaunch:
    """How one side's processes are started: its own Python and environment beside its engine's config."""

    config: SideConfig
    python: str = sys.executable
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "python": self.python, "env": dict(self.env)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SideLaunch:
        return cls(config=SideConfig.from_json(data["config"]), python=data["python"], env=data["env"])


class Node:
    """The worker processes that this driver started. Its exit kills them all, group by group."""

    def __init__(self, world: World, run: Path, timeout_s: float) -> None:
        self.world, self.run, self.timeout_s = world, run, timeout_s
        self.processes: dict[tuple[SideName, int], subprocess.Popen[bytes]] = {}
        self.sockets: dict[SideName, socket.socket] = {}
        # How often each side was started here: a side that comes back must not read what its former self left in the store.
        self.starts: dict[SideName, int] = {}
        self.expected_exit: set[SideName] = set()
        self._scratch = tempfile.TemporaryDirectory(prefix="rlmismatch-")
        self.store, self._store_host, self._store_port = self._open_store()
        self._prefix = ""

    def _open_store(self) -> tuple[Store, str, int]:
        from torch.distributed import TCPStore

        timeout = datetime.timedelta(seconds=self.timeout_s)
        if not self.world.torchrun:
            # Port 0: the kernel picks a free one, so two runs can never collide.
            store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
            return store, "127.0.0.1", store.port
        agent_holds_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        master = not agent_holds_it and self.world.rank == 0
        store = TCPStore(self.world.master_addr, self.world.master_port, is_master=master, timeout=timeout, wait_for_workers=False)
        return store, self.world.master_addr, self.world.master_port

    def name_run(self, run_id: str) -> None:
        """All keys of this run carry its id: a restarted torchrun attempt never reads an old key."""
        from torch.distributed import PrefixStore

        self._prefix = f"rlmismatch/{run_id}"
        self.store = PrefixStore(self._prefix, self.store)

    def start(self, side: SideLaunch) -> None:
        """Start the side's workers of this node."""
        name = side.config.side
        self.starts[name] = self.starts.get(name, 0) + 1
        self.expected_exit.discard(name)
        ranks = [self.world.rank] if self.world.torchrun else list(range(side.config.world_size))
        for rank in ranks:
            if rank < side.config.world_size:
                self._start_one(side, rank, self.world.local_rank if self.world.torchrun else rank)

    def _start_one(self, side: SideLaunch, rank: int, local_rank: int) -> None:
        name = side.config.side
        shared: dict[str, str] = {}
        if side.config.ranks_per_gpu > 1:
            local_rank, shared = _place(local_rank)
        theirs = None
        if rank == 0:
            self.sockets[name], theirs = socket.socketpair()
        worker = WorkerConfig(
            config=side.config,
            rank=rank,
            local_rank=local_rank,
            run=str(self.run),
            store_host=self._store_host,
            store_port=self._store_port,
            store_prefix=f"{self._prefix}/{name}/{self.starts[name]}",
            timeout_s=self.timeout_s,
            fd=theirs.fileno() if theirs else None,
        )
        config_file = Path(self._scratch.name) / f"{name}-{rank}.json"
        config_file.write_text(json.dumps(worker.to_json()))
        try:
            with self._new_log(name, rank) as log:
                self.processes[name, rank] = subprocess.Popen(
                    [side.python, "-m", "rlmismatch.engines.worker", str(config_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**_worker_env(side, rank, local_rank, self._store_host, self._store_port), **shared, **side.env},
                    pass_fds=(theirs.fileno(),) if theirs else (),
                    start_new_session=True,  # one group, so that what an engine starts dies with it
                )
        except OSError as error:
            hint = "see --rollout-python" if name == "rollout" else "see --trainer-python"
            raise UsageError("python-not-found", f"cannot start {side.python}: {error.strerror}", where=name, hint=hint) from None
        finally:
            if theirs:
                theirs.close()

    def _new_log(self, side: SideName, rank: int) -> IO[bytes]:
        log = self.log_path(side, rank)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            return log.open("wb")
        except OSError as error:
            raise EnvironmentUnfitError(
                "output-unwritable", f"cannot write {log}: {error.strerror}", where=str(log), hint="free space, or see --out"
            ) from None

    def log_path(self, side: SideName, rank: int) -> Path:
        start = self.starts.get(side, 1)
        return self.run / "logs" / f"{side}-rank{rank}{f'-start{start}' if start > 1 else ''}.log"

    def log_tail(self, side: SideName, rank: int, lines: int = 12) -> tuple[str, ...]:
        """The last lines of a worker's log; none if it cannot be read."""
        with contextlib.suppress(OSError):
            return tuple(self.log_path(side, rank).read_text(errors="replace").splitlines()[-lines:])
        return ()

    def death_key(self, side: SideName, rank: int) -> str:
        """Where this node's driver leaves the error of a worker that ended."""
        return f"death/{side}/{self.starts.get(side, 1)}/{rank}"

    def deaths(self) -> dict[tuple[SideName, int], RlmismatchError]:
        """(side, rank) -> the error of each worker of this node that ended and was not told to."""
        ended = {key: process.poll() for key, process in self.processes.items()}
        return {
            (side, rank): self._death(side, rank, code)
            for (side, rank), code in ended.items()
            if code is not None and not (side in self.expected_exit and code == 0)
        }

    def _death(self, side: SideName, rank: int, code: int) -> RlmismatchError:
        tail = self.log_tail(side, rank)
        where = str(self.log_path(side, rank))
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            hint = "the kernel kills the largest process when memory runs out: see dmesg" if -code == signal.SIGKILL else ""
            return EngineError("worker-killed", f"{side} rank {rank} was killed by {name}", where=where, hint=hint, details=tail)
        return EngineError("worker-exited", f"{side} rank {rank} exited with code {code}", where=where, details=tail)

    def stop(self, side: SideName) -> None:
        """Kill the side's process groups on this node and wait for them."""
        self.expected_exit.add(side)
        if side in self.sockets:
            self.sockets.pop(side).close()
        mine = [(key, p) for key, p in self.processes.items() if key[0] == side]
        for _, process in mine:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + KILL_AFTER_S
        for key, process in mine:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)  # also what the worker itself had started
            process.wait()
            del self.processes[key]

    def close(self) -> None:
        for side in {*self.sockets, *(side for side, _ in self.processes)}:
            self.stop(side)
        self._scratch.cleanup()


def _worker_env(side: SideLaunch, rank: int, local_rank: int, host: str, port: int) -> dict[str, str]:
    # torchrun's own variables would make an engine join the agent's group instead of its side's.
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")) and k != "LOCAL_WORLD_SIZE"
    }
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(side.config.world_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=env.get("OMP_NUM_THREADS", "1"),
        PYTHONUNBUFFERED="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    root = str(Path(__file__).resolve().parents[2])  # a side's own Python need not have the package installed
    env["PYTHONPATH"] = os.pathsep.join(p for p in (root, env.get("PYTHONPATH", "")) if p)
    env.update(side.env)
    return env


def _place(local_rank: int) -> tuple[int, dict[str, str]]:
    """The GPU of a rank where ranks outnumber them, and the environment that lets NCCL take it.

    NCCL refuses two ranks on one GPU of one host, so ranks that go once round the GPUs are one host to it, and the next round another:
    between rounds collectives go over the network's transport. Every node is taken to have as many GPUs as this one.
    """
    import torch

    turn, gpu = divmod(local_rank, max(1, torch.cuda.device_count()))  # none is the worker's to report
    # What NCCL takes for a host by itself, and the round.
    host = f"{socket.gethostname()}-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{turn}"
    return gpu, {"NCCL_HOSTID": host, **dict.fromkeys(_PEER_ALL_REDUCES, "0")}


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
