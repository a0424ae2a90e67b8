"""The sides of one run: all up beside each other, or one at a time where one GPU cannot hold them together.

A side that was stopped comes back with the same configuration and the same sequences. Loading again costs time, never bits: every arm
starts from the state that the checkpoint gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmismatch.engines.launch import Controller
from rlmismatch.engines.node import SideLaunch
from rlmismatch.engines.protocol import SideName
from rlmismatch.tokens import Sequence as Tokens

Request = Mapping[str, Any]


class Fleet:
    """Sends requests to sides and makes sure that a side is up when its turn comes."""

    def __init__(self, controller: Controller, launches: Sequence[SideLaunch], *, together: bool) -> None:
        self.controller, self.together = controller, together
        self.launches: dict[SideName, SideLaunch] = {launch.config.side: launch for launch in launches}
        self._up: list[SideName] = []
        self._sequences: Request | None = None

    @property
    def names(self) -> list[SideName]:
        return list(self.launches)

    def start(self) -> None:
        """Load every side, at the same time, if they may be up together; otherwise a side is loaded when it is first asked."""
        if self.together:
            self._bring_up(self.names)

    def give(self, sequences: Sequence[Tokens]) -> None:
        """The sequences that every side is to score, now and after each load."""
        self._sequences = {"op": "sequences", "sequences": [s.to_json() for s in sequences]}
        self._send(self._up, self._sequences)

    def ask(self, requests: Mapping[SideName, Sequence[Request]]) -> dict[SideName, dict[str, Any]]:
        """Every side's requests in order, the sides beside each other or in turn; returns each side's last answer."""
        asked = {side: list(wanted) for side, wanted in requests.items() if wanted}
        if not self.together:
            # The side that is up goes first: it need not be loaded again.
            return {side: self._in_turn(side, asked[side]) for side in sorted(asked, key=lambda s: s not in self._up)}
        answers: dict[SideName, dict[str, Any]] = {}
        for step in range(max(map(len, asked.values()), default=0)):
            now = [side for side, wanted in asked.items() if step < len(wanted)]
            for side in now:
                self.controller.request(side, asked[side][step])
            answers |= self.controller.collect(now)
        return answers

    def replace(self, launch: SideLaunch) -> None:
        """From now on this side is another configuration of it; loaded when it is next asked."""
        side = launch.config.side
        self.launches[side] = launch
        if side in self._up:
            self.controller.stop(side)
            self._up.remove(side)
            if self.together:
                self._bring_up([side])

    def close(self) -> None:
        """Let every side that is up end by itself."""
        for side in self._up:
            self.controller.stop(side)
        self._up = []

    def _in_turn(self, side: SideName, wanted: Sequence[Request]) -> dict[str, Any]:
        if side not in self._up:
            self.close()
            self._bring_up([side])
        answer: dict[str, Any] = {}
        for request in wanted:
            answer = self.controller.call(side, request)
        return answer

    def _bring_up(self, sides: Sequence[SideName]) -> None:
        for side in sides:
            self.controller.start(self.launches[side])
        self._up = [*self._up, *sides]
        self._send(sides, {"op": "load"})
        if self._sequences is not None:
            self._send(sides, self._sequences)

    def _send(self, sides: Sequence[SideName], request: Request) -> None:
        for side in sides:
            self.controller.request(side, request)
        if sides:
            self.controller.collect(sides)
