"""An agent's link to the supervisor that a drill makes lose or delay what goes through it, in both directions."""

from __future__ import annotations

from collections import deque

import zmq

from phoenix_launch.bus.agent import AgentLink
from phoenix_launch.clock import OwnClock
from phoenix_launch.messages import Body
from phoenix_launch.wire import Envelope, Generation


class RoughLink:
    """As AgentLink. Nothing overtakes what was said before it."""

    def __init__(self, link: AgentLink, clock: OwnClock) -> None:
        self._link, self._clock = link, clock
        self._drops_until = self._delays_until = float("-inf")
        self._delay = 0.0
        self._out: deque[tuple[float, Body, Generation]] = deque()
        self._in: deque[tuple[float, Envelope[Body]]] = deque()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._link.socket

    def drop(self, seconds: float) -> None:
        """From now on, for so long, nothing comes through; what is on its way is lost, too."""
        self._drops_until = self._clock.now + seconds
        self._out.clear()
        self._in.clear()

    def delay(self, delay: float, seconds: float) -> None:
        self._delay, self._delays_until = delay, self._clock.now + seconds

    def due(self) -> float | None:
        """When something that is held back has to go on; None: nothing is."""
        return min((queue[0][0] for queue in (self._out, self._in) if queue), default=None)

    def send(self, body: Body, generation: Generation) -> None:
        if self._drops:
            return
        if self._delays or self._out:
            self._out.append((self._due_after(self._out), body, generation))
            self._flush()
        else:
            self._link.send(body, generation)

    def receive(self) -> Envelope[Body] | None:
        self._flush()
        while (envelope := self._link.receive()) is not None:
            if self._drops:
                continue
            if not (self._delays or self._in):
                return envelope
            self._in.append((self._due_after(self._in), envelope))
        if self._in and self._in[0][0] <= self._clock.now:
            return self._in.popleft()[1]
        return None

    def close(self, linger: float = 0.0) -> None:
        self._link.close(linger)

    @property
    def _drops(self) -> bool:
        return self._clock.now < self._drops_until

    @property
    def _delays(self) -> bool:
        return self._clock.now < self._delays_until

    def _due_after(self, queue: deque[tuple[float, Body, Generation]] | deque[tuple[float, Envelope[Body]]]) -> float:
        now = self._clock.now
        return max(now + self._delay if self._delays else now, queue[-1][0] if queue else now)

    def _flush(self) -> None:
        while self._out and self._out[0][0] <= self._clock.now:
            _, body, generation = self._out.popleft()
            self._link.send(body, generation)
