"""Decides how long nodes with nothing left to run stay in the job, so that what their workers wrote can still be shown.

A node that leaves drops what nobody has taken from it. So nobody is told to leave before everything is on the screen, for
as long as somebody reads there. Pure: the clock and what the console has done come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from phoenix_launch.messages import NodeReport
from phoenix_launch.wire import Generation

StreamKey = tuple[int, Generation, int]  # rank, generation, stream


@dataclass(slots=True)
class LastOutput:
    """Asked again and again while a job that is over waits. Times in seconds."""

    arrival: float  # how long output may be on its way when the screen takes it
    reader: float  # how long a reader may stand still
    hurried: bool = False  # by the user, who wants no output any more
    given_up: bool = False  # something that was written will not be shown
    _over: dict[StreamKey, int] = field(default_factory=dict)  # of workers that have ended, and their node
    _written: int = -1
    _moved_at: float = 0.0
    _said: bool = False

    def note(self, node: int, report: NodeReport) -> None:
        """Each stream of a worker that has ended will be said to have ended, too."""
        for rank in report.ranks:
            if rank.exit is not None:
                self._over |= {(rank.rank, rank.generation, stream): node for stream in (1, 2)}

    def forget(self, node: int) -> None:
        """It was lost: nothing more comes from there."""
        self._over = {key: owner for key, owner in self._over.items() if owner != node}

    def pending(self, shown: Container[StreamKey], alive: Callable[[int], bool]) -> set[StreamKey]:
        return {key for key, node in self._over.items() if key not in shown and alive(node)}

    def complete(self, now: float, *, pending: bool, written: int, stuck: bool, stopped: bool) -> bool:
        """Whether the nodes may go.

        Args:
            pending: something that workers wrote has not been shown.
            written: bytes shown so far; when they grow, somebody reads.
            stuck: the screen takes nothing at the moment.
            stopped: the user ended the job: his reader is not waited for long.
        """
        if written != self._written:
            self._written, self._moved_at = written, now
        if not pending or self.given_up:
            return True
        patience = self.reader if stuck and not stopped else self.arrival
        self.given_up = self.hurried or now - self._moved_at >= patience
        return self.given_up

    def remark(self, now: float, stuck: bool) -> str:
        """One line when a reader lets the job wait, once; else nothing."""
        if self._said or self.given_up or not stuck or now - self._moved_at < self.arrival:
            return ""
        self._said = True
        return (
            f"the workers have ended, but what they wrote is not read: waiting up to {self.reader:g} s for its reader "
            "(the log files have it all; Ctrl-C ends this)"
        )
