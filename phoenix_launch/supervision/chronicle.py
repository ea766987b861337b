"""What is told about a job while it runs: the journal, the lines on the screen, and the document of `status`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from phoenix_launch.bus import BusCounters
from phoenix_launch.errors import EXIT_OK, PhoenixError
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job import events as job_events
from phoenix_launch.job.events import Action
from phoenix_launch.job.last_words import summary
from phoenix_launch.job.state import NodeState, Outcome, Phase, State
from phoenix_launch.messages import Generation, NodeReport, ProcessState, RankReport
from phoenix_launch.records.folders import JobFolder, settings_document
from phoenix_launch.records.journal import Journal
from phoenix_launch.settings import RunSettings
from phoenix_launch.status import JobState, JobStatus, Move, NodeStatus, RankStatus, SwapStatus
from phoenix_launch.supervision.console import Console

RESTART_RUNG = 2  # workers are forked again; the script comes back from its own checkpoint


@dataclass(slots=True)
class _Repair:
    """A change of the map rank -> process under way."""

    generation: Generation
    lost_ranks: tuple[int, ...]
    moves: tuple[Move, ...]
    found: float
    begun: float


@dataclass
class Chronicle:
    """Sees every action and report; decides nothing."""

    folder: JobFolder
    console: Console
    journal: Journal
    hosts: dict[int, str]
    reports: dict[int, NodeReport] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    last_swap: SwapStatus | None = None
    counters: BusCounters = field(default_factory=BusCounters)  # the bus counts, status tells
    _seen_workers: set[tuple[int, Generation]] = field(default_factory=set)
    _seen_parked: set[int] = field(default_factory=set)
    _lost: list[int] = field(default_factory=list)  # ranks lost since the last generation ran
    _fault_at: float = 0.0
    _repair: _Repair | None = None
    _unsaved: bool = False  # said once

    @classmethod
    def open(cls, folder: JobFolder, console: Console, hosts: list[str], settings: RunSettings) -> Chronicle:
        journal = Journal(folder.journal_path, remark=lambda text: console.say(f"phoenix-run: {text}"))
        return cls(folder, console, journal, dict(enumerate(hosts)))

    # --- start and end ---

    def started(self, specs: tuple[NodeSpec, ...], settings: RunSettings, logs: Path) -> None:
        training = settings.nnodes[1] if settings.joins else sum(not spec.spare for spec in specs)
        spares = sum(spec.spare for spec in specs)
        with_spares = f" and {spares} spare node{'s' * (spares != 1)}" if spares else ""
        self.console.say(
            f"phoenix-run: job {self.folder.job}: {training} node{'s' * (training != 1)} x {settings.nproc_per_node} "
            f"worker{'s' * (settings.nproc_per_node != '1')}{with_spares}; logs in {logs}"
        )
        self.journal.write(
            "job_started",
            Generation(1, 0),
            job=self.folder.job,
            nodes=[spec.name for spec in specs if not spec.spare],
            spares=[spec.name for spec in specs if spec.spare],
            settings=settings_document(settings),
        )

    def refused(self, state: State, error: PhoenixError) -> None:
        """The job could not start."""
        self.journal.write("job_finished", state.generation, exit_code=error.exit_code, steps=None, goodput=None)
        status = self.status(state)
        self._save(
            JobStatus(
                job=status.job, state=JobState.FAILED, nodes=status.nodes, exit_code=error.exit_code,
                reason=error.message,
            )
        )  # fmt: skip

    def finished(self, state: State, outcome: Outcome, logs: Path) -> None:
        self.journal.write("job_finished", state.generation, exit_code=outcome.exit_code, steps=None, goodput=None)
        self._save(self.status(state))
        text = summary(outcome, logs)
        if text:
            self.console.say(text)

    # --- as it happens ---

    def observe(self, index: int, name: str, report: NodeReport) -> None:
        """Journal what is new in a report: workers that started, processes that were parked."""
        self.reports[index], self.names[index] = report, name
        for rank in report.ranks:
            key = (rank.rank, rank.generation)
            if rank.pid and key not in self._seen_workers:
                self._seen_workers.add(key)
                self.journal.write("worker_started", rank.generation, node=name, rank=rank.rank, pid=rank.pid)
        for pid in report.parked_pids:
            if pid not in self._seen_parked:
                self._seen_parked.add(pid)
                self.journal.write("spare_parked", report.applied, node=name, pid=pid)

    def drill(self, kind: str, target: str, state: State) -> None:
        self.console.say(f"phoenix-run: drill: {kind} {target}")
        self.journal.write("drill", state.generation, kind=kind, target=target)

    def act(self, action: Action, state: State) -> None:
        now = time.monotonic()
        match action:
            case job_events.FaultFound():
                self._fault(action, state, now)
            case job_events.GenerationBegun(generation, moved):
                names = {index: member.name for index, member in state.members.items()}
                moves = tuple(Move(rank=r, from_node=names[a], to_node=names[b], source="script") for r, a, b in moved)
                if generation.n > state.first:
                    self._repair = _Repair(
                        generation, tuple(sorted(set(self._lost))), moves, self._fault_at or now, now
                    )
                    targets = ", ".join(f"rank {m.rank} {m.from_node} -> {m.to_node}" for m in moves)
                    self.console.say(f"phoenix-run: restarting all workers ({generation}){targets and ': '}{targets}")
            case job_events.GenerationRuns(generation):
                self._runs(generation, now)
            case job_events.WaitingForNode(text):
                self.console.say(f"phoenix-run: {text}")
            case _:
                return
        self._save(self.status(state))  # for `jobs`, and for whoever asks when the supervisor is gone

    def _fault(self, fault: job_events.FaultFound, state: State, now: float) -> None:
        name = state.members[fault.node].name
        self._fault_at = self._fault_at or now
        self._lost += fault.ranks
        ranks = ", ".join(str(rank) for rank in fault.ranks) or "none"
        if fault.kind == "worker":
            text = f"rank {ranks} on {name} {fault.detail}"
        else:
            text = f"{name} is lost ({fault.detail}); ranks there: {ranks}"
        self.console.say(f"phoenix-run: {text}")
        self.journal.write(
            "fault", state.generation, kind=fault.kind, node=name, ranks=list(fault.ranks), detail=fault.detail
        )

    def _runs(self, generation: Generation, now: float) -> None:
        repair = self._repair
        self._repair, self._fault_at, self._lost = None, 0.0, []
        if repair is None:
            return
        phases = {"plan": repair.begun - repair.found, "quiesce": now - repair.begun}
        self.last_swap = SwapStatus(
            rung=RESTART_RUNG, lost_ranks=repair.lost_ranks, moves=repair.moves, phases=phases, total=now - repair.found
        )
        self.journal.write(
            "swap",
            generation,
            rung=RESTART_RUNG,
            lost_ranks=list(repair.lost_ranks),
            moves=[{"rank": m.rank, "from_node": m.from_node, "to_node": m.to_node, "source": m.source}
                   for m in repair.moves],
            resumed_step=None,
            lost_steps=None,
            phases=phases,
            total=now - repair.found,
        )  # fmt: skip

    # --- status ---

    def status(self, state: State) -> JobStatus:
        """The whole state of the job, as `status --json` has it."""
        outcome = state.outcome if state.phase is Phase.FINISHED else None
        ranks = tuple(self._rank(place.rank, place.node, state) for place in state.places)
        steps = [rank.step for rank in ranks if rank.step is not None]
        return JobStatus(
            job=self.folder.job,
            state=_job_state(state),
            term=state.generation.term,
            generation=state.generation.n,
            step=min(steps) if steps else None,
            exit_code=outcome.exit_code if outcome else None,
            nodes=self._nodes(state),
            ranks=ranks,
            last_swap=self.last_swap,
            reason=outcome.text if outcome else "",
            restarts=state.restarts_used,
            dropped_messages=self.counters.dropped,
            strangers=self.counters.strangers,
        )

    def _nodes(self, state: State) -> tuple[NodeStatus, ...]:
        seated = {seat.node for seat in state.lineup}
        return tuple(
            NodeStatus(
                index=m.index,
                name=m.name,
                role="training" if m.index in seated or (not state.lineup and not m.spare) else "spare",
                state=m.state.value,
                spares=m.parked if m.state is not NodeState.LOST else 0,
                host=self.hosts.get(m.index, ""),
            )
            for m in state.members.values()
        )

    def _rank(self, rank: int, node: int, state: State) -> RankStatus:
        report = self.reports.get(node)
        found: RankReport | None = None
        for entry in report.ranks if report else ():
            if entry.rank == rank and entry.generation == state.generation:
                found = entry
        return RankStatus(
            rank=rank,
            node=state.members[node].name,
            pid=found.pid if found and found.exit is None else None,
            state=(found.state if found else ProcessState.STARTING).value,
            step=found.step if found and found.step >= 0 else None,
        )

    def _save(self, status: JobStatus) -> None:
        try:
            self.folder.write_status(status)
        except PhoenixError as error:
            if not self._unsaved:
                self.console.say(f"phoenix-run: {error.message}")
            self._unsaved = True


def _job_state(state: State) -> JobState:
    if state.phase is Phase.FINISHED and state.outcome is not None:
        return JobState.FINISHED if state.outcome.exit_code == EXIT_OK else JobState.FAILED
    match state.phase:
        case Phase.STARTING:
            return JobState.STARTING
        case Phase.QUIESCING:
            return JobState.SWAPPING if state.attempt else JobState.STARTING
        case Phase.WAITING:
            return JobState.PARKED
        case _:
            return JobState.RUNNING
