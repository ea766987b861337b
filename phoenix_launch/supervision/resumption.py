"""`resume`: another supervisor for a job whose own is gone; from the job's folder, and from what its nodes say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from phoenix_launch.bus.keys import KeyPair, new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.errors import PhoenixError, UsageError
from phoenix_launch.job.events import Inherited, Resumed
from phoenix_launch.job.state import Member, NodeState
from phoenix_launch.records.folders import JobFolder, JobRecord, is_here
from phoenix_launch.settings import RunSettings
from phoenix_launch.status import JobState
from phoenix_launch.supervision.conduct import Made, run_job
from phoenix_launch.supervision.detach import detached
from phoenix_launch.supervision.handover import AgentRecord, Handover, read_handover, read_heritage
from phoenix_launch.supervision.launch import bus_address
from phoenix_launch.supervision.muster import Muster, Recruit
from phoenix_launch.supervision.opening import Job
from phoenix_launch.supervision.supervisor import Supervisor
from phoenix_launch.supervision.takeover import Answer, ask_all, check, next_term
from phoenix_launch.takeover_messages import Claim, takeover_key


def resume(folder: JobFolder, environ: Mapping[str, str], *, force: bool, detach: bool) -> int:
    """Take over, and run the job to its end; returns its exit code. Raises PhoenixError when that cannot be."""
    check_resumable(folder, force=force)
    job = job_of(folder, environ, detach=detach)
    left = read_handover(folder)
    if detach:
        return detached(lambda started: _resumed(job, left, force, started), folder.job, folder.logs_path)
    return _resumed(job, left, force)


def check_resumable(folder: JobFolder, *, force: bool) -> None:
    """Raises UsageError."""
    status, record = folder.read_status(), folder.read_record()
    if status is not None and status.state.final:
        word = "has finished" if status.state is JobState.FINISHED else f"has ended with exit code {status.exit_code}"
        raise UsageError(f"job {folder.job} {word}", hint="there is nothing to take over: start it again")
    if folder.is_running() and not force:
        raise UsageError(
            f"the supervisor of job {folder.job} lives (pid {record.pid} on {record.hostname})",
            hint=f"`phoenix-run status {folder.job}` shows the job; --force takes over all the same",
        )


def job_of(folder: JobFolder, environ: Mapping[str, str], *, detach: bool) -> Job:
    """The job as it was opened. Raises PhoenixError."""
    heritage, record = read_heritage(folder), folder.read_record()
    if heritage.joined:
        raise UsageError(
            f"the hosts of job {folder.job} have joined by themselves: nobody can take it over",
            hint="start the same command on every host again",
        )
    settings = settings_of(record, detach=detach)
    home = {name: value for name, value in environ.items() if name in ("PHOENIX_HOME", "XDG_RUNTIME_DIR", "TMPDIR")}
    return Job(
        settings, {**heritage.environ, **home}, folder, heritage.specs, new_key_pair(),
        bus_address(settings, heritage.specs), 0, slots_key=heritage.slots_key, cwd=heritage.cwd,
    )  # fmt: skip


def settings_of(record: JobRecord, *, detach: bool) -> RunSettings:
    """As the job's first supervisor had resolved them."""
    try:
        document = {**record.settings, "detach": detach, "remarks": []}
        return msgspec.convert(document, RunSettings, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise PhoenixError(f"the settings of job {record.job} cannot be read: {error}") from None


@dataclass
class _Claimant:
    """Asks for the next term, and makes the supervisor that has it."""

    job: Job
    left: Handover
    force: bool

    def supervisor(self, bus: SupervisorBus, made: Made) -> Supervisor:
        folder = self.job.folder
        with folder.claimed() as alone:
            if not alone:
                raise UsageError(
                    f"somebody else takes over job {folder.job} at this moment", hint="see what comes of it"
                )
            check_resumable(folder, force=self.force)  # again: somebody may have been quicker
            term, answers = self._won(bus, max(folder.read_record().term, self.left.state.term) + 1)
            supervisor = made(term)
        self._enlist(supervisor.muster, bus)
        supervisor.state = self.left.state
        supervisor.keeper.preparation.decided = self.left.prepared
        supervisor.inherited = Resumed(term, {a.agent.spec.index: _inherited(a) for a in answers if a.granted})
        return supervisor

    def _won(self, bus: SupervisorBus, term: int) -> tuple[int, list[Answer]]:
        """Raises PhoenixError when this or another term is not granted."""
        key, name = takeover_key(self.job.slots_key), self.job.name
        alive = {m.incarnation for m in self.left.state.members.values() if m.alive}
        agents = [agent for agent in self.left.agents if agent.incarnation in alive]
        seats = frozenset(seat.node for seat in self.left.state.lineup)
        claim = Claim(term, False, bus.control_endpoint, bus.output_endpoint, bus.keys.public)
        answers = ask_all(agents, claim, name, key)
        heard = any(a.said is not None and a.said.supervised for a in answers)
        if heard and not (self.force or self._is_dead()):
            threading.Event().wait(self.job.settings.heartbeat_timeout)  # it may have died a moment ago
            term += 1
            answers = ask_all(agents, msgspec.structs.replace(claim, term=term), name, key)
        if (higher := next_term(answers, name, term)) > term:
            term = higher
            answers = ask_all(agents, msgspec.structs.replace(claim, term=term), name, key)
        claim = msgspec.structs.replace(claim, term=term, take=True)
        check(answers, name, seats, force=self.force, dead=self._is_dead())
        for agent in agents:  # before they come: libzmq never tries again once refused
            bus.allow(agent.public_key, Peer(PeerKind.AGENT, agent.incarnation))
        answers = ask_all(agents, claim, name, key)
        check(answers, name, seats, force=self.force, dead=True)
        return term, answers

    def _is_dead(self) -> bool:
        """Whether this host knows that the old supervisor does not live."""
        return is_here(self.job.folder.read_record()) and not self.job.folder.is_running()

    def _enlist(self, muster: Muster, bus: SupervisorBus) -> None:
        """The agents as if they had been launched from here."""
        now = time.monotonic()
        muster.complete, muster.began = True, now
        muster.specs = {spec.index: spec for spec in self.job.specs}
        for agent in self.left.agents:
            recruit = recruit_of(agent, now)
            muster.recruits[agent.incarnation] = recruit
            if agent.spec.host:
                muster.unwatched.append((now, agent.incarnation))
        for member in self.left.state.members.values():
            if may_come_back(member, self.left.state.rules.max_failures_per_host):
                muster.relaunch(member.index, now)


def recruit_of(agent: AgentRecord, now: float) -> Recruit:
    keys = KeyPair(agent.public_key, "")
    return Recruit(agent.spec, agent.incarnation, keys, launched=now, facts=agent.facts, probes=(), admitted=True)


def may_come_back(member: Member, most: int) -> bool:
    return member.state is NodeState.LOST and member.failures <= most


def _inherited(answer: Answer) -> Inherited:
    assert answer.said is not None and answer.said.report is not None
    return Inherited(answer.said.plan, answer.said.report)


def _resumed(job: Job, left: Handover, force: bool, started: Callable[[], None] | None = None) -> int:
    claimant = _Claimant(job, left, force)
    if os.path.isdir(job.cwd):
        os.chdir(job.cwd)
    return run_job(job, started, claimant.supervisor)
