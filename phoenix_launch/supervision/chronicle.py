"""What is told about a job while it runs: the journal, the lines on the screen, and the document of `status`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from phoenix_launch.bootstrap import OutputSettings
from phoenix_launch.bus.supervisor import BusCounters
from phoenix_launch.errors import PhoenixError
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job import events as job_events
from phoenix_launch.job import holding
from phoenix_launch.job.drills import Target
from phoenix_launch.job.events import Action
from phoenix_launch.job.last_words import born, files_about, summary
from phoenix_launch.job.odd_bits import unclear
from phoenix_launch.job.redundancy import Redundancy, redundancy
from phoenix_launch.job.state import Ended, NodeState, Outcome, Phase, Rung, State
from phoenix_launch.messages import NodeReport, OddBits, ProcessState, Published, RankReport, StackTrace
from phoenix_launch.records.folders import JobFolder, settings_document
from phoenix_launch.records.journal import Journal
from phoenix_launch.settings import RunSettings
from phoenix_launch.status import CheckpointStatus, CopyStatus, JobState, JobStatus, Move, NodeStatus, RankStatus
from phoenix_launch.supervision.console import Console
from phoenix_launch.supervision.drill_record import Drilled, DrillRecord
from phoenix_launch.supervision.job_states import job_state, stopped_by
from phoenix_launch.supervision.repairs import SCRIPT, Repairs
from phoenix_launch.wire import Generation
from phoenix_launch.wording import counted, ranks_named

NOTHING_WRITTEN: Final = (
    "--checkpoint-dir and --resume did nothing: the script did not use phoenix_runtime (README: In the training script)"
)
KEPT_SECONDS: Final = 5.0  # status.json is never older than this while the job runs


@dataclass
class Chronicle:
    """Sees every action and report; decides nothing."""

    folder: JobFolder
    console: Console
    journal: Journal
    hosts: dict[int, str]
    reports: dict[int, NodeReport] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    repairs: Repairs = field(default_factory=Repairs)
    drills: DrillRecord = field(default_factory=DrillRecord)
    counters: BusCounters = field(default_factory=BusCounters)  # the bus counts, status tells
    outputs: dict[int, OutputSettings] = field(default_factory=dict)  # where the output of each node's workers goes
    _seen_workers: set[tuple[int, Generation]] = field(default_factory=set)
    _seen_parked: set[int] = field(default_factory=set)
    _published: Published | None = None  # the newest one
    _unsaved: bool = False  # said once
    _started_anew: bool = False  # a worker whose pid is not in status.json yet
    _saved_at: float = 0.0
    _told: Redundancy = field(default_factory=Redundancy)  # in the journal

    @classmethod
    def open(cls, folder: JobFolder, console: Console, hosts: list[str], settings: RunSettings) -> Chronicle:
        journal = Journal(folder.journal_path, remark=lambda text: console.say(f"phoenix-run: {text}"))
        return cls(folder, console, journal, dict(enumerate(hosts)))

    # --- start and end ---

    def started(self, specs: tuple[NodeSpec, ...], settings: RunSettings, logs: Path) -> None:
        training = settings.nnodes[1] if settings.joins else sum(not spec.spare for spec in specs)
        spares = sum(spec.spare for spec in specs)
        with_spares = f" and {counted(spares, 'spare node')}" if spares else ""
        self.console.say(
            f"phoenix-run: job {self.folder.job}: {counted(training, 'node')} x {settings.nproc_per_node} "
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

    def inherit(self, state: State, inherited: job_events.Resumed) -> None:
        """From another supervisor, which has written down what its nodes had said."""
        last = self.folder.read_status()
        self.repairs.last = last.last_swap if last is not None else None
        self.names = {index: member.name for index, member in state.members.items()}
        self.repairs.inherit(state)
        for index, node in inherited.nodes.items():
            self.reports[index] = node.report
            self.repairs.observe(node.report)
            self._seen_workers |= {(rank.rank, rank.generation) for rank in node.report.ranks}
            self._seen_parked |= set(node.report.parked_pids)
            if node.report.published is not None and not node.report.published.error:
                self._published = node.report.published

    def resumed(self, state: State, *, adopted: bool) -> None:
        alive = [member.name for member in state.members.values() if member.alive]
        self.console.say(
            f"phoenix-run: took over job {self.folder.job} (term {state.term}) with {counted(len(alive), 'node')}: "
            + ("training was not disturbed" if adopted else "it has to be repaired")
        )
        self.journal.write("supervisor_resumed", state.generation, term=state.term, nodes=alive, adopted=adopted)
        self._save(self.status(state))

    def refused(self, state: State, error: PhoenixError) -> None:
        """The job could not start."""
        self.journal.write("job_finished", state.generation, exit_code=error.exit_code, steps=None, goodput=None)
        status = self.status(state)
        self._save(
            JobStatus(
                job=status.job, state=JobState.FAILED, nodes=_parted(status.nodes), exit_code=error.exit_code,
                reason=error.message, as_of=status.as_of,
            )
        )  # fmt: skip

    def finished(self, state: State, outcome: Outcome) -> None:
        self._drilled(self.drills.ended(), state)
        self.journal.write("job_finished", state.generation, exit_code=outcome.exit_code, steps=None, goodput=None)
        self._save(self.status(state))
        if state.rules.save_timeout and state.holders and not holding.resilient(state):
            self.console.say(f"phoenix-run: {NOTHING_WRITTEN}")
        cause = outcome.cause
        shown = self.console.last.of(cause.rank, born(cause.rank, state)) if cause else ""
        if text := summary(outcome, self._files_about(cause, state) if cause else {}, shown):
            self.console.say(text)

    def _files_about(self, cause: Ended, state: State) -> dict[str, str]:
        output = self.outputs.get(cause.node)
        if output is None:
            return {}
        here = self.hosts.get(cause.node) == ""
        return files_about(cause, state, output, "" if here else f" on {state.members[cause.node].name}")

    # --- as it happens ---

    def observe(self, index: int, name: str, report: NodeReport) -> None:
        """Journal what is new in a report: workers that started, processes that were parked."""
        self.reports[index], self.names[index] = report, name
        self.repairs.observe(report)
        for rank in report.ranks:
            key = (rank.rank, rank.generation)
            if rank.pid and key not in self._seen_workers:
                self._seen_workers.add(key)
                self._started_anew = True
                self.journal.write("worker_started", rank.generation, node=name, rank=rank.rank, pid=rank.pid)
        if report.published is not None:
            self._checkpoint(report.published)
        for pid in report.parked_pids:
            if pid not in self._seen_parked:
                self._seen_parked.add(pid)
                self.journal.write("spare_parked", report.applied, node=name, pid=pid)

    def _checkpoint(self, published: Published) -> None:
        """Reports say it again and again; a node that lost rank 0 keeps saying an older one."""
        before = self._published
        if published.error or (before is not None and published.stamp <= before.stamp):
            return
        self._published = published
        self.journal.write("checkpoint", published.stamp.generation, step=published.stamp.version, path=published.path)

    def keep(self, state: State, now: float) -> None:
        """Save the status now and then: it is all that is known of the job once the supervisor is killed."""
        self._redundancy(state)
        if state.phase is not Phase.FINISHED and (self._started_anew or now - self._saved_at >= KEPT_SECONDS):
            self._save(self.status(state))

    def _redundancy(self, state: State) -> None:
        """Its changes are worth a line in the journal; that it is lost for a while in a swap is said there."""
        found = redundancy(state)
        self._drilled(self.drills.redundant(found, time.monotonic()), state)
        if found != self._told and found.word:
            self._told = found
            self.journal.write("redundancy", state.generation, state=found.word, why=found.why)

    def drill(self, kind: str, target: Target, state: State, duration: float = 0.0) -> None:
        self.console.say(f"phoenix-run: drill: {kind} {target.text}")
        self.journal.write("drill", state.generation, kind=kind, target=target.text)
        before = redundancy(state).word
        self.drills.began(Drilled(kind, target.text, target.node, target.rank, time.monotonic(), duration, before))

    def _drilled(self, ended: list[Drilled], state: State) -> None:
        for drilled in ended:
            self.console.say(f"phoenix-run: drill: {drilled.told()}")
            self.journal.write(
                "drill_ended", state.generation, kind=drilled.kind, target=drilled.text, detection=drilled.detection,
                recovery=drilled.recovery, redundancy=drilled.redundancy, lost_steps=drilled.lost_steps,
            )  # fmt: skip

    def stacks(self, node: str, trace: StackTrace) -> None:
        """Where a worker's threads are: for whoever wants to know why it hangs."""
        try:
            self.folder.write_stacks(
                f"rank{trace.rank}-{trace.generation}.txt", f"{time.ctime()}, {node}\n{trace.text}"
            )
        except OSError as error:
            self.console.say(f"phoenix-run: the stacks of rank {trace.rank} cannot be kept: {error}")

    def act(self, action: Action, state: State) -> None:
        now = time.monotonic()
        match action:
            case job_events.FaultFound():
                self._fault(action, state, now)
            case job_events.StragglerFound():
                self._straggler(action, state, now)
            case job_events.CorruptionFound(found):
                self._corruption(found, state, now)
            case job_events.StacksWanted(age):
                self.console.say(
                    f"phoenix-run: no rank has moved for {age:.0f} s: stacks of all go to {self.folder.stacks_path}"
                )
                return
            case job_events.GenerationBegun(generation, moved):
                if generation.n > state.first:
                    self._begun(generation, moved, state, now)
            case job_events.StartsAnew(_, why):
                self.repairs.because(why)
                return
            case job_events.RecoveryFound(_, found):
                self.repairs.planned(found, now)
                return
            case job_events.CommunicatorsKnown():
                self.repairs.linked(now)
                return
            case job_events.GenerationRuns():
                self._runs(state)
            case job_events.WaitingForNode(text):
                self.console.say(f"phoenix-run: {text}")
            case job_events.NodeDrained(index):
                name = state.members[index].name
                self.console.say(f"phoenix-run: {name} is drained: nothing of the job is there any more")
                self.journal.write("node_drained", state.generation, node=name)
            case _:
                return
        self._save(self.status(state))  # for `jobs`, and for whoever asks when the supervisor is gone

    def _begun(self, generation: Generation, moved: tuple[tuple[int, int, int], ...], state: State, now: float) -> None:
        self.repairs.began(now)
        if state.rung is Rung.IN_PLACE:  # a matter of a second: what became of it is said then
            return
        names = {index: member.name for index, member in state.members.items()}
        moves = [Move(rank=r, from_node=names[a], to_node=names[b], source=SCRIPT) for r, a, b in moved]
        self.console.say(f"phoenix-run: {self.repairs.announcement(generation, moves)}")

    def _fault(self, fault: job_events.FaultFound, state: State, now: float) -> None:
        name = state.members[fault.node].name if fault.node in state.members else ""
        self.repairs.fault(fault, now)
        self.drills.fault(fault.node, () if fault.kind == "node" else fault.ranks, now)
        ranks = ranks_named(fault.ranks)
        if not name:
            text = fault.detail
        elif fault.kind != "node":
            text = f"{ranks} on {name} {fault.detail}"
        else:
            text = f"{name} is lost ({fault.detail}), {ranks} with it"
        self.console.say(f"phoenix-run: {text}")
        self.journal.write(
            "fault", state.generation, kind=fault.kind, node=name, ranks=list(fault.ranks), detail=fault.detail
        )

    def _straggler(self, found: job_events.StragglerFound, state: State, now: float) -> None:
        name = state.members[found.node].name
        text = f"rank {found.rank} on {name} takes {found.compute:.2f} s for its part of a step, its peers {found.median:.2f} s"
        if found.over:
            text = f"rank {found.rank} on {name} is no longer slow"
        else:
            self.drills.noticed((found.rank,), now)
        self.console.say(f"phoenix-run: {text}")
        self.journal.write(
            "straggler", state.generation, rank=found.rank, node=name, compute_s=found.compute, median_s=found.median,
            over=found.over,
        )  # fmt: skip

    def _corruption(self, found: OddBits, state: State, now: float) -> None:
        if not found.odd:
            self.drills.noticed(found.holders, now)
            self.console.say(f"phoenix-run: {unclear(found)}")
        self.journal.write(
            "corruption", state.generation, ranks=list(found.odd), holders=list(found.holders), bundle=found.bundle,
            tensor=found.tensor, step=found.stamp.version + 1,
        )  # fmt: skip

    def _runs(self, state: State) -> None:
        before = self.repairs.last
        if line := self.repairs.ran(state, time.monotonic()):
            self.console.say(f"phoenix-run: {line}")
        last = self.repairs.last
        self.drills.ran(time.monotonic(), last.lost_steps if last is not before and last is not None else None)
        if last is None or last is before:
            return
        self.journal.write(
            "swap",
            state.generation,
            rung=last.rung,
            lost_ranks=list(last.lost_ranks),
            moves=[{"rank": m.rank, "from_node": m.from_node, "to_node": m.to_node, "source": m.source}
                   for m in last.moves],
            resumed_step=last.resumed_step,
            lost_steps=last.lost_steps,
            phases=last.phases,
            total=last.total,
            why=last.why,
        )  # fmt: skip

    # --- status ---

    def status(self, state: State) -> JobStatus:
        """The whole state of the job, as `status --json` has it."""
        outcome = state.outcome if state.phase is Phase.FINISHED else None
        ranks = tuple(self._rank(place.rank, place.node, state) for place in state.places)
        steps = [rank.step for rank in ranks if rank.step is not None]
        copies = Redundancy() if outcome else redundancy(state)
        return JobStatus(
            job=self.folder.job,
            state=job_state(state),
            term=state.term,
            generation=state.generation.n,
            step=min(steps) if steps else None,
            redundancy=copies.word or None,
            redundancy_reason=copies.why,
            exit_code=outcome.exit_code if outcome else None,
            nodes=_parted(self._nodes(state)) if outcome else self._nodes(state),
            ranks=ranks,
            last_swap=self.repairs.last,
            checkpoint=None
            if self._published is None
            else CheckpointStatus(step=self._published.stamp.version, path=self._published.path),
            reason=outcome.text if outcome else "",
            stopped_by=stopped_by(outcome),
            as_of=time.time(),
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
                state=NodeState.DRAINED.value if m.avoided and m.alive and not m.draining else m.state.value,
                spares=m.parked if m.state is not NodeState.LOST else 0,
                host=self.hosts.get(m.index, ""),
                sent_bytes=self.reports[m.index].sent if m.index in self.reports else 0,
            )
            for m in state.members.values()
        )

    def _rank(self, rank: int, node: int, state: State) -> RankStatus:
        report = self.reports.get(node)
        found: RankReport | None = None
        for entry in report.ranks if report else ():
            if entry.rank == rank and entry.generation == born(rank, state):
                found = entry
        return RankStatus(
            rank=rank,
            node=state.members[node].name,
            pid=found.pid if found and found.exit is None else None,
            state=(found.state if found else ProcessState.STARTING).value,
            step=found.step if found and found.step >= 0 else None,
            copies=_copies(found),
            compute_s=found.pace.compute if found and found.pace else None,
            slow=round(state.slow[rank].factor, 2) if rank in state.slow and state.slow[rank].told else None,
        )

    def _save(self, status: JobStatus) -> None:
        self._started_anew, self._saved_at = False, time.monotonic()
        try:
            self.folder.write_status(status)
        except PhoenixError as error:
            if not self._unsaved:
                self.console.say(f"phoenix-run: {error.message}")
            self._unsaved = True


def _copies(report: RankReport | None) -> CopyStatus | None:
    figures = report.copies if report is not None else None
    if figures is None or not figures.state:
        return None
    return CopyStatus(figures.state, figures.copied, figures.sent, figures.holders)


def _parted(nodes: tuple[NodeStatus, ...]) -> tuple[NodeStatus, ...]:
    """As they are when the job has ended: those that were there to the end have left."""
    return tuple(
        node if node.state == NodeState.LOST.value else msgspec.structs.replace(node, state="left", spares=0)
        for node in nodes
    )
