"""One side on one rank: a process of its own that loads one engine once, answers requests, and exits.

    python -m rlmismatch.engines.worker CONFIG.json       (started by engines/node.py)

Rank 0 takes requests as JSON lines on an inherited socket and hands each to the other ranks through the side's key-value store;
all ranks then run it together. Rank 0 writes the captures and answers. Any error is answered with its slug and ends the process:
after an error inside an engine its state is not to be trusted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlmismatch import capture, tokens
from rlmismatch.contract import read, readings_to_json
from rlmismatch.engines.protocol import Arm, Engine, SideConfig
from rlmismatch.errors import EngineError, RlmismatchError, UsageError
from rlmismatch.tokens import Prompt, Sequence

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What one worker process is started with."""

    config: SideConfig
    rank: int
    local_rank: int
    run: str  # the run's folder
    store_host: str
    store_port: int
    store_prefix: str
    timeout_s: float
    fd: int | None  # rank 0: the socket to the driver

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerConfig:
        return cls(**{**data, "config": SideConfig.from_json(data["config"])})


# Engines are named by strings and imported on use: a side's environment need hold only its own engine.
_ENGINES = {
    "megatron": ("rlmismatch.engines.megatron", "MegatronEngine", "megatron.core", "megatron"),
    "vllm": ("rlmismatch.engines.vllm", "VllmEngine", "vllm", "vllm"),
    "oracle": ("rlmismatch.engines.oracle", "OracleEngine", "transformers", "megatron"),
}


def main() -> None:
    worker = WorkerConfig.from_json(json.loads(Path(sys.argv[1]).read_text()))
    _die_with_parent()
    # An engine's packages make a million objects that all stay: walking them again and again was a fifth of the start. See _load.
    gc.disable()
    channel = _Channel(worker)
    try:
        _serve(worker, channel)
    except BaseException as error:  # the process ends here; the driver gets the reason
        channel.fail(error)
        traceback.print_exc()
        _end(1)


def _end(code: int) -> NoReturn:
    """End the process at once, while its engine is still held.

    Engines hold threads and communicators that a clean interpreter exit may wait for, and a peer rank may hang in a collective. An engine
    that is let go shuts itself down: vLLM takes a second for what the system does anyway.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """The kernel kills this process when its driver dies, however it dies; the thread covers systems without prctl."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


class _Channel:
    """Requests in, answers out. Rank 0 talks to the driver; the store carries requests to, and errors from, the other ranks."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.worker = worker
        self.store: Store | None = None
        self._file = None if worker.fd is None else socket.socket(fileno=worker.fd).makefile("rwb")
        self._count = 0

    def connect(self) -> None:
        from torch.distributed import PrefixStore, TCPStore

        timeout = datetime.timedelta(seconds=self.worker.timeout_s)
        base = TCPStore(self.worker.store_host, self.worker.store_port, is_master=False, timeout=timeout, wait_for_workers=False)
        self.store = PrefixStore(self.worker.store_prefix, base)

    def next(self) -> dict[str, Any]:
        assert self.store is not None
        key = f"request/{self._count}"
        self._count += 1
        if self._file is None:
            # Idle ranks wait as long as the driver lives; time-outs are the driver's.
            self.store.wait([key], datetime.timedelta(days=7))
            request: dict[str, Any] = json.loads(self.store.get(key))
            return request
        line = self._file.readline()
        if not line:
            return {"op": "exit"}
        self.store.set(key, line.decode())
        request = json.loads(line)
        return dict(request)

    def send(self, message: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write((json.dumps(message) + "\n").encode())
            self._file.flush()

    def fail(self, error: BaseException) -> None:
        data = as_rlmismatch_error(error, self.worker).to_json()
        try:
            self.send({"error": data})
            if self.store is not None:
                self.store.set(f"error/{self.worker.rank}", json.dumps(data))
        except (OSError, RuntimeError):
            print("the driver is gone; the error could not be sent", file=sys.stderr)


def as_rlmismatch_error(error: BaseException, worker: WorkerConfig) -> RlmismatchError:
    if isinstance(error, RlmismatchError):
        return error
    side = worker.config
    last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return EngineError(
        "engine-out-of-memory" if memory else "engine-failed",
        f"{side.engine} ({side.side}, rank {worker.rank}): {type(error).__name__}: {str(error).strip() or 'no message'}",
        where=f"{last.filename}:{last.lineno} in {last.name}" if last else "",
        hint=_memory_hint(side) if memory else "the full traceback is in the side's log",
    )


def _require_engine(config: SideConfig) -> None:
    """Say what is missing before anything of it is imported: a side's own Python may hold no package at all."""
    import importlib.util

    _, _, package, extra = _ENGINES[config.engine]
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        from rlmismatch.errors import EnvironmentUnfitError

        option = "--rollout-python" if config.side == "rollout" else "--trainer-python"  # the oracle runs in the trainer's
        raise EnvironmentUnfitError(
            "engine-not-installed",
            f"{package} is not installed in {sys.executable}",
            where=config.side,
            hint=f"pip install 'rlmismatch[{extra}]', or name another Python with {option}",
        )


