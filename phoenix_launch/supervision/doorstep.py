"""Tells a supervisor that is not there yet from one who listens and does not know our key: libzmq itself tries for ever."""

from __future__ import annotations

from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

EVENTS: Final = zmq.Event.CONNECTED | zmq.Event.CLOSED | zmq.Event.HANDSHAKE_SUCCEEDED


class Doorstep:
    """What became of the attempts to be let in.

    `since`: from when on somebody took our connections and let none of them in, by the caller's clock; None when nobody
    listens (any more), or when we were let in. A wrong key shows only by the handshake that never succeeds.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.let_in = False

    def take(self, event: zmq.Event, now: float) -> None:
        match event:
            case zmq.Event.CONNECTED:
                self.since = now if self.since is None and not self.let_in else self.since
            case zmq.Event.CLOSED:  # an attempt that nobody took
                self.since = None
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self.let_in, self.since = True, None

    def shut_out(self, now: float, patience: float) -> bool:
        """Whether it was so for `patience` seconds: whoever owned the port before us had the time to go."""
        return self.since is not None and now - self.since >= patience


def look(monitor: zmq.Socket[bytes] | None, doorstep: Doorstep, now: float) -> None:
    """Take in what libzmq has told of the connection so far."""
    while monitor is not None and monitor.poll(0):
        doorstep.take(zmq.Event(recv_monitor_message(monitor, zmq.NOBLOCK)["event"]), now)
