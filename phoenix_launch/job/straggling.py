"""A rank for which the others wait in every step: it is told, and, if that was asked for, its node's ranks move. Pure."""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.job import holding, placement, stragglers
from phoenix_launch.job.events import FaultFound, StragglerFound
from phoenix_launch.job.hanging import Hanging
from phoenix_launch.job.state import Slow

SLOW = "slow"


class Straggling(Hanging):
    def _straggles(self) -> bool:
        """Whether a straggler is being replaced."""
        state = self.state
        if not state.slow and all(holder.pace is None for holder in state.holders.values()):
            return False
        if state.looked_at is not None and self.now - state.looked_at < stragglers.LOOK:
            return False
        slow = stragglers.watched(state.slow, state.holders, self.now)
        for rank, each in slow.items():
            before = state.slow.get(rank)
            if each.told and not (before is not None and before.told and before.born == each.born):
                self._tell(rank, each)
        for rank, each in state.slow.items():
            if each.told and rank in state.holders and (rank not in slow or slow[rank].born != each.born):
                self._tell(rank, each, over=True)
        self.state = replace(state, slow=slow, looked_at=self.now)
        return self.state.rules.replace_stragglers and self._replaces()

    def _tell(self, rank: int, slow: Slow, *, over: bool = False) -> None:
        node = self.state.holders[rank].node
        self.actions.append(
            StragglerFound(rank=rank, node=node, compute=slow.compute, median=slow.median, over=over)
        )  # fmt: skip

    def _replaces(self) -> bool:
        """The slowest one's node gives up its ranks, if a spare node can take them and none was replaced a short time ago."""
        state = self.state
        told = [(each.factor, rank) for rank, each in state.slow.items() if each.told and not each.calming]
        if not told or (state.moved_at is not None and self.now - state.moved_at < stragglers.PAUSE):
            return False
        factor, slowest = max(told)
        node = state.holders[slowest].node
        others = [
            c for c in self._seatable() if c.index != node and not state.members[c.index].avoided
        ]  # fmt: skip
        if placement.refilled(state.lineup, others, len(state.lineup)) is None:
            return False
        ranks = tuple(place.rank for place in state.places if place.node == node and holding.held(state, place.rank))
        each = state.slow[slowest]
        detail = (
            f"{'move' if len(ranks) > 1 else 'moves'} to a spare node: rank {slowest} takes {each.compute:.2f} s for its part "
            f"of a step, {factor:.1f}x as long as its peers"
        )
        self.actions.append(FaultFound(kind="straggler", node=node, ranks=ranks, detail=detail))
        self._update(node, avoided=True)
        self.state = replace(
            self.state, condemned=frozenset(ranks), verdict=SLOW, stacks_since=self.now, moved_at=self.now
        )
        return True
