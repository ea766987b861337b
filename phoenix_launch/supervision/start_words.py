"""What is said while a start takes long, or an end is asked for again: who is waited for, and how long. Decides only."""

from __future__ import annotations

import signal
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from phoenix_launch.job.state import NodeState, Phase, State
from phoenix_launch.settings import timeout
from phoenix_launch.supervision.muster import Muster
from phoenix_launch.wording import counted, names_listed

SLOW: Final = 2.0  # seconds without a word that nobody wonders about
REPEAT: Final = 30.0  # seconds between two lines about the same hosts


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start is. Times in seconds."""

    here: Sequence[str]  # nodes that have come
    wanted: int  # of them
    wait: float  # that is left for the others; 0: they are not waited for any more
    loading: int  # nodes that were told to load torch and have not


def progress(state: State, muster: Muster, told: Container[str], now: float, *, joins: bool) -> Progress | None:
    """How far the start is; None when it is over. `told`: incarnations that were told to load torch."""
    if state.phase is not Phase.STARTING:
        return None
    alive = [member for member in state.members.values() if member.alive]
    loading = sum(member.state is NodeState.STARTING and member.incarnation in told for member in alive)
    if joins:
        here = [member.name for member in alive if not member.spare]
        return Progress(here, state.rules.seats_max, state.since + state.rules.join_timeout - now, loading)
    crew = list(muster.recruits.values())
    if muster.complete or not any(recruit.spec.host for recruit in crew):
        return Progress((), 0, 0.0, loading)
    heard = [recruit.spec.name for recruit in crew if recruit.facts is not None]
    latest = max(recruit.launched for recruit in crew)
    return Progress(heard, len(crew) + len(muster.waiting), latest + timeout("preflight") - now, loading)


def hurried(number: int, before: State, after: State, *, again: bool, held: bool) -> str:
    """What one more signal does to an end that is under way; nothing when it changes nothing."""
    name = f"{signal.Signals(number).name}{' again' if again else ''}"
    if before.phase is Phase.LEAVING:
        return f"{name}: not waiting for the reader of the output any longer" if held else ""
    if (before.phase is not Phase.STOPPING or not before.grace) and before.halt is None:
        return ""
    return f"{name}: {f'workers have {after.grace:.2g} s' if after.grace else 'killing at once'}"


@dataclass(slots=True)
class StartWords:
    """Asked again and again while the job starts."""

    began: float | None = None
    _counted: int = -1  # nodes that the last line about them spoke of
    _said_at: float = 0.0
    _loading_since: float | None = None
    _said_loading: bool = False

    def due(self, progress: Progress, now: float) -> str:
        """A line that is due now, or nothing."""
        self.began = now if self.began is None else self.began
        return self._waiting(progress, now) or self._loading(progress.loading, now)

    def _waiting(self, progress: Progress, now: float) -> str:
        here, first = len(progress.here), self._counted < 0
        if here >= progress.wanted or progress.wait <= 0 or (first and now - (self.began or 0.0) < SLOW):
            return ""
        if here == self._counted and now - self._said_at < REPEAT:
            return ""
        self._counted, self._said_at = here, now
        node = f"node{'s' * (here != 1)}"
        names = f" ({node} {names_listed(progress.here)})" if here else ""
        return (
            f"{here} of {counted(progress.wanted, 'host')} here{names}; "
            f"waiting up to {progress.wait:.0f} s for the other{'s' * (progress.wanted - here != 1)}"
        )

    def _loading(self, nodes: int, now: float) -> str:
        if not nodes or self._said_loading:
            return ""
        self._loading_since = now if self._loading_since is None else self._loading_since
        if now - self._loading_since < SLOW:
            return ""
        self._said_loading = True
        return f"loading torch and the script's imports on {counted(nodes, 'node')} ..."
