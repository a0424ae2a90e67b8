"""The launcher with workers that are a few lines of Python: what they do wrong must end as one clear error, and leave no process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlmismatch.engines.launch import Controller, follow
from rlmismatch.engines.node import Node, SideLaunch, World
from rlmismatch.engines.protocol import SideConfig, SideName
from rlmismatch.errors import EngineError, EnvironmentUnfitError, RlmismatchError, UsageError
from tests.cli_runs import gone, wait_for, workers

TIMEOUT_S = 4.0  # a Python process that starts on a busy machine needs a second or two
# In the place of a side's Python: runs $BEHAVIOUR, which sees `rank`, `requests` (lines) and `say(message)`.
WORKER = f"""#!{sys.executable}
import json, os, pathlib, signal, socket, subprocess, sys, time
config = json.loads(pathlib.Path(sys.argv[-1]).read_text())
rank = config["rank"]
requests = None if config["fd"] is None else socket.socket(fileno=config["fd"]).makefile("rwb")
def say(message):
    requests.write((json.dumps(message) + "\\n").encode())
    requests.flush()
exec(os.environ["BEHAVIOUR"])
"""
ECHO = "for line in requests: say({'done': {'heard': json.loads(line)['op']}})"
IDLE = "time.sleep(60)"
UP = "[time.sleep(0.01) for _ in iter(lambda: pathlib.Path('{}').exists(), True)]"  # once another worker says that it is there
PEER_LOST = {"error": EngineError("engine-failed", "connection closed by peer").to_json()}


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(WORKER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    out = Node(World(rank=0, size=2, local_rank=0, torchrun=False), tmp_path, TIMEOUT_S)
    yield out
    out.close()
    gone(tmp_path)


def launch(python: str, behaviour: str, *, side: SideName = "trainer", tp: int = 1) -> SideLaunch:
    config = SideConfig(side=side, engine="vllm" if side == "rollout" else "megatron", ckpt="", tp=tp)
    return SideLaunch(config=config, python=python, env={"BEHAVIOUR": behaviour})


def failure(node: Node, *sides: SideLaunch) -> RlmismatchError:
    """How a request to every side ends."""
    controller = Controller(node, TIMEOUT_S)
    for side in sides:
        controller.start(side)

    def ask() -> None:
        for side in sides:
            controller.request(side.config.side, {"op": "load"})
        controller.collect([side.config.side for side in sides])

    with pytest.raises(RlmismatchError) as caught:  # where a worker was quick to end, the request already meets a closed channel
        ask()
    return caught.value


def test_sides_answer_at_the_same_time_and_progress_counts_as_life(node: Node, python: str) -> None:
    seen: list[tuple[str, str]] = []
    controller = Controller(node, TIMEOUT_S, progress=lambda side, arm: seen.append((side, arm)))
    slow = "for n in range(3): time.sleep(2); say({'progress': {'arm': str(n)}})"  # longer than the time-out, never silent for so long
    controller.start(launch(python, f"requests.readline()\n{slow}\nsay({{'done': {{}}}})\n{IDLE}"))
    controller.start(launch(python, ECHO, side="rollout"))
    controller.request("trainer", {"op": "run"})
    controller.request("rollout", {"op": "load"})
    assert controller.collect(["trainer", "rollout"]) == {"trainer": {}, "rollout": {"heard": "load"}}
    assert seen == [("trainer", "0"), ("trainer", "1"), ("trainer", "2")]


def test_a_silent_side_is_a_time_out_that_names_it_and_its_log(node: Node, python: str) -> None:
    error = failure(node, launch(python, ECHO), launch(python, "print('last words', flush=True)\n" + IDLE, side="rollout"))
    assert (type(error), error.slug) == (EngineError, "engine-timeout")
    assert error.what == "the rollout made no progress for 4 s"
    assert error.details == ("last words",)
    assert error.where.endswith("logs/rollout-rank0.log")


def test_a_kill_is_named_with_rank_and_signal_whoever_reports_first(node: Node, python: str, tmp_path: Path) -> None:
    up = UP.format(tmp_path / "up")
    rank_0 = f"{up}; say({PEER_LOST}); {IDLE}"  # before the kill is seen
    rank_1 = f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(0.2); os.kill(os.getpid(), 9)"
    error = failure(node, launch(python, f"if rank: {rank_1}\nelse: {rank_0}", tp=2))
    assert (error.slug, error.what) == ("worker-killed", "trainer rank 1 was killed by SIGKILL")


def test_a_bare_exit_is_named_with_its_code_and_the_end_of_its_log(node: Node, python: str) -> None:
    error = failure(node, launch(python, "print('\\n'.join(map(str, range(20))), flush=True); os._exit(3)"))
    assert (error.slug, error.what) == ("worker-exited", "trainer rank 0 exited with code 3")
    assert error.details == tuple(map(str, range(8, 20)))


def test_a_refusal_of_any_rank_comes_before_what_it_does_to_the_others(node: Node, python: str, tmp_path: Path) -> None:
    """The others end once rank 0 is there, a moment before it speaks."""
    refusal = EnvironmentUnfitError("engine-not-installed", "no vllm here", where="rollout", hint="pip install it")
    rank_0 = f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(0.2); say({{'error': {refusal.to_json()}}}); os._exit(1)"
    other = f"{UP.format(tmp_path / 'up')}; os._exit(1)"
    error = failure(node, launch(python, f"if rank: {other}\nelse: {rank_0}", side="rollout", tp=2), launch(python, other))
    assert error.to_json() == refusal.to_json()


def test_a_refusal_left_in_the_store_comes_before_the_lost_peer(node: Node, python: str) -> None:
    controller = Controller(node, TIMEOUT_S)
    controller.start(launch(python, f"if rank == 0: requests.readline(); say({PEER_LOST})\n{IDLE}", tp=2))
    refusal = UsageError("plant-without-effect", "nothing to plant")
    controller.request("trainer", {"op": "load"})
    node.store.set("trainer/1/error/1", json.dumps(refusal.to_json()))
    with pytest.raises(UsageError, match="nothing to plant"):
        controller.collect(["trainer"])


def test_a_closed_channel_is_an_error(node: Node, python: str) -> None:
    error = failure(node, launch(python, f"requests.close(); {IDLE}"))
    assert error.slug == "engine-silent"


def test_a_group_that_ignores_sigterm_dies_with_what_it_started(node: Node, python: str, tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '60']); " + IDLE
    node.start(launch(python, stubborn))
    wait_for(lambda: len(workers(tmp_path)) == 2, "the worker and its child")
    started = time.monotonic()
    node.close()
    gone(tmp_path)
    assert time.monotonic() - started < 10


def test_a_side_that_is_told_to_exit_may(node: Node, python: str) -> None:
    controller = Controller(node, TIMEOUT_S)
    controller.start(launch(python, "requests.readline()"))
    controller.stop("trainer")
    assert node.deaths() == {}
    assert node.processes == {}


@pytest.mark.parametrize(("name", "words"), [("nowhere", "No such file"), ("data", "Permission denied")])
def test_a_python_that_is_none(node: Node, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "data").write_text("not a program")
    with pytest.raises(UsageError, match=words) as caught:
        node.start(launch(str(tmp_path / name), IDLE))
    assert (caught.value.slug, caught.value.where, caught.value.hint) == ("python-not-found", "trainer", "see --trainer-python")


def test_a_log_that_can_not_be_written(node: Node, python: str, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentUnfitError) as caught:
        node.start(launch(python, IDLE))
    assert (caught.value.slug, caught.value.where) == ("output-unwritable", str(tmp_path / "logs/trainer-rank0.log"))


def test_more_ranks_than_there_are(node: Node, python: str) -> None:
    with pytest.raises(UsageError, match="the trainer needs 4 ranks, this run has 2") as caught:
        Controller(node, TIMEOUT_S).start(launch(python, IDLE, tp=4))
    assert "--nproc 4" in caught.value.hint
    assert node.processes == {}


def test_a_worker_sees_its_own_group_and_not_torchruns(node: Node, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "agent")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "PYTHONPATH")
    controller = Controller(node, TIMEOUT_S)
    controller.start(
        launch(python, f"if rank: {IDLE}\nrequests.readline(); say({{'done': {{n: os.environ.get(n) for n in {names}}}}})\n{IDLE}", tp=2)
    )
    seen = controller.call("trainer", {"op": "load"})
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["TORCHELASTIC_RUN_ID"], seen["LOCAL_WORLD_SIZE"]) == ("0", "2", None, None)
    assert seen["PYTHONPATH"].split(os.pathsep) == [str(Path(__file__).resolve().parents[2]), "/theirs"]
    assert int(seen["MASTER_PORT"]) > 0


def test_the_second_node_starts_its_rank_reports_its_death_and_takes_the_exit_code(node: Node, python: str, tmp_path: Path) -> None:
    port = node.store.port  # type: ignore[attr-defined]
    other = Node(World(rank=1, size=2, local_rank=0, torchrun=True, master_port=port), Path(), 30)
    node.world = dataclasses.replace(node.world, torchrun=True)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(follow(other)))
    thread.start()
    try:
        controller = Controller(node, 30)
        controller.start(launch(python, f"if rank: os.kill(os.getpid(), 9)\nelse: {IDLE}", tp=2))
        controller.request("trainer", {"op": "load"})
        with pytest.raises(EngineError, match="trainer rank 1 was killed by SIGKILL"):
            controller.collect(["trainer"])
        assert list(node.processes) == [("trainer", 0)]
        assert list(other.processes) == [("trainer", 1)]
    finally:
        controller.finish(6)
        thread.join(10)
        other.close()
    assert codes == [6]


@pytest.mark.parametrize(
    ("env", "nproc", "expected"), [({}, None, (0, 1, False)), ({}, 4, (0, 4, False)), ({"RANK": "3"}, 2, (0, 2, False))]
)
def test_the_world_without_torchrun(env: dict[str, str], nproc: int | None, expected: tuple[int, int, bool]) -> None:
    world = World.from_env(env, nproc)
    assert (world.rank, world.size, world.torchrun) == expected


def test_the_world_under_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    assert World.from_env(env, None) == World(rank=3, size=4, local_rank=1, torchrun=True, master_addr="node0", master_port=29400)
    with pytest.raises(UsageError, match="--nproc is for runs without torchrun"):
        World.from_env(env, 2)


@pytest.mark.parametrize(("name", "text"), [("MASTER_PORT", None), ("MASTER_PORT", "http"), ("RANK", "-1"), ("WORLD_SIZE", "")])
def test_a_variable_of_torchruns_that_is_not_there_is_named(name: str, text: str | None) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29400", name: text}
    with pytest.raises(UsageError, match=f"and {name} is"):
        World.from_env({key: value for key, value in env.items() if value is not None}, None)


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_that_outnumber_the_gpus_go_round_them_as_hosts_of_their_own_to_nccl(
    node: Node, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """What the person sets for a side stays."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    peers = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC")
    names = ("LOCAL_RANK", "NCCL_HOSTID", *peers)
    tell = f"seen = [config['local_rank'], *(os.environ.get(n) for n in {names})]"
    behaviour = f"{tell}\npathlib.Path({str(tmp_path)!r}, config['config']['side'] + str(rank)).write_text(json.dumps(seen))"
    env: Mapping[SideName, dict[str, str]] = {"rollout": {}, "trainer": {"NCCL_HOSTID": "mine"}}
    for side, given in env.items():
        started = launch(python, behaviour, side=side, tp=4)
        shared = dataclasses.replace(started.config, device="cuda", ranks_per_gpu=4 // gpus)
        node.start(dataclasses.replace(started, config=shared, env={**started.env, **given}))
    for process in node.processes.values():
        process.wait(10)
    places = [json.loads((tmp_path / f"rollout{rank}").read_text()) for rank in range(4)]
    assert [place[0] for place in places] == [int(place[1]) for place in places] == [rank % gpus for rank in range(4)]
    assert [place[2].rsplit("-", 1)[1] for place in places] == [str(rank // gpus) for rank in range(4)]
    assert len({place[2].rsplit("-", 1)[0] for place in places}) == 1  # NCCL's own word for this host
    assert {switch for place in places for switch in place[3:]} == {"0"}
    assert json.loads((tmp_path / "trainer3").read_text())[2] == "mine"
