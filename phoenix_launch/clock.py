"""A clock that stands still while its owner does: after a laptop's sleep or a SIGSTOP no deadline is suddenly past."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LATE_SECONDS: Final = 1.0


class OwnClock:
    """Monotonic seconds, less the time by which the owner's own loop came late.

    The owner calls `tick` after each wait with the longest time the wait could have taken; what is more than
    `LATE_SECONDS` beyond it was not lived through, and is left out. Between two ticks the clock stands still: its owner
    may be stopped anywhere, and nothing may look overdue before the tick has seen that.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._left_out = 0.0
        self._last = source()

    @property
    def now(self) -> float:
        """The moment of the last tick."""
        return self._last - self._left_out

    def tick(self, longest_wait: float) -> float:
        """Returns by how many seconds this tick was late, 0.0 when it was in time."""
        moment = self._source()
        late = moment - self._last - longest_wait
        self._last = moment
        if late <= LATE_SECONDS:
            return 0.0
        self._left_out += late
        return late
