"""How fast a node sends replicas to all its partners together (--replica-bandwidth), and how much it has sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """`rate`: bytes a second, 0: as fast as they go. `total`: bytes that were sent so far, without frames of the protocol."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.total = 0

    def sent(self, count: int) -> float:
        """Seconds to wait before anybody sends more. Time in which nothing was sent is not made up for."""
        with self._lock:
            self.total += count
            if not self._rate:
                return 0.0
            now = self._clock()
            self._free_at = max(self._free_at, now) + count / self._rate
            return self._free_at - now
