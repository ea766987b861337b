"""Which versions a rank votes to copy: every n-th, or as often as copies hide behind the step. Pure.

A version is copied when all ranks vote for it (`job/commit.py`), so the rank with the widest interval decides. Intervals that
are found are powers of two: those of different ranks meet.
"""

from __future__ import annotations

from typing import Final

from phoenix_launch.settings import AUTO

WIDEST: Final = 64  # steps
ENOUGH: Final = 4  # copies between two changes
TOO_MUCH: Final = 0.02  # of the time between two copies spent waiting for one: copy less often
LITTLE: Final = 0.0025  # try to copy more often; well below half of TOO_MUCH, since that doubles the share


class Cadence:
    """Of one rank. `asked`: --snapshot-interval."""

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.interval = 1 if asked == AUTO else asked
        self._copies = 0
        self._waited = self._elapsed = 0.0

    def ready(self, version: int) -> bool:
        return self.interval > 0 and version % self.interval == 0

    def copied(self, waited: float, elapsed: float) -> None:
        """A version was copied. `waited`: seconds that the training thread had to wait for it; `elapsed`: since the last."""
        if self.asked != AUTO:
            return
        self._copies += 1
        self._waited += waited
        self._elapsed += elapsed
        if self._copies < ENOUGH:
            return
        share = self._waited / self._elapsed if self._elapsed > 0 else 0.0
        if share > TOO_MUCH:
            self.interval = min(WIDEST, self.interval * 2)
        elif share < LITTLE:
            self.interval = max(1, self.interval // 2)
        self._copies, self._waited, self._elapsed = 0, 0.0, 0.0
