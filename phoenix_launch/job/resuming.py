"""Another supervisor takes over, from the state that the last one wrote down and from what the nodes say. Pure.

What was written may be a moment old, a plan may have reached one node and not another. So a job is gone on with as it stands
only when all nodes that follow run the very generation that was written down; what has ended meanwhile is then a fault as
any. A plan that may be half sent is never gone on with: all workers begin anew from the copies in memory, in a generation of
the new term, above whatever was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from phoenix_launch.copies import Stamp
from phoenix_launch.job import holding
from phoenix_launch.job.commit import Lineage
from phoenix_launch.job.events import Inherited, Resumed
from phoenix_launch.job.state import Phase, Rung, State
from phoenix_launch.job.stopping import HALT_SHARE
from phoenix_launch.job.swapping import Swapping
from phoenix_launch.messages import NodePlan, PlanPhase

_ENDING = (Phase.STOPPING, Phase.LEAVING, Phase.FINISHED)


class Resuming(Swapping):
    def _inherit(self, event: Resumed) -> None:
        """The new term, this supervisor's clock, and only those nodes that follow it."""
        now = self.now
        members = {
            index: replace(member, heard=now, reported=now, suspect_since=now, seq=-1)
            for index, member in self.state.members.items()
        }
        ended = {rank: replace(its, at=now) for rank, its in self.state.ended.items()}
        halt = self.state.halt and replace(self.state.halt, until=now + HALT_SHARE * self.state.rules.shutdown_timeout)
        moved_at = None if self.state.moved_at is None else now
        plans = [node.plan for node in event.nodes.values() if node.plan is not None]
        self.state = replace(
            self.state, term=event.term, since=now, members=members, ended=ended, behind=None, stacks_since=None,
            charged=None, condemned=frozenset(), slow={}, moved_at=moved_at, looked_at=None, halt=halt,
            lineage=merged(self.state.lineage, plans),
        )  # fmt: skip
        for index in members:
            if index not in event.nodes:
                self._lose(index, "it did not answer when another supervisor took over")

    def _go_on(self, event: Resumed) -> None:
        state = self.state
        if state.phase in _ENDING or not state.lineup or runs(state, event.nodes):
            return
        newest = max((node.plan.generation for node in event.nodes.values() if node.plan), default=state.generation)
        generation = max(newest, state.generation)
        bundles = holding.bundles(state) or state.bundles
        resilient = holding.resilient(state)
        self.state = replace(state, phase=Phase.RUNNING, generation=generation, bundles=bundles, swap=None)
        if resilient:
            self._anew(Rung.FROM_SLOTS, "the supervisor died while its plan was under way")
        else:
            self._refill()


def runs(state: State, nodes: Mapping[int, Inherited]) -> bool:
    """Whether all that follow run what was written down."""
    if state.phase is not Phase.RUNNING:
        return False
    plans = [nodes[seat.node].plan for seat in state.lineup if seat.node in nodes]
    others = [node.plan for node in nodes.values() if node.plan is not None]
    return all(
        plan is not None and plan.phase is PlanPhase.RUN and plan.generation == state.generation for plan in plans
    ) and all(plan.generation <= state.generation for plan in others)


def merged(lineage: Lineage, plans: Iterable[NodePlan]) -> Lineage:
    """Where any generation resumed that somebody knows of: each entry is true, whoever has heard of it."""
    known: set[Stamp] = set(lineage.resumes)
    for plan in plans:
        known.update(plan.resumption.lineage if plan.resumption is not None else ())
    found = Lineage()
    for stamp in sorted(known, key=lambda stamp: stamp.generation):
        found = found.resumed(stamp.generation, stamp.version)
    return found
