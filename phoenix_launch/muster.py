"""Nodes on their way into a job: launched, heard of, found fit, admitted; and launched again after they were lost.

Everything that is wrong with any host is collected first and shown in one table, before a single worker starts.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from phoenix_launch import preflight, remote
from phoenix_launch.bus import KeyPair, Peer, PeerKind, SupervisorBus, new_key_pair
from phoenix_launch.errors import StartError, UsageError
from phoenix_launch.hosts import NodeSpec
from phoenix_launch.membership import Admitted
from phoenix_launch.messages import AgentBootstrap, Generation, HostFacts, PeerProbe, Probe
from phoenix_launch.remote import NodeHandle
from phoenix_launch.settings import timeout

AT_ONCE = 64  # hosts whose ssh is under way at the same time
RELAUNCH_DELAYS = (0.0, 2.0, 5.0, 10.0, 20.0)  # seconds before each attempt to get a lost node's agent back


def worker_count(nproc: str, *, cores: int, gpus: int, name: str = "this host") -> int:
    """--nproc-per-node on one host. Raises UsageError when it can take none."""
    if nproc == "gpu" and not gpus:
        raise UsageError(f"--nproc-per-node gpu: {name} has no GPU", hint="give a number, or cpu")
    if nproc == "xpu":
        raise UsageError("--nproc-per-node xpu is not supported", hint="give the number of workers")
    if nproc in ("gpu", "auto"):
        return gpus or cores
    return cores if nproc == "cpu" else int(nproc)


def worker_slots(nproc: str, spec: NodeSpec, facts: HostFacts) -> int:
    """How many workers a node takes. Raises UsageError when it can take none."""
    if spec.slots is not None:
        return spec.slots
    return worker_count(nproc, cores=facts.cores, gpus=facts.gpus, name=spec.name)


@dataclass(slots=True)
class Recruit:
    """One launch of one node."""

    spec: NodeSpec
    incarnation: str
    keys: KeyPair
    handle: NodeHandle | None = None  # None: a host that started its agent by itself
    launched: float = 0.0
    facts: HostFacts | None = None
    failure: str = ""
    lines: list[str] = field(default_factory=list)  # what ssh, guardian and agent said
    probes: tuple[PeerProbe, ...] | None = None
    admitted: bool = False
    closed: bool = False


@dataclass(slots=True)
class Muster:
    """All launches of a job, by incarnation. `bootstrap` makes what an agent is given."""

    bus: SupervisorBus
    expected: preflight.Expected
    nproc: str
    python: str
    ssh: str
    control_folder: str
    bootstrap: Callable[[NodeSpec, str, KeyPair], AgentBootstrap]
    recruits: dict[str, Recruit] = field(default_factory=dict)
    waiting: list[NodeSpec] = field(default_factory=list)
    again: list[tuple[float, NodeSpec]] = field(default_factory=list)  # (not before, node)
    attempts: dict[int, int] = field(default_factory=dict)  # relaunches by node
    began: float = 0.0
    complete: bool = False  # the first muster is over: all nodes of the command were found fit
    probing: bool = False

    def begin(self, specs: Iterable[NodeSpec], now: float) -> None:
        self.began = now
        self.waiting = list(specs)

    def enlist(self, spec: NodeSpec, now: float) -> Recruit:
        """A node whose agent is started elsewhere (a host that joins)."""
        keys = new_key_pair()
        recruit = Recruit(spec, uuid.uuid4().hex, keys, launched=now)
        self.bus.allow(keys.public, Peer(PeerKind.AGENT, recruit.incarnation))
        self.recruits[recruit.incarnation] = recruit
        return recruit

    def launch(self, spec: NodeSpec, now: float) -> Recruit:
        recruit = self.enlist(spec, now)
        bootstrap = self.bootstrap(spec, recruit.incarnation, recruit.keys)
        python = spec.python or self.python
        if spec.host:
            recruit.handle = remote.start_ssh(
                bootstrap, spec.host, self.ssh, python, self.control_folder, timeout("ssh_connect")
            )
        else:
            recruit.handle = remote.start_local(bootstrap, python)
        return recruit

    def launch_more(self, now: float) -> list[Recruit]:
        """Start what is due, at most `AT_ONCE` unheard of at a time."""
        under_way = sum(1 for r in self.recruits.values() if r.facts is None and not r.failure and r.handle)
        started: list[Recruit] = []
        while self.waiting and under_way + len(started) < AT_ONCE:
            started.append(self.launch(self.waiting.pop(0), now))
        due = [spec for when, spec in self.again if when <= now]
        self.again = [(when, spec) for when, spec in self.again if when > now]
        started += [self.launch(spec, now) for spec in due]
        return started

    def relaunch(self, index: int, now: float) -> bool:
        """Plan the next attempt to bring a lost node back, as a spare. False when there is none left."""
        old = [r for r in self.recruits.values() if r.spec.index == index]
        if not old or old[-1].handle is None or (tries := self.attempts.get(index, 0)) >= len(RELAUNCH_DELAYS):
            return False
        self.attempts[index] = tries + 1
        self.again.append((now + RELAUNCH_DELAYS[tries], replace(old[-1].spec, spare=True)))
        return True

    def heard(self, incarnation: str, facts: HostFacts) -> None:
        recruit = self.recruits.get(incarnation)
        if recruit is not None and recruit.facts is None:
            recruit.facts = facts

    def probed(self, incarnation: str, peers: tuple[PeerProbe, ...]) -> None:
        recruit = self.recruits.get(incarnation)
        if recruit is not None:
            recruit.probes = peers

    def listen(self, recruit: Recruit) -> bool:
        """Take in what a handle has to say; True when its channel has closed."""
        if recruit.handle is None or recruit.closed:
            return False
        recruit.lines = (recruit.lines + recruit.handle.read_lines())[-50:]
        if recruit.handle.poll() is None:
            return False
        recruit.lines = (recruit.lines + recruit.handle.read_lines())[-50:]
        recruit.closed = True
        if recruit.facts is None and not recruit.failure:
            recruit.failure = remote.reason(recruit.handle)
        return True

    def settle(self, now: float) -> list[Admitted]:
        """Who can be admitted now. Raises StartError with the table of all problems of all hosts."""
        if self.complete:
            return self._settle_later()
        crew = list(self.recruits.values())
        self._give_up_silent(crew, now)
        if self.waiting or any(r.facts is None and not r.failure for r in crew):
            return []
        if not self.probing and not any(r.failure for r in crew):
            self.probing = True
            self._probe_neighbours(crew)
        late = now - self.began > timeout("preflight") + timeout("connect")
        if self.probing and not late and any(r.probes is None for r in crew if r.facts):
            return []
        self._refuse(self._problems(crew))
        self.complete = True
        return [self._admit(recruit) for recruit in crew]

    def _give_up_silent(self, crew: list[Recruit], now: float) -> None:
        for recruit in crew:
            if recruit.facts is None and not recruit.failure and now - recruit.launched > timeout("preflight"):
                said = f": {recruit.lines[-1]}" if recruit.lines else ""
                recruit.failure = f"did not answer within {timeout('preflight'):g} s{said}"

    def _probe_neighbours(self, crew: list[Recruit]) -> None:
        """Each node dials the next one, in a ring; a single node and simulated ones have nobody to dial."""
        if len(crew) < 2 or not any(r.spec.host for r in crew):
            for recruit in crew:
                recruit.probes = ()
            return
        for recruit, other in zip(crew, [*crew[1:], crew[0]], strict=True):
            assert other.facts is not None
            peer = PeerProbe(other.spec.name, other.facts.address, other.facts.probe_port)
            self.bus.send(recruit.incarnation, Probe((peer,)), Generation(0, 0))

    def _problems(self, crew: list[Recruit]) -> list[preflight.Problem]:
        facts = {r.spec.name: r.facts for r in crew if r.facts is not None}
        failures = {r.spec.name: r.failure for r in crew if r.failure}
        probes: Mapping[str, tuple[PeerProbe, ...]] = {r.spec.name: r.probes for r in crew if r.probes}
        problems = preflight.problems(self.expected, facts, failures, probes)
        for recruit in crew:
            if recruit.facts is not None:
                try:
                    worker_slots(self.nproc, recruit.spec, recruit.facts)
                except UsageError as error:
                    problems.append(preflight.Problem(recruit.spec.name, error.message, error.hint))
        return problems

    def _refuse(self, problems: list[preflight.Problem]) -> None:
        if not problems:
            return
        hosts = len({problem.node for problem in problems})
        raise StartError(
            f"nothing was started: {hosts} of {len(self.recruits)} nodes cannot take part",
            hint="mend what the table names, or leave those hosts out",
            details=preflight.table(problems),
        )

    def _settle_later(self) -> list[Admitted]:
        """Nodes that come after the start: hosts that join, and lost ones that were launched again."""
        admitted = []
        for recruit in self.recruits.values():
            if recruit.facts is None or recruit.admitted or recruit.failure:
                continue
            problems = self._problems([recruit])
            if problems:
                recruit.failure = problems[0].what
            else:
                admitted.append(self._admit(recruit))
        return admitted

    def _admit(self, recruit: Recruit) -> Admitted:
        assert recruit.facts is not None
        recruit.admitted = True
        return Admitted(
            index=recruit.spec.index,
            name=recruit.spec.name,
            domain=recruit.spec.rack or recruit.spec.name,
            slots=worker_slots(self.nproc, recruit.spec, recruit.facts),
            incarnation=recruit.incarnation,
            spare=recruit.spec.spare,
            group_rank=recruit.spec.group_rank,
        )
