"""What an event loop waits for: descriptors and sockets, each with the function that is called for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import zmq

Watched = int | zmq.Socket[bytes]


class PollLoop:
    """Callbacks run in the thread that calls `dispatch`, one after the other; they may watch and forget as they like."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[Watched, Callable[[], None]] = {}

    def watch(
        self, what: Watched, callback: Callable[[], None], *, readable: bool = True, writable: bool = False
    ) -> None:
        """Again for the same `what`: instead of what was said before."""
        self._poller.register(what, (zmq.POLLIN if readable else 0) | (zmq.POLLOUT if writable else 0))
        self._callbacks[what] = callback

    def forget(self, what: Watched) -> None:
        """To be called before it is closed. Nothing happens when it is not watched."""
        if self._callbacks.pop(what, None) is not None:
            self._poller.unregister(what)

    def wait(self, seconds: float) -> list[Watched]:
        """Until something has happened, at most `seconds`; what it was is for `dispatch`."""
        return [what for what, _ in self._poller.poll(max(0, math.ceil(seconds * 1000)))]

    def dispatch(self, ready: list[Watched]) -> None:
        for what in ready:
            callback = self._callbacks.get(what)
            if callback is not None:
                callback()
