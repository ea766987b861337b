"""Who belongs to a job and what every node has to make true: a pure state machine, (state, event, now) -> (state, actions).

No I/O, no clock, no threads. Nodes are told wishes (`wishes.py`), not commands: a wish may be repeated, come late or not at
all, and a report is the whole state of its node, so lost and doubled messages need no special care. Every generation
is a (term, n); whatever speaks of an older one is ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE, EXIT_OK, EXIT_SIGNAL_BASE, EXIT_WORKER_FAILED
from phoenix_launch.job import placement
from phoenix_launch.job.events import (
    Action,
    Admitted,
    AgentEnded,
    ChannelClosed,
    Event,
    FaultFound,
    Fence,
    Finished,
    GaveUp,
    GenerationBegun,
    GenerationRuns,
    OutputHeld,
    Relaunch,
    Reported,
    StopAsked,
    Ticked,
    WaitingForNode,
)
from phoenix_launch.job.placement import Candidate, Seat
from phoenix_launch.job.state import SIGTERM, Ended, Endpoint, Member, NodeState, Outcome, Phase, Rules, State, how
from phoenix_launch.messages import Generation, NodeReport

UNDER_WAY: Final = 0.1  # seconds by which a node's last report may come after its end
HURRIED_GRACE: Final = 3.0  # seconds that are left to the workers after a second stop request; after a third none


def start(rules: Rules, term: int, now: float) -> State:
    """The state of a job that nobody joined yet. Its first generation will be (term, 1)."""
    return State(rules=rules, generation=Generation(term, 0), since=now)


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """One transition. Never raises for anything a peer may have said."""
    if state.phase is Phase.FINISHED:
        return state, ()
    work = _Transition(state, now)
    work.take(event)
    work.settle()
    return work.state, tuple(work.actions)


class _Transition:
    """One step under way: the state so far and the actions it brought."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    # --- what each event does ---

    def take(self, event: Event) -> None:
        match event:
            case Admitted():
                self._admit(event)
            case Reported(index, report):
                self._report(index, report)
            case ChannelClosed(index):
                member = self.state.members.get(index)
                if member is not None and member.state in (NodeState.READY, NodeState.STARTING):
                    self._update(index, state=NodeState.SUSPECT, suspect_since=self.now)
            case AgentEnded(index, incarnation, detail):
                self._agent_ended(index, incarnation, detail)
            case StopAsked(signal):
                self._stop(signal)
            case GaveUp(outcome):
                if self.state.phase is not Phase.LEAVING:
                    self._leave(outcome)
            case OutputHeld():
                if self.state.phase is Phase.LEAVING:
                    self.state = replace(self.state, since=self.now)
            case Ticked():
                pass

    def _admit(self, event: Admitted) -> None:
        known = self.state.members.get(event.index)
        if known is not None and (known.alive or known.incarnation == event.incarnation):
            return  # said twice, or a second agent for a node that has one: the first stays
        if known is not None and known.failures > self.state.rules.max_failures_per_host:
            return
        began = self.state.phase is not Phase.STARTING
        if not self.state.members:  # from here on the others are waited for
            self.state = replace(self.state, since=self.now)
        member = Member(
            index=event.index, name=event.name, domain=event.domain, slots=event.slots, incarnation=event.incarnation,
            spare=event.spare or began, group_rank=event.group_rank, heard=self.now,
            failures=known.failures if known else 0,
        )  # fmt: skip
        self.state = replace(self.state, members={**self.state.members, event.index: member})

    def _report(self, index: int, report: NodeReport) -> None:
        member = self.state.members.get(index)
        if member is None or member.incarnation != report.incarnation or not member.alive or report.seq <= member.seq:
            return
        state = member.state
        if state is NodeState.SUSPECT or (state is NodeState.STARTING and report.prepared):
            state = NodeState.READY if report.prepared else NodeState.STARTING
        self._update(
            index, state=state, heard=self.now, reported=self.now, seq=report.seq, parked=report.parked,
            quiesced=report.quiesced, applied=report.applied, live=sum(1 for r in report.ranks if r.exit is None),
        )  # fmt: skip
        if report.complaint:
            self._lose(index, report.complaint)
            return
        current = self.state.generation
        if report.store is not None and report.store.generation == current and index == self.state.store_node:
            self._store_told(report.store.address, report.store.port, report.store.error)
        here = {place.rank for place in self.state.places if place.node == index}
        for rank in report.ranks:
            if rank.exit is None or rank.generation != current or rank.rank not in here:
                continue
            known = self.state.ended.get(rank.rank)
            if known is None:
                known = Ended(rank=rank.rank, node=index, at=self.now - max(0.0, rank.exit.age), report=rank.exit)
            elif (known.report.tail, known.report.error) == (rank.exit.tail, rank.exit.error):
                continue
            self._ended(replace(known, report=rank.exit))  # its last words may have been read after its end was seen

    def _ended(self, ended: Ended) -> None:
        outcome = self.state.outcome
        if outcome is not None and outcome.cause is not None and outcome.cause.rank == ended.rank:
            outcome = replace(outcome, cause=ended)
        self.state = replace(self.state, ended={**self.state.ended, ended.rank: ended}, outcome=outcome)

    def _store_told(self, address: str, port: int, error: str) -> None:
        if not error:
            self.state = replace(self.state, store=Endpoint(address, port))
        elif self.state.phase is Phase.QUIESCING and self.state.store is None:
            if not (self.state.rules.master_port and self.state.generation.n == self.state.first):
                self._lose(self.state.store_node, f"its store cannot start: {error}")  # another node hosts the next one
                return
            self._leave(
                Outcome(
                    exit_code=EXIT_WORKER_FAILED, text=f"the store of {self.state.generation} cannot start: {error}",
                    hint="choose another --master-port, or leave it to phoenix-run",
                )
            )  # fmt: skip

    def _agent_ended(self, index: int, incarnation: str, detail: str) -> None:
        member = self.state.members.get(index)
        if member is None or member.incarnation != incarnation or member.left:
            return
        if self.state.phase is Phase.LEAVING:
            self._update(index, left=True, live=0)
        elif member.alive:
            self._lose(index, detail or "its agent ended")

    def _stop(self, signal: int) -> None:
        """The first request passes its signal on and waits; each further one only shortens the wait."""
        state = self.state
        if state.phase is Phase.LEAVING:
            return
        if state.phase is Phase.STOPPING:
            left = max(0.0, state.since + state.grace - self.now)
            grace = min(left, HURRIED_GRACE) if state.grace > HURRIED_GRACE else 0.0
            self._enter(Phase.STOPPING, grace=grace)  # an agent counts a grace from when it hears of it: so do we
            return
        outcome = Outcome(exit_code=EXIT_SIGNAL_BASE + signal, text=f"stopped by signal {signal}")
        if any(member.alive for member in state.members.values()) and state.phase is not Phase.STARTING:
            self._enter(Phase.STOPPING, outcome=outcome, signal=signal, grace=state.rules.shutdown_timeout)
        else:
            self._leave(outcome)

    # --- what follows from the state, whatever the event was ---

    def settle(self) -> None:
        """Find lost nodes, then move from phase to phase until nothing more follows."""
        self._find_lost()
        for _ in range(len(Phase)):  # each turn moves on at least one phase; the bound is a guard, not a tuning
            before = self.state.phase
            match before:
                case Phase.STARTING:
                    self._settle_starting()
                case Phase.QUIESCING:
                    self._settle_quiescing()
                case Phase.RUNNING:
                    self._settle_running()
                case Phase.WAITING:
                    self._settle_waiting()
                case Phase.STOPPING:
                    self._settle_stopping()
                case Phase.LEAVING:
                    self._settle_leaving()
                case Phase.FINISHED:
                    return
            if self.state.phase is before:
                return

    def _find_lost(self) -> None:
        rules = self.state.rules
        for index, member in list(self.state.members.items()):
            if not member.alive:
                continue
            if self.now - member.heard > rules.heartbeat_timeout:
                self._lose(index, f"not heard of for {rules.heartbeat_timeout:g} s")
            elif member.state is NodeState.SUSPECT and self.now - member.suspect_since > rules.probe_timeout:
                self._lose(index, "its connection closed and it does not answer")

    def _settle_starting(self) -> None:
        rules, candidates = self.state.rules, self._candidates()
        training = [c for c in candidates if not c.spare]
        here = [m for m in self.state.members.values() if m.alive]
        patience = rules.join_timeout if self.state.members else rules.join_timeout + rules.start_timeout
        late = self.now - self.state.since > patience
        loading = len(here) > len(candidates)  # that has its own timeout: a node that came in time is waited for
        if len(training) >= rules.seats_max or (late and not loading and len(candidates) >= rules.seats_min):
            lineup = placement.first_lineup(candidates, min(rules.seats_max, len(candidates)))
        elif self._starting_spares_must_help(training, candidates):
            lineup = placement.first_lineup(candidates, rules.seats_max)
        else:
            lineup = None
        if lineup is not None:
            self._begin(lineup)
        elif late and len(here) < rules.seats_min:
            self._leave(self._too_few(here))

    def _starting_spares_must_help(self, training: list[Candidate], candidates: list[Candidate]) -> bool:
        """A training node was lost before the start: no use waiting for it when a spare node is ready."""
        gone = [m for m in self.state.members.values() if not m.alive and not m.spare]
        return bool(gone) and len(training) + len(gone) >= self.state.rules.seats_max <= len(candidates)

    def _too_few(self, here: list[Member]) -> Outcome:
        names = ", ".join(m.name for m in here) or "none"
        return Outcome(
            exit_code=EXIT_WORKER_FAILED,
            text=f"{len(here)} of {self.state.rules.seats_min} nodes came within "
            f"{self.state.rules.join_timeout:g} s (here: {names})",
            hint="start the same command on the other hosts, or raise join_timeout in --rdzv-conf",
        )

    def _settle_quiescing(self) -> None:
        state = self.state
        if self._seat_empty():
            self._refill()
            return
        alive = [m for m in state.members.values() if m.alive]
        seated = {seat.node for seat in state.lineup}
        slow = [m for m in alive if m.quiesced < state.generation and (m.index in seated or m.live)]
        if not slow and state.store is not None:
            self._enter(Phase.RUNNING)
            self.actions.append(GenerationRuns(state.generation))
        elif self.now - state.since > state.rules.shutdown_timeout + state.rules.teardown_timeout:
            for member in slow or [state.members[state.store_node]]:
                self._lose(member.index, "did not end its old workers in time" if slow else "its store did not start")
            self._refill()

    def _settle_running(self) -> None:
        state = self.state
        failed = [ended for ended in state.ended.values() if ended.report.code != 0]
        if failed:
            self._worker_failed(min(failed, key=lambda ended: (ended.at, ended.rank)))
        elif len(state.ended) == len(state.places):
            self._leave(Outcome(exit_code=EXIT_OK, text="finished"))
        elif self._seat_empty():
            self._refill()
        elif self.now - state.since > state.rules.start_timeout:
            seated = {seat.node for seat in state.lineup}
            for member in [m for m in state.members.values() if m.alive and m.index in seated]:
                if member.applied < state.generation:
                    self._lose(member.index, f"did not start its workers within {state.rules.start_timeout:g} s")
            if self._seat_empty():
                self._refill()

    def _worker_failed(self, cause: Ended) -> None:
        """Count it against --max-restarts, unless it may only follow from the loss of another node, which never counts."""
        state, exhausted = self.state, self.state.restarts_used >= self.state.rules.max_restarts
        silent = [m for m in self._unfinished() if m.index != cause.node and _silent_since(m, cause)]
        if any(not member.alive for member in silent):
            self._refill()
            return
        if silent and exhausted:
            return  # each is heard of or lost before long
        self.actions.append(
            FaultFound(kind="worker", node=cause.node, ranks=(cause.rank,), detail=how(cause.report.code), cause=cause)
        )
        if exhausted:
            self._enter(
                Phase.STOPPING, outcome=self._failure(cause), signal=SIGTERM, grace=state.rules.shutdown_timeout
            )
            return
        self.state = replace(state, restarts_used=state.restarts_used + 1, charged=cause)
        self._refill()

    def _settle_waiting(self) -> None:
        refilled = placement.refilled(self.state.lineup, self._seatable(), self.state.rules.seats_min)
        if refilled is not None:
            self._begin(refilled)
        elif self.now - self.state.since > self.state.rules.spare_timeout:
            names = ", ".join(m.name for m in self._missing())
            outcome = Outcome(
                exit_code=EXIT_DO_NOT_REQUEUE,
                text=f"{names} lost and no spare node came within {self.state.rules.spare_timeout:g} s",
                hint="give the job spare nodes (--spares), or start it again without that host",
            )
            self._enter(Phase.STOPPING, outcome=outcome, signal=SIGTERM, grace=self.state.rules.shutdown_timeout)

    def _settle_stopping(self) -> None:
        state = self.state
        assert state.outcome is not None
        self._earlier_cause()
        over = self.now - state.since > state.grace + state.rules.teardown_timeout
        if over or all(m.live == 0 for m in state.members.values() if m.alive):
            self._leave(self.state.outcome or state.outcome)

    def _earlier_cause(self) -> None:
        """The first report of a failure need not be that of the first failure: a later report with an older date wins."""
        outcome = self.state.outcome
        if outcome is None or outcome.cause is None:
            return
        cause = outcome.cause
        for ended in self.state.ended.values():
            if ended.report.code != 0 and ended.at < cause.at:
                cause = ended
        if cause is not outcome.cause:
            self.state = replace(self.state, outcome=self._failure(cause))

    def _failure(self, cause: Ended) -> Outcome:
        """The end of a job because of this worker; a signal's number becomes 128 + it where its code is passed on."""
        code, name = cause.report.code, self.state.members[cause.node].name
        passed_on = code if code >= 0 else EXIT_SIGNAL_BASE - code
        return Outcome(
            exit_code=passed_on if self.state.rules.worker_exit_code else EXIT_WORKER_FAILED,
            text=f"rank {cause.rank} on {name} {how(code)}",
            cause=cause,
        )

    def _settle_leaving(self) -> None:
        state = self.state
        assert state.outcome is not None
        over = self.now - state.since > state.rules.teardown_timeout
        if over or not any(member.alive for member in state.members.values()):
            self._enter(Phase.FINISHED)
            self.actions.append(Finished(state.outcome))

    # --- pieces ---

    def _update(self, index: int, **changes: object) -> None:
        member = replace(self.state.members[index], **changes)  # type: ignore[arg-type]
        self.state = replace(self.state, members={**self.state.members, index: member})

    def _enter(self, phase: Phase, **changes: object) -> None:
        self.state = replace(self.state, phase=phase, since=self.now, **changes)  # type: ignore[arg-type]

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

    def _lose(self, index: int, detail: str) -> None:
        member = self.state.members[index]
        if not member.alive:
            return
        ranks = tuple(p.rank for p in self.state.places if p.node == index and p.rank not in self.state.ended)
        self._update(index, state=NodeState.LOST, live=0, failures=member.failures + 1)
        self.actions.append(Fence(index, member.incarnation))
        self._excuse(member)
        if self.state.phase in (Phase.LEAVING, Phase.STOPPING):
            return
        self.actions.append(FaultFound(kind="node", node=index, ranks=ranks, detail=detail))
        if member.failures + 1 <= self.state.rules.max_failures_per_host:
            self.actions.append(Relaunch(index))

    def _excuse(self, lost: Member) -> None:
        """A worker's end that was counted turns out to have followed from the loss of this node."""
        state, cause = self.state, self.state.charged
        if cause is None or lost.index == cause.node or not _silent_since(lost, cause):
            return
        if any(seat.node == lost.index for seat in state.lineup):
            self.state = replace(state, restarts_used=state.restarts_used - 1, charged=None)

    def _refill(self) -> None:
        """All run again: empty seats go to spare nodes; else shrink if the user allowed it; else wait for a host."""
        self.state = replace(self.state, ended={})  # a node whose ranks had ended well is missed now, too
        state = self.state
        lineup = placement.refilled(state.lineup, self._seatable(), state.rules.seats_min)
        if lineup is not None:
            self._begin(lineup)
            return
        names = ", ".join(m.name for m in self._missing())
        self._enter(Phase.WAITING, generation=state.generation.following(), store=None, store_node=-1)
        self.actions.append(WaitingForNode(f"no spare node for {names}: waiting up to {state.rules.spare_timeout:g} s"))

    def _begin(self, lineup: tuple[Seat, ...]) -> None:
        """Start the next generation: everything older ends, its store starts on a live node of the line-up."""
        state = self.state
        waited = state.phase is Phase.WAITING  # the generation that waits is the one that begins: no worker was in it
        generation = state.generation if waited else state.generation.following()
        before = {place.rank: place.node for place in state.places}
        self._enter(
            Phase.QUIESCING, generation=generation, lineup=lineup, store=None, store_node=lineup[0].node, ended={},
            first=state.first if state.lineup else generation.n,
        )  # fmt: skip
        moved = tuple(
            (p.rank, before[p.rank], p.node) for p in self.state.places if before.get(p.rank, p.node) != p.node
        )
        self.actions.append(GenerationBegun(generation, moved))


def _silent_since(member: Member, cause: Ended) -> bool:
    """Whether the node may have died before this worker did."""
    return member.reported < cause.at + UNDER_WAY
