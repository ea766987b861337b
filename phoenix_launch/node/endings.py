"""Ends process trees without stopping the agent's loop: a round of kills at a time, until nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phoenix_launch.node.trees import Claim, living, owners
from phoenix_launch.process_table import ProcessStat, environment_bytes, process_table, send_signal
from phoenix_launch.processes import described


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one round: whose trees are gone, and whether what was nobody's is."""

    cleared: tuple[int, ...]
    swept: bool


class Endings:
    """The trees that are being ended. `remark` is told about a process that will not die."""

    def __init__(self, seconds: float, remark: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._remark = remark
        self._deadlines: dict[int, float] = {}
        self._sweep_deadline: float | None = None
        self.fresh = False  # something was asked for since the last round
        self._agent = os.getpid()

    def end(self, key: int, now: float) -> None:
        self._deadlines.setdefault(key, now + self._seconds)
        self.fresh = True

    def sweep(self, now: float) -> None:
        self._sweep_deadline = now + self._seconds
        self.fresh = True

    @property
    def pending(self) -> bool:
        return bool(self._deadlines) or self._sweep_deadline is not None

    def round(self, claims: Iterable[Claim], now: float, may_sweep: bool, exited: Callable[[int], bool]) -> Round:
        """`exited`: whether the exit code of a key's process is known, without which its tree does not count as gone.

        `may_sweep` is False while a process may exist that belongs to us and has not said so yet.
        """
        self.fresh = False
        table = process_table()
        owned = owners(table, self._agent, claims, environment_bytes)
        cleared = []
        for key, deadline in list(self._deadlines.items()):
            left = living(table, owned, key)
            for process in left:
                send_signal(process, signal.SIGKILL)
            if not left and exited(key):
                cleared.append(key)
            elif now >= deadline:
                if left:
                    self._remark(f"these processes do not die: {described(left)}")
                cleared.append(key)
        for key in cleared:
            del self._deadlines[key]
        return Round(tuple(cleared), self._swept(living(table, owned, None), now, may_sweep))

    def _swept(self, strangers: list[ProcessStat], now: float, may_sweep: bool) -> bool:
        if self._sweep_deadline is None:
            return False
        if may_sweep:
            for process in strangers:
                send_signal(process, signal.SIGKILL)
        late = now >= self._sweep_deadline
        if late and may_sweep and strangers:
            self._remark(f"these processes do not die: {described(strangers)}")
        if late or not strangers:  # while a process may be nobody's for a moment, having none is an answer all the same
            self._sweep_deadline = None
            return True
        return False
