"""Who belongs to a job and what every node has to make true: a pure state machine, (state, event, now) -> (state, actions).

No I/O, no clock, no threads. Nodes are told wishes (`wishes.py`), not commands: a wish may be repeated, come late or not at
all, and a report is the whole state of its node, so lost and doubled messages need no special care. Every generation
is a (term, n); whatever speaks of an older one is ignored.
"""

from __future__ import annotations

from dataclasses import replace

from phoenix_launch.errors import EXIT_DO_NOT_REQUEUE, EXIT_OK, EXIT_WORKER_FAILED
from phoenix_launch.job import holding
from phoenix_launch.job.corruption import Corrupted
from phoenix_launch.job.draining import Draining
from phoenix_launch.job.events import (
    Action,
    Admitted,
    AgentEnded,
    ChannelClosed,
    DrainAsked,
    Event,
    FaultFound,
    GaveUp,
    HostAdded,
    OutputHeld,
    Reported,
    Resumed,
    StacksTaken,
    StopAsked,
    Ticked,
)
from phoenix_launch.job.resuming import Resuming
from phoenix_launch.job.starting import Starting
from phoenix_launch.job.state import SIGTERM, Ended, Holder, Member, NodeState, Outcome, Phase, Rules, State, how
from phoenix_launch.job.transition import silent_since
from phoenix_launch.messages import NodeReport, NoRoom
from phoenix_launch.wire import Generation
from phoenix_launch.wording import ranks_named, size_named


def start(rules: Rules, term: int, now: float) -> State:
    """The state of a job that nobody joined yet. Its first generation will be (term, 1)."""
    return State(rules=rules, generation=Generation(term, 0), term=term, since=now)


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """One transition. Never raises for anything a peer may have said."""
    if state.phase is Phase.FINISHED:
        return state, ()
    work = _Transition(state, now)
    work.take(event)
    work.settle()
    return work.state, tuple(work.actions)


