"""A job in which nobody moves: its stacks are saved, then who holds up the others is ended, which is a fault as any. Pure."""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.job import holding
from phoenix_launch.job.events import FaultFound, StacksTaken, StacksWanted
from phoenix_launch.job.hangs import Hang, hang
from phoenix_launch.job.swapping import Swapping

HANG = "hang"
NOBODY = -1  # the node of a hang in which no rank can be named


class Hanging(Swapping):
    def _hangs(self) -> bool:
        """Whether the job hangs, as far as nothing else is to be looked at meanwhile."""
        state = self.state
        if state.condemned:  # none of them lives any more, and none has failed: one may have come to its end just then
            self.state = replace(state, condemned=frozenset(), stacks_since=None)
            return False
        found = hang(state)
        if found is None:
            self.state = replace(state, stacks_since=None) if state.stacks_since is not None else state
            return False
        if state.stacks_since is None:
            self.state = replace(state, stacks_since=self.now, stacks_seen={}, stacks_from=frozenset())
            self.actions.append(StacksWanted(found.age))
            return True
        nodes = {place.node for place in state.places}
        if not nodes <= state.stacks_from and self.now - state.stacks_since < state.rules.stacks_timeout:
            return True
        self._judge(found)
        return True

    def _stacks(self, event: StacksTaken) -> None:
        state, holder = self.state, self.state.holders.get(event.rank)
        if state.stacks_since is None:
            return
        seen = dict(state.stacks_seen)
        if holder is not None and holder.node == event.index and holder.born == event.generation and event.where:
            seen[event.rank] = event.where
        heard = state.stacks_from | {event.index} if event.last else state.stacks_from
        self.state = replace(state, stacks_seen=seen, stacks_from=heard)

    def _judge(self, found: Hang) -> None:
        for rank in found.culprits:
            node = self.state.holders[rank].node
            self.actions.append(FaultFound(kind="hang", node=node, ranks=(rank,), detail=found.detail, after=found.age))
        if found.culprits:
            self.state = replace(self.state, condemned=frozenset(found.culprits), stacks_since=self.now, verdict=HANG)
            return
        ranks = tuple(place.rank for place in self.state.places)
        self.actions.append(FaultFound(kind="hang", node=NOBODY, ranks=ranks, detail=found.detail, after=found.age))
        self.state = replace(self.state, condemned=frozenset(ranks), stacks_since=self.now, verdict=HANG)

    @property
    def _dying(self) -> bool:
        """Some that hang were told to be ended and have not yet: their ends are one fault."""
        state = self.state
        return any(holding.held(state, rank) for rank in state.condemned) and not self._seat_empty()

    def _settle_dying(self) -> None:
        """SIGKILL ends any process, but one that the kernel does not let go; its node is of no use then."""
        state = self.state
        if state.stacks_since is None or self.now - state.stacks_since <= state.rules.teardown_timeout:
            return
        for rank in state.condemned:
            if holding.held(state, rank):
                self._lose(state.holders[rank].node, f"the process of rank {rank} cannot be ended")
