"""Threads that wait in the place of others, and may be left behind where they wait.

Each thread does one thing at a time: what it is handed, then it goes back among the idle ones. One that never comes back is
never missed; all are daemons, so that the process ends without them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Final


class Waiters:
    """As many threads as there are waits at the same time."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []  # one for each thread; append and pop are atomic
        os.register_at_fork(after_in_child=self._idle.clear)

    def run(self, wait: Callable[[], None]) -> None:
        """Have `wait` called by another thread, at once. It must not raise."""
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(orders,), name="phoenix-wait", daemon=True).start()
        orders.put(wait)

    def _serve(self, orders: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            orders.get()()  # no deadline: an idle thread waits for its next order as long as the process lives
            self._idle.append(orders)


ELSEWHERE: Final = Waiters()
