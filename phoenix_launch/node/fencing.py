"""What a node without a supervisor does, and which supervisor it obeys: it goes on as long as its workers do, and ends them
when they stand still, so that nothing computes beside those who take their place. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phoenix_launch.messages import NodePlan, RankReport, Standstill

STEPS: Final = 3.0  # usual steps without any move
UNBEGUN_HEARTBEATS: Final = 5.0  # the patience of a node in a job that has not begun: there is nothing to go on with


def must_end(silent: float, ranks: Iterable[RankReport], heartbeat: float, first_step: float) -> bool:
    """Whether a node ends its workers by itself. `silent`: seconds without a word from the supervisor.

    Who is past its last step waits, and loses nothing by it; who does not know the runtime does not say whether it moves.
    """
    if silent < heartbeat:
        return False
    working = [r for r in ranks if r.exit is None and r.runtime is not None and not r.runtime.leaving]
    return bool(working) and all(r.still is not None and stands(r.still, heartbeat, first_step) for r in working)


def stands(still: Standstill, heartbeat: float, first_step: float) -> bool:
    """Whether it has not moved for so long that somebody it waits for is gone."""
    if still.allowed:
        return still.age >= max(heartbeat, still.allowed)
    return still.age >= (max(heartbeat, STEPS * still.typical) if still.typical else first_step)


def patience(plan: NodePlan | None, heartbeat: float, orphan: float) -> float:
    """Seconds without a supervisor after which the node ends."""
    begun = plan is not None and plan.generation.n > 0
    return orphan if begun else min(orphan, UNBEGUN_HEARTBEATS * heartbeat)


@dataclass(slots=True)
class Allegiance:
    """Whom a node obeys, for its life. First a new supervisor is promised that no lower term is granted any more, which changes
    nothing for the old one; when most nodes have promised it, it is obeyed. `claimant`: its public key."""

    term: int  # of the supervisor that is obeyed
    promised: int = 0
    claimant: str = ""

    def promise(self, term: int, claimant: str) -> bool:
        if term <= max(self.term, self.promised):
            return False
        self.promised, self.claimant = term, claimant
        return True

    def follow(self, term: int, claimant: str) -> bool:
        if term <= self.term or term < self.promised or (term == self.promised and claimant != self.claimant):
            return False
        self.term = self.promised = term
        self.claimant = claimant
        return True

    @property
    def highest(self) -> int:
        return max(self.term, self.promised)
