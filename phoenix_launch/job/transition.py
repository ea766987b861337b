"""One transition of the state machine under way: what every part of it needs to change the state. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phoenix_launch.errors import EXIT_SIGNAL_BASE, EXIT_WORKER_FAILED
from phoenix_launch.job import placement
from phoenix_launch.job.commit import NO_VERSION
from phoenix_launch.job.events import Action, FaultFound, Fence, GenerationBegun, Relaunch, WaitingForNode
from phoenix_launch.job.placement import Candidate, Seat
from phoenix_launch.job.state import Ended, Holder, Member, NodeState, Outcome, Phase, State, fault

UNDER_WAY: Final = 0.1  # seconds by which a node's last report may come after its end


class Transition:
    """The state so far, and the actions it brought."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def _update(self, index: int, **changes: object) -> None:
        member = replace(self.state.members[index], **changes)  # type: ignore[arg-type]
        self.state = replace(self.state, members={**self.state.members, index: member})

    def _enter(self, phase: Phase, **changes: object) -> None:
        self.state = replace(
            self.state, phase=phase, since=self.now, behind=None, stacks_since=None, condemned=frozenset(), **changes,  # type: ignore[arg-type]
        )  # fmt: skip

    def _leave(self, outcome: Outcome) -> None:
        self._enter(Phase.LEAVING, outcome=outcome)

    def _candidates(self) -> list[Candidate]:
        return [c for c in self._seatable() if c.ready]

    def _seatable(self) -> list[Candidate]:
        """All that live: one that is suspect keeps its seat, else it could run on beside its successor."""
        return [
            Candidate(
                index=m.index, domain=m.domain, slots=m.slots, group_rank=m.group_rank, spare=m.spare, ready=m.usable
            )
            for m in self.state.members.values()
            if m.alive
        ]  # fmt: skip

    def _refilled(self, at_least: int) -> tuple[Seat, ...] | None:
        """Every seat of a node that is gone, or is to be left (which is better than none), goes to another one."""
        lineup, seatable = self.state.lineup, self._seatable()
        good = [c for c in seatable if not self.state.members[c.index].avoided]
        if len(good) < len(seatable):
            found = placement.refilled(lineup, good, len(lineup))
            if found is not None:
                return found
        found = placement.refilled(lineup, seatable, at_least)
        for seat in found or ():
            if self.state.members[seat.node].avoided:
                self._update(seat.node, avoided=False)
        return found

    def _unfinished(self) -> list[Member]:
        """Nodes of the line-up whose ranks have not all ended well."""
        state = self.state
        unfinished = {p.node for p in state.places if p.rank not in state.ended or state.ended[p.rank].report.code}
        return [m for m in state.members.values() if m.index in unfinished]

    def _missing(self) -> list[Member]:
        """Those of them that are gone."""
        return [m for m in self._unfinished() if not m.alive]

    def _seat_empty(self) -> bool:
        return bool(self._missing())

    def _lose(self, index: int, detail: str, after: float = 0.0) -> None:
        member = self.state.members[index]
        if not member.alive:
            return
        ranks = tuple(p.rank for p in self.state.places if p.node == index and p.rank not in self.state.ended)
        self._update(index, state=NodeState.LOST, live=0, failures=member.failures + 1)
        self.actions.append(Fence(index, member.incarnation))
        self._excuse(member)
        if self.state.phase in (Phase.LEAVING, Phase.STOPPING):
            return
        self.actions.append(FaultFound(kind="node", node=index, ranks=ranks, detail=detail, after=after))
        if member.failures + 1 <= self.state.rules.max_failures_per_host:
            self.actions.append(Relaunch(index))

    def _excuse(self, lost: Member) -> None:
        """A worker's end that was counted turns out to have followed from the loss of this node."""
        state, cause = self.state, self.state.charged
        if cause is None or lost.index == cause.node or not silent_since(lost, cause):
            return
        if any(seat.node == lost.index for seat in state.lineup):
            self.state = replace(state, restarts_used=state.restarts_used - 1, charged=None)

    def _refill(self) -> None:
        """All run again: empty seats go to spare nodes; else shrink if the user allowed it; else wait for a host."""
        self.state = replace(self.state, ended={})  # a node whose ranks had ended well is missed now, too
        state = self.state
        lineup = self._refilled(state.rules.seats_min)
        if lineup is not None:
            self._begin(lineup)
            return
        names = ", ".join(m.name for m in self._missing())
        generation = state.following
        self._enter(Phase.WAITING, generation=generation, store=None, store_node=-1, holders={}, swap=None)
        if state.phase is Phase.WAITING:  # a further loss does not prolong the wait
            self.state = replace(self.state, since=state.since)
            return
        self.actions.append(WaitingForNode(f"no spare node for {names}: waiting up to {state.rules.spare_timeout:g} s"))

    def _begin(self, lineup: tuple[Seat, ...]) -> None:
        """Start the next generation: everything older ends, its store starts on a live node of the line-up."""
        state = self.state
        waited = state.phase is Phase.WAITING  # the generation that waits is the one that begins: no worker was in it
        generation = state.generation if waited else state.following
        before = {place.rank: place.node for place in state.places}
        self._enter(
            Phase.QUIESCING, generation=generation, lineup=lineup, store=None, store_node=lineup[0].node, ended={},
            first=state.first if state.lineup else generation.n, swap=None, recovery=None, resume=NO_VERSION,
            holders={p.rank: Holder(rank=p.rank, node=p.node, born=generation) for p in placement.places(lineup)},
        )  # fmt: skip
        moved = tuple(
            (p.rank, before[p.rank], p.node) for p in self.state.places if before.get(p.rank, p.node) != p.node
        )
        self.actions.append(GenerationBegun(generation, moved))

    def _failure(self, cause: Ended) -> Outcome:
        """The end of a job because of this worker; a signal's number becomes 128 + it where its code is passed on."""
        code, name = cause.report.code, self.state.members[cause.node].name
        passed_on = (code if code >= 0 else EXIT_SIGNAL_BASE - code) or EXIT_WORKER_FAILED
        return Outcome(
            exit_code=passed_on if self.state.rules.worker_exit_code else EXIT_WORKER_FAILED,
            text=f"rank {cause.rank} on {name} {fault(code)}",
            cause=cause,
        )


def silent_since(member: Member, cause: Ended) -> bool:
    """Whether the node may have died before this worker did."""
    return member.reported < cause.at + UNDER_WAY