def _too_few_hint(config: SideConfig) -> str:
    """What to do where a rank has no GPU."""
    if config.ranks_per_gpu > 1:
        return f"the {config.side} sees fewer GPUs than the command itself: see CUDA_VISIBLE_DEVICES in its environment, or on this node"
    return "lower TP; or --share-gpu lets ranks share the GPUs that are there; or --device cpu"


def _memory_hint(config: SideConfig) -> str:
    """Whose memory it is that ran out, and the option that gives it back."""
    if config.side == "oracle":
        return "--oracle float32 needs half of it, --oracle off none"
    more = "give each rank a GPU of its own" if config.ranks_per_gpu > 1 else "use a larger TP"
    return f"--sides in-turn gives each side the whole GPU; or lower --gpu-memory-fraction, or {more}"


def _load_engine(config: SideConfig, rank: int, local_rank: int) -> Engine:
    import importlib

    module, name, _, _ = _ENGINES[config.engine]
    engine: Engine = getattr(importlib.import_module(module), name)(config, rank=rank, local_rank=local_rank)
    return engine


def omp_threads(text: str) -> int:
    """Threads by OMP_NUM_THREADS: OpenMP takes a list, one number for each level of nesting, and ignores what it cannot read."""
    first = text.partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def _serve(worker: WorkerConfig, channel: _Channel) -> NoReturn:
    config = worker.config
    _require_engine(config)
    if config.device == "cpu" and config.impl == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch
    import torch.distributed as dist

    torch.set_num_threads(omp_threads(os.environ.get("OMP_NUM_THREADS", "1")))
    channel.connect()
    if config.device == "cuda":
        if not torch.cuda.is_available() or torch.cuda.device_count() <= worker.local_rank:
            from rlmismatch.errors import EnvironmentUnfitError

            raise EnvironmentUnfitError(
                "too-few-devices",
                f"rank {worker.rank} needs CUDA device {worker.local_rank}, this host shows {torch.cuda.device_count()}",
                hint=_too_few_hint(config),
            )
        torch.cuda.set_device(worker.local_rank)
    assert channel.store is not None
    if config.engine != "oracle":
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo",
            store=dist.PrefixStore("group", channel.store),
            rank=worker.rank,
            world_size=config.world_size,
            timeout=datetime.timedelta(seconds=worker.timeout_s),
        )
    engine = _load_engine(config, worker.rank, worker.local_rank)
    session = _Session(worker, engine)
    while True:
        request = channel.next()
        if request["op"] == "exit":
            _end(0)
        for message in session.handle(request):
            channel.send(message)