class _Transition(Corrupted, Resuming, Starting, Draining):
    # --- what each event does ---

    def take(self, event: Event) -> None:
        match event:
            case Admitted():
                self._admit(event)
            case Reported(index, report):
                self._report(index, report)
            case Resumed(_, nodes):
                self._inherit(event)
                for index, node in nodes.items():
                    self._report(index, node.report)
                self._go_on(event)
            case ChannelClosed(index):
                member = self.state.members.get(index)
                if member is not None and member.state in (NodeState.READY, NodeState.STARTING):
                    self._update(index, state=NodeState.SUSPECT, suspect_since=self.now)
            case AgentEnded(index, incarnation, detail):
                self._agent_ended(index, incarnation, detail)
            case StopAsked(signal):
                self._stop(signal)
            case DrainAsked(index):
                self._drain(index)
            case HostAdded(index):
                if index in self.state.members and not self.state.members[index].alive:
                    self._update(index, failures=0, avoided=False)
            case GaveUp(outcome):
                if self.state.phase is not Phase.LEAVING:
                    self._leave(outcome)
            case OutputHeld():
                if self.state.phase is Phase.LEAVING:
                    self.state = replace(self.state, since=self.now)
            case StacksTaken():
                self._stacks(event)
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
            failures=known.failures if known else 0, avoided=known is not None and known.avoided,
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
            offered=report.offered, kept=report.kept, server=report.slots,
        )  # fmt: skip
        if report.complaint:
            self._lose(index, report.complaint)
            return
        current = self.state.generation
        if report.store is not None and report.store.generation == current and index == self.state.store_node:
            self._store_told(report.store.address, report.store.port, report.store.error)
        news: dict[int, Holder] = {}
        for rank in report.ranks:
            holder = self.state.holders.get(rank.rank)
            if holder is None or rank.generation != holder.born or holder.node != index:
                continue
            runtime = holder.runtime if rank.runtime is None else rank.runtime
            at = rank.step if rank.step >= 0 else holder.step
            new = replace(holder, seen=True, step=at, runtime=runtime, inside=rank.inside, still=rank.still,
                          pace=rank.pace)  # fmt: skip
            if new != holder:
                news[rank.rank] = new
            if rank.exit is None:
                continue
            known = self.state.ended.get(rank.rank)
            if known is None:
                known = Ended(rank=rank.rank, node=index, at=self.now - max(0.0, rank.exit.age), report=rank.exit)
            elif (known.report.tail, known.report.error) == (rank.exit.tail, rank.exit.error):
                continue
            self._ended(replace(known, report=rank.exit))  # its last words may have been read after its end was seen
        if news:
            self.state = replace(self.state, holders={**self.state.holders, **news})

    def _ended(self, ended: Ended) -> None:
        outcome = self.state.outcome
        if outcome is not None and outcome.cause is not None and outcome.cause.rank == ended.rank:
            outcome = replace(outcome, cause=ended)
        self.state = replace(self.state, ended={**self.state.ended, ended.rank: ended}, outcome=outcome)

    def _agent_ended(self, index: int, incarnation: str, detail: str) -> None:
        member = self.state.members.get(index)
        if member is None or member.incarnation != incarnation or member.left:
            return
        if self.state.phase is Phase.LEAVING:
            self._update(index, left=True, live=0)
        elif member.alive:
            self._lose(index, detail or "its agent ended")

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
                case Phase.SWAPPING:
                    self._settle_swapping()
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
                silent = self.now - member.heard
                self._lose(index, f"not heard of for {rules.heartbeat_timeout:g} s", silent)
            elif member.state is NodeState.SUSPECT and self.now - member.suspect_since > rules.probe_timeout:
                silent = self.now - member.suspect_since
                self._lose(index, "its connection closed and it does not answer", silent)

    def _settle_running(self) -> None:
        self._find_corruption()
        if self._halts():
            return
        self._let_go()
        state = self.state
        failed = holding.failed(state)
        too_full = holding.no_room(state)
        if too_full is not None:
            self._enter(
                Phase.STOPPING, outcome=self._no_room(too_full), signal=SIGTERM, grace=state.rules.shutdown_timeout
            )
        elif self._dying:
            self._settle_dying()
        elif (failed or self._seat_empty()) and holding.resilient(state):
            self._repair()
        elif failed:
            self._worker_failed(failed[0])
        elif len(state.ended) == len(state.places):
            self._leave(Outcome(exit_code=EXIT_OK, text="finished"))
        elif not state.leave and not self._seat_empty() and holding.all_leaving(state):
            self.state = replace(state, leave=True)
        elif self._seat_empty():
            self._refill()
        elif self._left_behind() or self._hangs() or self._straggles():
            return
        elif self.now - state.since > state.rules.start_timeout:
            seated = {seat.node for seat in state.lineup}
            for member in [m for m in state.members.values() if m.alive and m.index in seated]:
                if member.applied < state.generation:
                    self._lose(member.index, f"did not start its workers within {state.rules.start_timeout:g} s")
            if self._seat_empty():
                self._settle_running()

    def _left_behind(self) -> bool:
        """Whether the job ends because some rank's script was over too early."""
        state = self.state
        found = holding.left_behind(state)
        if found is None or state.behind is None:
            self.state = replace(state, behind=None if found is None else self.now)
            return False
        if self.now - state.behind <= state.rules.left_behind_timeout:
            return False
        first, other = found
        finished = first.runtime.finished if first.runtime is not None else 0
        outcome = Outcome(
            exit_code=EXIT_WORKER_FAILED,
            text=f"rank {first.rank} ended after step {finished}, while rank {other.rank} is in step {other.inside}",
            hint="all ranks have to run the same number of steps: end the loop by a count, or by what all have agreed upon",
        )
        self._enter(Phase.STOPPING, outcome=outcome, signal=SIGTERM, grace=state.rules.shutdown_timeout)
        return True

    def _worker_failed(self, cause: Ended) -> None:
        """Count it against --max-restarts, unless it may only follow from the loss of another node, which never counts."""
        state, exhausted = self.state, self.state.restarts_used >= self.state.rules.max_restarts
        silent = [m for m in self._unfinished() if m.index != cause.node and silent_since(m, cause)]
        if any(not member.alive for member in silent):
            self._refill()
            return
        if silent and exhausted:
            return  # each is heard of or lost before long
        self.actions.append(
            FaultFound(
                kind="worker", node=cause.node, ranks=(cause.rank,), detail=how(cause.report.code), cause=cause,
                after=self.now - cause.at,
            )
        )  # fmt: skip
        if exhausted:
            self._enter(
                Phase.STOPPING, outcome=self._failure(cause), signal=SIGTERM, grace=state.rules.shutdown_timeout
            )
            return
        self.state = replace(state, restarts_used=state.restarts_used + 1, charged=cause)
        self._refill()

    def _settle_waiting(self) -> None:
        if self.state.swap is not None and not all(holding.held(self.state, rank) for rank in self.state.holders):
            self._repair()
            return
        refilled = self._refilled(self.state.rules.seats_min)
        if refilled is not None and self.state.swap is not None:
            self._swap(holding.lost(self.state))
        elif refilled is not None:
            self._begin(refilled)
        elif self.now - self.state.since > self.state.rules.spare_timeout:
            grace = self.state.rules.shutdown_timeout
            self._enter(Phase.STOPPING, outcome=self._no_spare(), signal=SIGTERM, grace=grace)

    def _no_spare(self) -> Outcome:
        state = self.state
        names = ", ".join(member.name for member in self._missing())
        hint = "give the job spare nodes (--spares), or start it again without that host"
        text = f"{names} lost and no spare node came within {state.rules.spare_timeout:g} s"
        if holding.resilient(state):
            kept = ranks_named([rank for rank in state.holders if holding.held(state, rank)])
            text += f"; {kept} waited with the training state in memory" if state.swap is not None else ""
            hint += ". The copies in memory end with this job: the next one goes on from the script's own checkpoint"
        return Outcome(exit_code=EXIT_DO_NOT_REQUEUE, text=text, hint=hint)

    def _no_room(self, found: NoRoom) -> Outcome:
        name = self.state.members[found.node].name
        ways = [f"--copy-memory of at least {size_named(found.need)}" if found.limited else "fewer ranks on a node"]
        if found.replicas and self.state.rules.replicas:
            ways.append("--replicas 0 (a lost node's state is lost then)")
        ways.append("--snapshot-interval 0 (no copies: a failure starts the script again)")
        return Outcome(
            exit_code=EXIT_DO_NOT_REQUEUE,
            text=f"the copies of the training state do not fit on {name}: {found.why}",
            hint=", or ".join(ways),
        )
