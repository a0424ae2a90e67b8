"""Starts the workers of a side, talks to its rank 0, and leaves no process behind.

Under torchrun each rank's driver starts the worker of that rank; without torchrun one driver starts them all. Drivers meet in one
key-value store: the one torchrun's agent holds, or one that the single driver opens on a port the kernel picks. Rank 0's driver is
the *controller*: it alone talks to the engines (through its worker's rank 0), and tells the other drivers what to start and stop.
Rendezvous, many nodes included, is torchrun's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from rlmismatch.engines.protocol import SideConfig, SideName
from rlmismatch.engines.worker import WorkerConfig
from rlmismatch.errors import EngineError, EnvironmentUnfitError, RlmismatchError, UsageError
from rlmismatch.exitcodes import ExitCode

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.05
_KILL_AFTER_S = 3.0
_LAST_WORDS_S = 0.5  # a failing rank takes its peers along; their reasons come within this
Progress = Callable[[SideName, str], None]


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
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return cls(rank=0, size=nproc or 1, local_rank=0, torchrun=False)
        if nproc is not None:
            raise UsageError("nproc-under-torchrun", "--nproc is for runs without torchrun", hint="use torchrun --nproc-per-node")
        return cls(
            rank=int(env["RANK"]),
            size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            torchrun=True,
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(env["MASTER_PORT"]),
        )


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
                    env=_worker_env(side, rank, local_rank, self._store_host, self._store_port),
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
        tail = tuple(_tail(self.log_path(side, rank)))
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
        deadline = time.monotonic() + _KILL_AFTER_S
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


def _distance_from_cause(error: RlmismatchError) -> int:
    if error.exit_code is not ExitCode.ENGINE:
        return 0
    return {"worker-killed": 1, "worker-exited": 3, "engine-silent": 4}.get(error.slug, 2)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _tail(path: Path, lines: int = 12) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()[-lines:]
    return []


def _current_key() -> str:
    """Where rank 0 announces the run; a restarted torchrun attempt keeps the agent's store, so the attempt is part of the key."""
    return f"rlmismatch/current/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Controller:
    """Rank 0's view: starts sides everywhere, sends requests, collects answers, notices every death and every hang."""

    def __init__(self, node: Node, timeout_s: float, progress: Progress | None = None) -> None:
        self.node, self.timeout_s, self.progress = node, timeout_s, progress
        self._commands = 0
        self._buffers: dict[SideName, bytes] = {}
        self._deadlines: dict[SideName, float] = {}
        run_id = uuid.uuid4().hex[:12]
        self.node.store.set(_current_key(), json.dumps({"id": run_id, "run": str(node.run)}))
        self.node.name_run(run_id)

    def _tell(self, command: Mapping[str, Any]) -> None:
        self.node.store.set(f"command/{self._commands}", json.dumps(command))
        self._commands += 1

    def start(self, side: SideLaunch) -> None:
        """Start the side's workers on every node."""
        if side.config.world_size > self.node.world.size:
            raise UsageError(
                "too-few-ranks",
                f"the {side.config.side} needs {side.config.world_size} ranks, this run has {self.node.world.size}",
                hint=f"torchrun --nproc-per-node {side.config.world_size}, or --nproc {side.config.world_size} without torchrun",
            )
        self._tell({"start": side.to_json()})
        self.node.start(side)

    def request(self, side: SideName, message: Mapping[str, Any]) -> None:
        """Send one request without waiting for its answer."""
        try:
            self.node.sockets[side].sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self._raise_failure(side)
        self._deadlines[side] = time.monotonic() + self.timeout_s

    def collect(self, sides: Sequence[SideName]) -> dict[SideName, dict[str, Any]]:
        """Wait until every side answered its request. Raises the first error of any worker of any side."""
        answers: dict[SideName, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for side in sides:
                selector.register(self.node.sockets[side], selectors.EVENT_READ, side)
            while len(answers) < len(sides):
                for key, _ in selector.select(_POLL_S):
                    for message in self._read(key.data):
                        if "error" in message:
                            raise self._root_cause(RlmismatchError.from_json(message["error"]))
                        self._deadlines[key.data] = time.monotonic() + self.timeout_s
                        if "progress" in message:
                            if self.progress:
                                self.progress(key.data, message["progress"]["arm"])
                        else:
                            answers[key.data] = message["done"]
                            selector.unregister(self.node.sockets[key.data])
                self._watch([s for s in sides if s not in answers])
        return answers

    def call(self, side: SideName, message: Mapping[str, Any]) -> dict[str, Any]:
        self.request(side, message)
        return self.collect([side])[side]

    def _read(self, side: SideName) -> Iterator[dict[str, Any]]:
        try:
            data = self.node.sockets[side].recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._raise_failure(side)
        *lines, rest = (self._buffers.get(side, b"") + data).split(b"\n")
        self._buffers[side] = rest
        for line in lines:
            yield json.loads(line)

    def _watch(self, waiting: Sequence[SideName]) -> None:
        failed = [*self._reported_errors(), *self.node.deaths().values()]
        if failed:
            raise self._root_cause(failed[0])
        late = [side for side in waiting if time.monotonic() > self._deadlines[side]]
        if late:
            raise EngineError(
                "engine-timeout",
                f"the {late[0]} made no progress for {self.timeout_s:g} s",
                where=str(self.node.log_path(late[0], 0)),
                hint="raise --timeout if the model is large; otherwise the engine hangs: its log has the last words",
                details=tuple(_tail(self.node.log_path(late[0], 0))),
            )

    def _root_cause(self, first: RlmismatchError) -> RlmismatchError:
        """What explains a failure best, once every rank that it takes along had time to say so.

        A refusal (bad input, unfit machine) comes before a kill, a kill before an error that a lost peer may have caused, and that
        before a bare exit code.
        """
        time.sleep(_LAST_WORDS_S)
        signs = [first, *self._unread_errors(), *self._reported_errors(), *self.node.deaths().values()]
        return min(signs, key=_distance_from_cause)

    def _unread_errors(self) -> list[RlmismatchError]:
        """Errors that the sides' rank 0 sent and nobody has read."""
        found = []
        for side, channel in self.node.sockets.items():
            data = self._buffers.pop(side, b"")
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while chunk := channel.recv(1 << 20, socket.MSG_DONTWAIT):
                    data += chunk
            complete = data[: data.rfind(b"\n") + 1].splitlines()
            found += [RlmismatchError.from_json(m["error"]) for m in map(json.loads, complete) if "error" in m]
        return found

    def _reported_errors(self) -> list[RlmismatchError]:
        """Errors that workers and other nodes' drivers left in the store."""
        keys = [
            key
            for side in self.node.sockets
            for rank in range(self.node.world.size)
            for key in (f"{side}/{self.node.starts[side]}/error/{rank}", self.node.death_key(side, rank))
        ]
        return [RlmismatchError.from_json(json.loads(self.node.store.get(key))) for key in keys if self.node.store.check([key])]

    def _raise_failure(self, side: SideName) -> NoReturn:
        raise self._root_cause(EngineError("engine-silent", f"the {side} closed its channel", where=str(self.node.log_path(side, 0))))

    def stop(self, side: SideName) -> None:
        """Let the side exit by itself if it can, then make sure everywhere."""
        self.node.expected_exit.add(side)
        with contextlib.suppress(OSError, KeyError):
            self.node.sockets[side].sendall(b'{"op": "exit"}\n')
        deadline = time.monotonic() + _KILL_AFTER_S
        mine = [p for (name, _), p in self.node.processes.items() if name == side]
        while any(p.poll() is None for p in mine) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._tell({"stop": side})
        self.node.stop(side)
        self._buffers.pop(side, None)

    def finish(self, code: int) -> None:
        """Tell the other drivers to stop everything and exit with `code`."""
        with contextlib.suppress(RuntimeError):
            self._tell({"exit": code})


def follow(node: Node) -> int:
    """A driver that is not rank 0: start and stop workers as told, report deaths, return the exit code that rank 0 gives."""
    node.store.wait([_current_key()], datetime.timedelta(seconds=node.timeout_s))
    current = json.loads(node.store.get(_current_key()))
    node.name_run(current["id"])
    node.run = Path(current["run"])
    index, told = 0, set[str]()
    while True:
        if node.store.check([f"command/{index}"]):
            command = json.loads(node.store.get(f"command/{index}"))
            index += 1
            if "exit" in command:
                return int(command["exit"])
            if "start" in command:
                side = SideLaunch.from_json(command["start"])
                try:
                    node.start(side)
                except RlmismatchError as error:
                    node.store.set(node.death_key(side.config.side, node.world.rank), json.dumps(error.to_json()))
            else:
                node.stop(command["stop"])
            continue
        for (side_name, rank), death in node.deaths().items():
            key = node.death_key(side_name, rank)
            if key not in told:
                node.store.set(key, json.dumps(death.to_json()))
                told.add(key)
        time.sleep(_POLL_S)
