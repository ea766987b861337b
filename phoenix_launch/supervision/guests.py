"""The hosts that came by themselves, as the supervisor talks to them: taken in, turned away, told of the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phoenix_launch.bus.supervisor import PeerKind, SupervisorBus
from phoenix_launch.messages import JobEnded, JoinReply, JoinRequest
from phoenix_launch.wire import JOINING

TURN = 0.1  # seconds between looks at whoever may stop us


@dataclass
class Guests:
    """`answer`: what a request gets, None: not yet. Without it nobody can come."""

    bus: SupervisorBus
    answer: Callable[[JoinRequest, float], JoinReply | None] | None = None
    _nodes: dict[bytes, str] = field(default_factory=dict)  # where each is -> incarnation of its node, "": none yet

    @property
    def expected(self) -> bool:
        return self.answer is not None

    def ask(self, route: bytes, request: JoinRequest, now: float) -> None:
        if self.answer is None:
            return
        self._nodes.setdefault(route, "")
        reply = self.answer(request, now)
        if reply is not None:
            self._nodes[route] = reply.bootstrap.incarnation if reply.bootstrap else ""
            self.bus.answer(route, reply, job=JOINING)

    def turn_away(self, incarnation: str, why: str) -> None:
        """Its node was taken in, and then found unfit."""
        for route in [route for route, node in self._nodes.items() if node == incarnation]:
            self.bus.answer(route, JoinReply(None, why), job=JOINING)

    def say_goodbye(self, exit_code: int, text: str) -> None:
        """To all of them, also to those that still ask."""
        for route in self._nodes:
            self.bus.answer(route, JobEnded(exit_code, text), job=JOINING)

    def tell_late(self, last: JobEnded, count: int, seconds: float, stopped: Callable[[], bool]) -> None:
        """Tell also those that ask within so many seconds, up to `count` hosts in all: else each waits for its timeout."""
        end = time.monotonic() + seconds
        while len(self._nodes) < count and time.monotonic() < end and not stopped():
            self.bus.control.poll(int(TURN * 1000))
            while (received := self.bus.receive()) is not None:
                if received.peer.kind is PeerKind.JOINER and isinstance(received.envelope.body, JoinRequest):
                    self._nodes.setdefault(received.route, "")
                    self.bus.answer(received.route, last, job=JOINING)
