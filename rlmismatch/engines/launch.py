"""Has the workers of each side started, talks to its rank 0, and tells what went wrong.

Under torchrun each rank's driver starts the worker of that rank; without torchrun one driver starts them all. Drivers meet in one
key-value store: the one torchrun's agent holds, or one that the single driver opens on a port the kernel picks. Rank 0's driver is
the *controller*: it alone talks to the engines (through its worker's rank 0), and tells the other drivers what to start and stop.
Rendezvous, many nodes included, is torchrun's.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import selectors
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlmismatch.engines.node import KILL_AFTER_S, Node, SideLaunch
from rlmismatch.engines.protocol import SideName
from rlmismatch.errors import EngineError, RlmismatchError, UsageError
from rlmismatch.exitcodes import ExitCode

_POLL_S = 0.05
_LAST_WORDS_S = 0.5  # a failing rank takes its peers along; their reasons come within this
Progress = Callable[[SideName, str], None]


def _distance_from_cause(error: RlmismatchError) -> int:
    if error.exit_code is not ExitCode.ENGINE:
        return 0
    return {"worker-killed": 1, "worker-exited": 3, "engine-silent": 4}.get(error.slug, 2)


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
                details=self.node.log_tail(late[0], 0),
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
        deadline = time.monotonic() + KILL_AFTER_S
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
