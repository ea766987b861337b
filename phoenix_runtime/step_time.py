"""What a step takes as a rule: who looks for ranks that hang measures their silence by it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Final

from phoenix_runtime import link

PACE_STEPS: Final = 31  # from which the usual time of a step is taken


class Pace:
    """How long steps take here, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self._last = 0.0
        self._steps: deque[float] = deque(maxlen=PACE_STEPS)

    def finished(self) -> None:
        now = time.monotonic()
        if self._last:
            self._steps.append(now - self._last)
            link.typical(statistics.median(self._steps))
        self._last = now
