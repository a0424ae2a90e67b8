"""Which side is up when: all of them, or one after the other with the sequences given again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rlmismatch.engines.fleet import Fleet
from rlmismatch.engines.launch import Controller
from rlmismatch.engines.node import SideLaunch
from rlmismatch.engines.protocol import SideConfig, SideName
from rlmismatch.tokens import Sequence as Tokens


class Recording:
    """A controller that starts nothing and writes down what it was told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.up: set[str] = set()
        self.most = 0

    def start(self, side: SideLaunch) -> None:
        self.up.add(side.config.side)
        self.most = max(self.most, len(self.up))
        self.log.append(f"start {side.config.side}")

    def request(self, side: SideName, message: Mapping[str, Any]) -> None:
        assert side in self.up, f"{side} was asked while it was down"
        self.log.append(f"{side} {message['op']}")

    def collect(self, sides: Sequence[SideName]) -> dict[SideName, dict[str, Any]]:
        return {side: {"answer": len(self.log)} for side in sides}

    def call(self, side: SideName, message: Mapping[str, Any]) -> dict[str, Any]:
        self.request(side, message)
        return self.collect([side])[side]

    def stop(self, side: SideName) -> None:
        self.up.remove(side)
        self.log.append(f"stop {side}")


def _fleet(*, together: bool) -> tuple[Fleet, Recording]:
    controller = Recording()
    launches = [
        SideLaunch(config=SideConfig(side="trainer", engine="megatron", ckpt="x")),
        SideLaunch(config=SideConfig(side="rollout", engine="vllm", ckpt="x")),
    ]
    return Fleet(cast(Controller, controller), launches, together=together), controller


TOKENS = (Tokens(id="a", prompt_ids=(1,), response_ids=(2,)),)


def _use(fleet: Fleet) -> None:
    fleet.start()
    fleet.ask({"rollout": [{"op": "generate"}]})
    fleet.give(TOKENS)
    fleet.ask({"trainer": [{"op": "describe"}], "rollout": [{"op": "describe"}]})
    fleet.ask({"trainer": [{"op": "run"}], "rollout": [{"op": "run"}]})
    fleet.close()


def test_together_each_side_is_loaded_once() -> None:
    fleet, controller = _fleet(together=True)
    _use(fleet)
    assert controller.most == 2
    assert [line for line in controller.log if line.startswith("start")] == ["start trainer", "start rollout"]
    assert controller.log.count("trainer sequences") == controller.log.count("rollout sequences") == 1
    assert controller.up == set()


def test_in_turn_one_side_is_up_and_gets_the_sequences_with_every_load() -> None:
    fleet, controller = _fleet(together=False)
    _use(fleet)
    assert controller.most == 1
    assert controller.log == [
        "start rollout", "rollout load", "rollout generate", "rollout sequences", "rollout describe", "stop rollout",
        "start trainer", "trainer load", "trainer sequences", "trainer describe", "trainer run", "stop trainer",
        "start rollout", "rollout load", "rollout sequences", "rollout run", "stop rollout",
    ]  # fmt: skip


def test_a_side_that_is_not_asked_is_not_loaded_in_turn() -> None:
    fleet, controller = _fleet(together=False)
    fleet.start()
    assert controller.log == []
    assert fleet.ask({"trainer": [], "rollout": [{"op": "generate"}]}).keys() == {"rollout"}
    assert "start trainer" not in controller.log
