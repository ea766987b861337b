"""Nodes on their way into a job: launched, heard of, found fit, admitted; and launched again after they were lost.

Everything that is wrong with any host is collected first and shown in one table, before a single worker starts.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.bus.keys import KeyPair, new_key_pair
from phoenix_launch.bus.supervisor import Peer, PeerKind, SupervisorBus
from phoenix_launch.errors import StartError, UsageError
from phoenix_launch.hosts import preflight, remote
from phoenix_launch.hosts.remote import NodeHandle
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.events import Admitted
from phoenix_launch.messages import HostFacts, PeerProbe, Probe
from phoenix_launch.settings import timeout
from phoenix_launch.wire import Generation
from phoenix_launch.wording import counted

AT_ONCE = 64  # hosts whose ssh is under way at the same time
DELAYS = (0.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # seconds before each attempt to reach a host again; the last one for ever
SSH_FAILED = 255  # the client's own exit code; that of the command otherwise


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
    dismissed: bool = False  # forgotten when its channel has closed
    watches: int = 0  # attempts to open its channel again since it was open last

    @property
    def out_of_touch(self) -> bool:
        """Its channel closed, which says nothing about the node: ssh itself failed, or its client was killed."""
        code = self.handle.poll() if self.closed and self.handle is not None else None
        return bool(self.spec.host) and code is not None and (code == SSH_FAILED or code < 0)

    @property
    def blind(self) -> bool:
        """The channel that was opened again ended by itself, and not because the guardian did (no such `tail` there)."""
        return bool(self.watches) and self.handle is not None and self.handle.poll() != 0

    @property
    def unheard(self) -> bool:
        return self.handle is not None and self.facts is None and not self.failure and not self.dismissed


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
    unwatched: list[tuple[float, str]] = field(default_factory=list)  # (not before, incarnation)
    attempts: dict[int, int] = field(default_factory=dict)  # relaunches since it was lost, by node
    specs: dict[int, NodeSpec] = field(default_factory=dict)  # of the nodes that were launched from here
    refusals: dict[int, str] = field(default_factory=dict)  # why a node that came later was not admitted, once each
    failures: dict[int, str] = field(default_factory=dict)  # why the last launch of a node came to nothing
    remarks: list[str] = field(default_factory=list)  # for the user
    turned_away: list[tuple[str, str]] = field(default_factory=list)  # (incarnation, why) of hosts that came themselves
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

    def is_gone(self, index: int) -> bool:
        """Whether no launch of this node takes part, or is on its way to."""
        return not any(r.spec.index == index and not r.dismissed for r in self.recruits.values())

    def launch(self, spec: NodeSpec, now: float) -> Recruit:
        recruit = self.enlist(spec, now)
        self.specs.setdefault(spec.index, spec)
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
        """Start what is due, at most `AT_ONCE` unheard of at a time; returns those that have a new handle."""
        room = AT_ONCE - sum(recruit.unheard for recruit in self.recruits.values())
        self.waiting += [spec for when, spec in self.again if when <= now]
        self.again = [(when, spec) for when, spec in self.again if when > now]
        due, self.waiting = self.waiting[: max(0, room)], self.waiting[max(0, room) :]
        return [self.launch(spec, now) for spec in due] + self._watch_more(now)

    def _watch_more(self, now: float) -> list[Recruit]:
        """Open the channels again that closed while their agents live on."""
        due = [self.recruits.get(incarnation) for when, incarnation in self.unwatched if when <= now]
        self.unwatched = [(when, incarnation) for when, incarnation in self.unwatched if when > now]
        opened = []
        for recruit in due:
            if recruit is None or recruit.dismissed or not recruit.spec.host or recruit.facts is None:
                continue
            if recruit.handle is not None:  # else it was launched by another supervisor
                recruit.handle.close()
            recruit.handle = remote.start_watch(
                recruit.spec.name, recruit.spec.index, recruit.spec.host, recruit.facts.guardian_pid,
                self.ssh, self.control_folder, timeout("ssh_connect"),
            )  # fmt: skip
            recruit.watches += 1
            recruit.closed, recruit.lines = False, []
            opened.append(recruit)
        return opened

    def watch_again(self, recruit: Recruit, now: float) -> bool:
        """Plan to open a closed channel again. False when it had not been open since the last time."""
        was_open = not recruit.watches or remote.WATCHING in recruit.lines
        recruit.watches = 0 if was_open else recruit.watches
        self.unwatched.append((now + max(timeout("probe"), _delay(recruit.watches)), recruit.incarnation))
        return was_open

    def relaunch(self, index: int, now: float) -> None:
        """A launched node was lost: try to bring it back, as a spare. Hosts that came by themselves do so again."""
        if index in self.specs:
            self.attempts[index] = 0
            self._launch_later(self.specs[index], now)

    def wants(self, index: int) -> bool:
        """Whether a launch of this node is under way, or to come."""
        later = [*self.waiting, *(spec for _, spec in self.again)]
        return not self.is_gone(index) or any(spec.index == index for spec in later)

    def forget(self, index: int) -> None:
        """Do not launch it again, unless that is asked for anew."""
        self.again = [(when, spec) for when, spec in self.again if spec.index != index]
        for gone in (self.attempts, self.failures, self.refusals):
            gone.pop(index, None)

    def _launch_later(self, spec: NodeSpec, now: float) -> None:
        attempt = self.attempts.get(spec.index, 0)
        self.attempts[spec.index] = attempt + 1
        self.again.append((now + _delay(attempt), replace(spec, spare=True)))

    def dismiss(self, incarnation: str) -> None:
        """Nothing more is wanted of this launch. Behind ssh only the client ends: the agent is told by the bus."""
        recruit = self.recruits.get(incarnation)
        if recruit is None:
            return
        recruit.dismissed = True
        if recruit.handle is None or recruit.closed:
            self._forget(recruit)
        elif recruit.spec.host:
            recruit.handle.terminate()

    def _forget(self, recruit: Recruit) -> None:
        if recruit.handle is not None:
            recruit.handle.close()
        self.recruits.pop(recruit.incarnation, None)

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
        if recruit.dismissed:
            self._forget(recruit)
        elif recruit.facts is None and not recruit.failure:
            recruit.failure = remote.reason(recruit.handle)
        return True

    def settle(self, now: float) -> list[Admitted]:
        """Who can be admitted now. Raises StartError with the table of all problems of all hosts."""
        crew = list(self.recruits.values())
        self._give_up_silent(crew, now)
        if self.complete:
            return self._settle_later(crew, now)
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
            if recruit.handle is not None and recruit.unheard and now - recruit.launched > timeout("preflight"):
                recruit.handle.terminate()
                recruit.failure = remote.reason(recruit.handle)

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
            f"nothing was started: {hosts} of {counted(len(self.recruits), 'node')} cannot take part",
            hint="mend what the table names, or leave those hosts out",
            details=preflight.table(problems),
        )

    def _settle_later(self, crew: list[Recruit], now: float) -> list[Admitted]:
        """Nodes that come after the start: hosts that join, and lost ones that were launched again."""
        admitted = []
        for recruit in crew:
            if recruit.admitted or recruit.dismissed:
                continue
            if recruit.facts is not None and not recruit.failure:
                problems = self._problems([recruit])
                if not problems:
                    admitted.append(self._admit(recruit))
                    continue
                recruit.failure = problems[0].what
                self._say_refused(recruit)
            if recruit.failure:
                self.failures[recruit.spec.index] = recruit.failure
                if recruit.handle is None:
                    self.turned_away.append((recruit.incarnation, recruit.failure))
                self.dismiss(recruit.incarnation)
                if recruit.spec.index in self.specs:
                    self._launch_later(recruit.spec, now)
        return admitted

    def _say_refused(self, recruit: Recruit) -> None:
        if self.refusals.get(recruit.spec.index) != recruit.failure:
            self.refusals[recruit.spec.index] = recruit.failure
            self.remarks.append(f"{recruit.spec.name} cannot take part: {recruit.failure}")

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


def _delay(attempt: int) -> float:
    return DELAYS[min(attempt, len(DELAYS) - 1)]
