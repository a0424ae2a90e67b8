"""A Python that starts engine workers with the engine's packages imported already: four fifths of a short run's CPU time.

One process per engine imports them, in the environment that a worker has, and forks once for each worker. From its own first line on a
worker does what it always does: `rlmismatch.engines.worker`, with the same arguments, descriptors and environment. What is settled at
import and asked for otherwise (another environment, a compiled rollout, Triton's interpreter) gets a process of its own, see
preloaded_client.py. tests/test_preloaded.py shows that a run reads and scores the same either way; failures, signals and torchrun are
tested without it.

    python -m tests.preloaded ENGINE SOCKET       (started by preloaded_python)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from rlmismatch.engines.node import SideLaunch, _worker_env
from rlmismatch.engines.protocol import SideConfig
from tests import preloaded_client
from tests.preloaded_client import comparable

ROOT = Path(__file__).resolve().parents[1]
SIDES: Final = {"megatron": "trainer", "vllm": "rollout", "oracle": "oracle"}
# What a worker of the engine has imported by the time that it has scored something: its adapter, and what holds most of the rest.
MODULES: Final = {
    "megatron": ("rlmismatch.engines.megatron", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt"),
    "vllm": ("rlmismatch.engines.vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"),
    "oracle": ("rlmismatch.engines.oracle", "transformers.models.qwen3.modeling_qwen3"),
}


@contextlib.contextmanager
def preloaded_python() -> Iterator[str]:
    """The path of an executable for ``--trainer-python`` and ``--rollout-python``. Its helpers end with the context.

    It is this very Python where the environment asks for threads, which may not be forked.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="preloaded-") as name, contextlib.ExitStack() as cleanup:
        folder = Path(name)
        processes = {}
        for engine, side in SIDES.items():
            env = _worker_env(SideLaunch(config=SideConfig(side=side, engine=engine, ckpt="")), 0, 0, "", 0)  # type: ignore[arg-type]
            (folder / f"{engine}.json").write_text(json.dumps(comparable(env)))
            command = [sys.executable, "-m", "tests.preloaded", engine, str(folder / engine)]
            with (folder / f"{engine}.log").open("w") as log:
                process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            processes[engine] = process
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)  # a worker dies with what it was forked from
        for engine, process in processes.items():
            while not (folder / engine).exists():
                if process.poll() is not None:
                    raise RuntimeError((folder / f"{engine}.log").read_text())
                time.sleep(0.1)
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{preloaded_client.__file__}" "{folder}" "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        yield str(python)


def preload(engine: str) -> None:
    if engine == "vllm":
        from rlmismatch.engines.vllm import VllmEngine

        # Some of it is read while vLLM is imported.
        VllmEngine(SideConfig(side="rollout", engine="vllm", ckpt=""), rank=0, local_rank=0)._set_environment()
    for name in MODULES[engine]:
        importlib.import_module(name)
    if engine == "megatron":  # its fused losses are compiled; what torch asks the machine for that, it asks once a process
        from torch._inductor import codecache, cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list()
        codecache.CacheBase.get_system()
    gc.collect()
    gc.freeze()


def serve(path: str) -> NoReturn:
    """Fork a worker for each request of `preloaded_client.ask`, and answer with its exit code once it has ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # it is there only once it answers
    workers: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process id, client
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    ours = [listener.fileno(), selector.fileno(), *workers, *(other.fileno() for _, other in workers.values())]  # type: ignore[attr-defined]
                    pid = fork_worker(client, ours)
                    pidfd = os.pidfd_open(pid)
                    workers[pidfd] = (pid, client)
                    selector.register(pidfd, selectors.EVENT_READ, "worker")
                    selector.register(client, selectors.EVENT_READ, pidfd)
                elif key.data == "worker":
                    ended(key.fd, *workers.pop(key.fd), selector)
                elif key.data in workers:  # the client was killed, and what it stands for is to die with it
                    os.killpg(workers[key.data][0], signal.SIGKILL)
                    selector.unregister(key.fileobj)


def ended(pidfd: int, pid: int, client: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(pidfd)
    os.close(pidfd)
    if client in selector.get_map():
        selector.unregister(client)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with client, contextlib.suppress(OSError):
        client.send(str(code).encode())


def fork_worker(client: socket.socket, ours: list[int]) -> int:
    """The process id of a worker forked for this client. ours: descriptors that no worker must keep."""
    message, fds, _, _ = socket.recv_fds(client, preloaded_client.LARGEST, 8)
    request: dict[str, Any] = json.loads(message)
    # Only the thread that forks lives on in the child: a lock that another one held would never be released.
    assert len(os.listdir("/proc/self/task")) == 1
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        os.setsid()
        for fd in (*ours, client.fileno()):
            os.close(fd)
        spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for fd in fds]  # where none is in the way of another
        for fd, place in zip(spare, request["fds"], strict=True):
            os.dup2(fd, place)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        random.seed()
        from rlmismatch.engines import worker

        worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(preloaded_client.LOST)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it goes with the session, however that ends
    preload(sys.argv[1])
    serve(sys.argv[2])
