"""A node is given up on purpose: its ranks move to a spare node, no step that was done is run again, then it leaves. Pure."""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.errors import UsageError
from phoenix_launch.job import holding, placement
from phoenix_launch.job.events import FaultFound, Fence, NodeDrained
from phoenix_launch.job.state import Halt, NodeState, Phase, State
from phoenix_launch.job.stopping import HALT_SHARE, Stopping
from phoenix_launch.wording import ranks_named

DRAINED = "drain"


def cannot_drain(state: State, index: int) -> str:
    """Why this node cannot be given up now; empty: it can."""
    member = state.members[index]
    if not member.alive:
        return f"{member.name} is {member.state.value}"
    if not any(seat.node == index for seat in state.lineup):
        return ""
    if state.phase is not Phase.RUNNING or state.halt is not None:
        return "ask again when all ranks train: the job is starting, stopping, or in a swap"
    if not holding.resilient(state):
        return f"the script does not use phoenix_runtime: {member.name} cannot be left without a restart of all workers"
    if not room_without(state, index):
        return f"no spare node can take the ranks of {member.name}"
    return ""


def room_without(state: State, index: int) -> bool:
    others = [
        placement.Candidate(index=m.index, domain=m.domain, slots=m.slots, group_rank=m.group_rank, ready=m.usable)
        for m in state.members.values()
        if m.alive and m.index != index and not m.avoided
    ]
    return placement.refilled(state.lineup, others, len(state.lineup)) is not None


def to_drain(state: State, node: str) -> tuple[int, str]:
    """The node by this name or index, and what will happen to it. Raises UsageError: there is none, or it cannot be left."""
    found = [m for m in state.members.values() if node in (m.name, str(m.index))]
    if not found:
        names = ", ".join(m.name for m in state.members.values())
        raise UsageError(f"there is no node {node}", hint=f"nodes are: {names} (or an index)")
    index, name = found[0].index, found[0].name
    if why := cannot_drain(state, index):
        raise UsageError(why)
    ranks = [p.rank for p in state.places if p.node == index]
    moves = f"its {ranks_named(ranks)} move{'s' * (len(ranks) == 1)} to another node" if ranks else "it has no ranks"
    return index, f"{name} is being drained: {moves}"


class Draining(Stopping):
    def _drain(self, index: int) -> None:
        if index not in self.state.members or cannot_drain(self.state, index):
            return  # whoever asked was told so
        self._update(index, avoided=True, draining=True)
        if any(seat.node == index for seat in self.state.lineup):
            until = self.now + HALT_SHARE * self.state.rules.shutdown_timeout
            self.state = replace(self.state, halt=Halt(drain=index, until=until))

    def _after_halt(self, halt: Halt) -> None:
        """All ranks stand at one version, or have not come to it in time."""
        if halt.drain < 0:
            super()._after_halt(halt)
            return
        state = self.state
        self.state = replace(state, halt=None)
        failed = bool(holding.failed(state)) or self._seat_empty()
        if failed or not room_without(state, halt.drain) or not state.members[halt.drain].alive:
            return  # a repair moves them, too; or nothing can
        ranks = tuple(p.rank for p in state.places if p.node == halt.drain and holding.held(state, p.rank))
        detail = f"{'move' if len(ranks) > 1 else 'moves'} to another node: this one is drained"
        self.actions.append(FaultFound(kind=DRAINED, node=halt.drain, ranks=ranks, detail=detail))
        self.state = replace(self.state, condemned=frozenset(ranks), verdict=DRAINED, stacks_since=self.now)

    def _let_go(self) -> None:
        """Nodes that are drained leave as soon as nobody needs a copy that they keep."""
        state = self.state
        for index, member in state.members.items():
            if not member.draining or not member.alive or any(seat.node == index for seat in state.lineup):
                continue
            runtimes = [holder.runtime for holder in state.holders.values()]
            if state.swap is None and all(r is None or r.complete > state.resume for r in runtimes):
                self._update(index, state=NodeState.DRAINED, live=0)
                self.actions += [NodeDrained(index), Fence(index, member.incarnation)]
