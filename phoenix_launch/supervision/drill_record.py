"""What became of each drill: when its fault was found, when all ranks ran again, when the job was as safe as before. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phoenix_launch.command_messages import DrillKind
from phoenix_launch.job import drills
from phoenix_launch.job.redundancy import FULL, RESTORING, Redundancy

HARMLESS: Final = frozenset(kind.value for kind in drills.HARMLESS)
MAY_HARM: Final = HARMLESS | {kind.value for kind in drills.CUTS}
ENDLESS: Final = frozenset({DrillKind.SLOW.value})  # without a duration: to the end
SETTLED: Final = (
    2.0  # seconds until a drill that harms nobody is over, when it has no duration: what it took is missed by then
)


@dataclass(slots=True)
class Drilled:
    """One drill. `rank` is -1 when it was about the node. Moments by the supervisor's clock; None: not yet."""

    kind: str
    text: str
    node: int
    rank: int
    at: float
    duration: float = 0.0
    before: str = FULL  # how redundant the job was
    found: float | None = None
    ran: float | None = None
    safe: float | None = None
    lost_steps: int | None = None
    until: float | None = None  # it is over then, if no fault has followed

    def is_safe(self, word: str) -> bool:
        return word == FULL or (word == self.before and word != RESTORING)

    def is_past(self, now: float) -> bool:
        return self.ran is None and self.until is not None and now >= self.until

    @property
    def detection(self) -> float | None:
        return None if self.found is None else self.found - self.at

    @property
    def recovery(self) -> float | None:
        return None if self.found is None or self.ran is None else self.ran - self.found

    @property
    def redundancy(self) -> float | None:
        return None if self.ran is None or self.safe is None else self.safe - self.ran

    def told(self) -> str:
        """For the screen."""
        if self.detection is not None and self.recovery is None:
            return f"{self.kind} {self.text}: noticed after {self.detection:.2f} s"
        if self.detection is None or self.recovery is None:
            return f"{self.kind} {self.text}: no fault was found"
        steps = "" if self.lost_steps is None else f", {self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
        after = (
            "not fully redundant since" if self.redundancy is None else f"fully redundant {self.redundancy:.2f} s later"
        )
        return (
            f"{self.kind} {self.text}: found after {self.detection:.2f} s, all ran again {self.recovery:.2f} s "
            f"later{steps}, {after}"
        )


@dataclass(slots=True)
class DrillRecord:
    """Those that are not over. Each method returns what has just ended, if anything can."""

    _open: list[Drilled] = field(default_factory=list)

    def began(self, drilled: Drilled) -> None:
        if drilled.kind in MAY_HARM and (drilled.duration or drilled.kind not in ENDLESS):
            drilled.until = drilled.at + max(drilled.duration, SETTLED) + SETTLED * (drilled.kind not in HARMLESS)
        self._open.append(drilled)

    def fault(self, node: int, ranks: Iterable[int], now: float) -> None:
        """A fault of these ranks, or, without any, of the node: the work of the earliest drill that hit there and was not found
        yet, if there is one."""
        hit = set(ranks)
        for drilled in self._open:
            here = drilled.rank in hit if hit else drilled.rank < 0 and drilled.node == node
            if here and drilled.found is None and drilled.kind not in HARMLESS:
                drilled.found, drilled.until = now, None
                return

    def noticed(self, ranks: Iterable[int], now: float) -> None:
        """Nothing failed, but it was seen that something is wrong with these."""
        for drilled in self._open:
            if drilled.rank in set(ranks) and drilled.found is None:
                drilled.found = now
                drilled.until = now if drilled.kind not in HARMLESS else drilled.until
                return

    def ran(self, now: float, lost_steps: int | None) -> None:
        """All ranks run again."""
        for drilled in self._open:
            if drilled.found is not None and drilled.ran is None and drilled.kind not in HARMLESS:
                drilled.ran, drilled.lost_steps = now, lost_steps

    def redundant(self, redundancy: Redundancy, now: float) -> list[Drilled]:
        """Those that are over now: the job is as safe as it was before, or as it can be."""
        done = [
            drilled
            for drilled in self._open
            if (drilled.ran is not None or drilled.is_past(now)) and drilled.is_safe(redundancy.word)
        ]
        for drilled in done:
            drilled.safe = now if drilled.ran is not None else None
            self._open.remove(drilled)
        return done

    def ended(self) -> list[Drilled]:
        """The job is over."""
        done, self._open = self._open, []
        return done