class _Session:
    """Runs requests on the engine. A generator per request: progress messages, then ``{"done": ...}``."""

    def __init__(self, worker: WorkerConfig, engine: Engine) -> None:
        self.worker = worker
        self.engine = engine
        self.sequences: tuple[Sequence, ...] = ()
        self.asked: tuple[Sequence, ...] = ()

    def handle(self, request: Mapping[str, Any]) -> Any:
        handler = {
            "load": self._load,
            "describe": self._describe,
            "generate": self._generate,
            "sequences": self._sequences,
            "run": self._run,
        }
        return handler[request["op"]](request)

    @property
    def _writes(self) -> bool:
        return self.worker.rank == 0

    def _load(self, request: Mapping[str, Any]) -> Any:
        self.engine.load()
        gc.freeze()
        gc.enable()
        log = os.environ.get("RLMISMATCH_ENGINE_LOG")
        if log:  # the test suite counts real engines by it
            with open(log, "a") as file:
                file.write(f"{self.worker.config.side} {self.worker.config.engine} {self.worker.rank}\n")
        yield {"done": {}}

    def _describe(self, request: Mapping[str, Any]) -> Any:
        """Readings, weight digests and provenance of the live engine, into side.json."""
        readings = {axis: dict(fields) for axis, fields in self.engine.readings().items()}
        digests = dict(self.engine.weight_digests())
        provenance = dict(self.engine.provenance())
        readings["model.tokens"] = self._token_readings()
        if self._writes:
            data = {
                "config": self.worker.config.to_json(),
                "readings": readings_to_json(readings),
                "weights": digests,
                "provenance": provenance,
            }
            capture.write_json(Path(self.worker.run) / self.worker.config.side / "side.json", data)
        yield {"done": {}}

    def _token_readings(self) -> dict[str, Any]:
        """Digest of what this side will really score, after any plant: what the trainer and the rollout must agree on."""
        source = "digest of the ids handed to the engine"
        fields = {name: read(value, source) for name, value in tokens.digest(self.sequences).items()}
        bos = self.worker.config.bos_token_id
        # A model without a BOS token: whatever stands first is counted, so that a doubled start still shows.
        counts = [_leading(s.prompt_ids, s.prompt_ids[0] if bos is None else bos) for s in self.sequences]
        return {**fields, "bos_count": read(counts, source)}

    def _generate(self, request: Mapping[str, Any]) -> Any:
        prompts = tuple(Prompt(id=p["id"], token_ids=tuple(p["token_ids"]), text=p["text"]) for p in request["prompts"])
        sequences = self.engine.generate(prompts, max_new_tokens=request["max_new_tokens"], seed=request["seed"])
        yield {"done": {"sequences": [s.to_json() for s in sequences]}}

    def _sequences(self, request: Mapping[str, Any]) -> Any:
        self.asked = tuple(tokens.sequence_from_json(row, "the driver's request") for row in request["sequences"])
        self.sequences = self.asked
        if "two_bos" in self.worker.config.plants:
            self.sequences = tuple(dataclasses.replace(s, prompt_ids=(s.prompt_ids[0], *s.prompt_ids)) for s in self.asked)
        yield {"done": {}}

    def _run(self, request: Mapping[str, Any]) -> Any:
        if not self.sequences:
            raise UsageError("nothing-to-score", "no sequence was given to score")
        from rlmismatch.engines.logprob_plants import reported  # imports torch, which must wait until the worker is set up

        for data in request["arms"]:
            arm = Arm.from_json(data)
            # The boundary probe keeps one sequence's outputs; the other sequences would only cost time.
            sequences = self.sequences[:1] if arm.probe == "boundary" else self.sequences
            if arm.probe == "attention":
                sequences = (max(self.sequences, key=lambda s: len(s.token_ids)),)
            result = self.engine.run(arm, sequences)
            result.scores = {path: reported(scores, sequences, self.worker.config.plants) for path, scores in result.scores.items()}
            if self._writes:
                capture.write_arm(Path(self.worker.run), self.worker.config.side, result, sequences)
            yield {"progress": {"arm": arm.id, "seconds": result.seconds}}
        yield {"done": {}}


def _leading(ids: tuple[int, ...], token: int) -> int:
    """How many times `token` stands at the very start of `ids`."""
    count = 0
    for t in ids:
        if t != token:
            break
        count += 1
    return count


if __name__ == "__main__":
    main()
