"""The state of a job as membership sees it: rules, nodes, line-up, phase, and how ranks ended. Pure data."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from phoenix_launch.copies import KeptSlot, SlotPeer, Stamp
from phoenix_launch.job import placement
from phoenix_launch.job.commit import NO_VERSION, Bundle, Lineage
from phoenix_launch.job.losses import Loss
from phoenix_launch.job.placement import RankPlace, Seat
from phoenix_launch.job.recovery import Recovery
from phoenix_launch.messages import ExitReport, OddBits, RuntimeReport, Standstill
from phoenix_launch.progress import PaceFigures
from phoenix_launch.wire import NO_GENERATION, Generation

SIGTERM = 15


class NodeState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    DRAINED = "drained"


class Phase(enum.Enum):
    STARTING = "starting"  # waiting for nodes to be ready
    QUIESCING = "quiescing"  # a new generation: old workers end, its store comes up
    SWAPPING = "swapping"  # a new generation: survivors leave their step, lost ranks are made anew, all restore
    RUNNING = "running"
    WAITING = "parked"  # a seat is empty and nothing can take it yet
    STOPPING = "stopping"  # workers were told to end, nothing is restarted
    LEAVING = "leaving"  # agents were told to go
    FINISHED = "finished"


# What may follow what; tests hold every transition against it. A next generation may begin while one quiesces or swaps.
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.QUIESCING, Phase.LEAVING}),
    Phase.QUIESCING: frozenset({Phase.RUNNING, Phase.WAITING, Phase.STOPPING, Phase.LEAVING}),
    Phase.SWAPPING: frozenset({Phase.RUNNING, Phase.QUIESCING, Phase.WAITING, Phase.STOPPING, Phase.LEAVING}),
    Phase.RUNNING: frozenset({Phase.QUIESCING, Phase.SWAPPING, Phase.WAITING, Phase.STOPPING, Phase.LEAVING}),
    Phase.WAITING: frozenset({Phase.QUIESCING, Phase.SWAPPING, Phase.STOPPING, Phase.LEAVING}),
    Phase.STOPPING: frozenset({Phase.LEAVING}),
    Phase.LEAVING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user asked for. Times in seconds."""

    seats_min: int
    seats_max: int
    max_restarts: int = 0
    max_failures_per_host: int = 3
    heartbeat_timeout: float = 3.0
    probe_timeout: float = 1.0
    join_timeout: float = 600.0
    spare_timeout: float = 60.0
    start_timeout: float = 120.0  # what an agent may need to start its workers: a fork server that came up again
    shutdown_timeout: float = 30.0
    abort_timeout: float = 5.0  # a survivor is out of all collectives; past that its process is ended and replaced
    leave_timeout: float = 60.0  # and it has come to the end of its step
    left_behind_timeout: float = 10.0  # a worker is in a step that another one will never begin
    hang_timeout: float = 30.0  # no rank moves
    first_step_timeout: float = 600.0  # the same, before two steps are done
    stacks_timeout: float = 2.0
    teardown_timeout: float = 10.0  # what an agent may need beyond a grace: draining output, reaping
    save_timeout: float = 0.0  # and before that: writing what it keeps in memory to disk
    master_port: int = 0  # the first generation's store has to be here, 0: anywhere
    replicas: int = 1  # in other failure domains, of what only one of them holds
    replica_distance: int = 1
    snapshot_interval: int = 1  # steps; 0: no copies, AUTO
    replace_stragglers: bool = False
    verify_replicas: int = 0  # steps, 0: never
    worker_exit_code: bool = False  # --exit-code=worker: the job ends with the code of the worker to blame

    @property
    def elastic(self) -> bool:
        return self.seats_min < self.seats_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node, in its newest incarnation."""

    index: int
    name: str
    domain: str
    slots: int
    incarnation: str
    spare: bool = False
    group_rank: int = -1
    state: NodeState = NodeState.STARTING
    heard: float = 0.0  # its silence counts from here
    reported: float = 0.0  # when its last report came
    seq: int = -1
    parked: int = 0
    quiesced: Generation = NO_GENERATION
    applied: Generation = NO_GENERATION
    live: int = 0  # workers that have not ended, by its last report
    offered: Generation = NO_GENERATION
    kept: tuple[KeptSlot, ...] = ()  # its slots and replicas, offered to that generation
    server: SlotPeer | None = None  # where its checkpoint server is
    suspect_since: float = 0.0
    failures: int = 0
    draining: bool = False  # it was asked for, and it may leave when its ranks have moved
    left: bool = False
    avoided: bool = False  # its ranks were moved away: it gets others only where no other node is left

    @property
    def alive(self) -> bool:
        return self.state in (NodeState.READY, NodeState.SUSPECT, NodeState.STARTING) and not self.left

    @property
    def usable(self) -> bool:
        return self.state is NodeState.READY and not self.left


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended. `at`: by the supervisor's clock."""

    rank: int
    node: int
    at: float
    report: ExitReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a rank. `born`: the generation that started it; a swap that keeps it does not change that."""

    rank: int
    node: int
    born: Generation
    seen: bool = False  # its node has reported it: before that it may never have been told to start it
    step: int = -1
    inside: int = -1  # the step that it is in, from 1, -1: none, or not known
    runtime: RuntimeReport | None = None  # None: it has not said that it knows the runtime
    still: Standstill | None = None  # it does not move
    pace: PaceFigures | None = None  # what it takes for a step


@dataclass(frozen=True, slots=True)
class Odd:
    """Holders of a bundle had different bits. `sound`: nodes with holders of which none was odd."""

    found: OddBits
    sound: frozenset[int]

    def spoils(self, node: int, bundle: str, stamp: Stamp) -> bool:
        """Whether that copy may have been written by an odd rank."""
        at = self.found.stamp
        older = stamp.generation <= at.generation and stamp.version < at.version
        return bundle == self.found.bundle and older and node not in self.sound


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that computes longer than its peers, or seems to. `since`, `step`: where that (or its end: `calming`) begins."""

    born: Generation
    since: float
    step: int
    compute: float  # seconds of a step
    median: float  # of its peers
    told: bool = False
    calming: bool = False

    @property
    def factor(self) -> float:
        return self.compute / self.median if self.median > 0 else float("inf")


class Rung(enum.IntEnum):
    """How a generation began: the ladder of repair."""

    START = 0  # the job's own start, or a restart of a script that does not know the runtime
    IN_PLACE = 1  # survivors kept their processes
    FROM_SLOTS = 2  # new processes, which load the newest common version from the slots
    FROM_SCRIPT = 3  # new processes, which find the script's own checkpoint, or begin anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Where a swap stands. Without `recovery` survivors are still asked what they can give."""

    recovery: Recovery | None = None
    planned: float = 0.0  # when that was known
    linked: bool = False  # and so are the addresses of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why the job ends. `cause`: the worker to blame, whose last words come last on the screen."""

    exit_code: int
    text: str
    hint: str = ""
    cause: Ended | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """All ranks are to come to one version, by then at the latest. Then the job stops by this signal, or this node is left."""

    until: float
    signal: int = 0
    drain: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    rules: Rules
    generation: Generation
    term: int = 1  # of the supervisor: generations that begin from now on have it
    phase: Phase = Phase.STARTING
    since: float = 0.0  # when the phase began
    members: Mapping[int, Member] = field(default_factory=dict)
    lineup: tuple[Seat, ...] = ()
    store: Endpoint | None = None
    store_node: int = -1
    ended: Mapping[int, Ended] = field(default_factory=dict)  # by rank, of the current generation
    holders: Mapping[int, Holder] = field(default_factory=dict)  # by rank, as far as a process holds it
    rung: Rung = Rung.START  # by which the current generation began
    resume: int = NO_VERSION  # the version at which it began
    swap: Swap | None = None  # while one is under way, also while it waits for a node
    recovery: Recovery | None = None  # how the current generation was restored
    leave: bool = False  # all its scripts are over
    halt: Halt | None = None
    ran: bool = False  # while the job stops: its nodes had been told to run their workers
    behind: float | None = None  # since when a rank is in a step beyond the end of another one's script
    stacks_since: float | None = None  # since when a hang is looked into
    stacks_seen: Mapping[int, str] = field(default_factory=dict)  # by rank, where it was found then
    stacks_from: frozenset[int] = frozenset()  # nodes that have said it all
    condemned: frozenset[int] = frozenset()  # ranks whose processes are to be killed
    verdict: str = "hang"  # why
    odd: tuple[Odd, ...] = ()  # what was found to be corrupt
    slow: Mapping[int, Slow] = field(default_factory=dict)  # by rank
    looked_at: float | None = None  # for such ones
    moved_at: float | None = None  # when a straggler was replaced last
    bundles: tuple[Bundle, ...] = ()  # of all ranks, as they last said
    lineage: Lineage = field(default_factory=Lineage)
    losses: Mapping[int, Loss] = field(default_factory=dict)  # how each rank ended last, with the runtime
    raised: Mapping[int, Loss] = field(default_factory=dict)  # the same, since all ranks ran together last
    restarts_used: int = 0
    charged: Ended | None = None  # the worker's end that was counted last
    first: int = 1  # n of the first generation
    signal: int = SIGTERM
    grace: float = 0.0
    outcome: Outcome | None = None

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return placement.places(self.lineup)

    @property
    def following(self) -> Generation:
        """The generation that comes next."""
        return Generation(max(self.term, self.generation.term), self.generation.n + 1)

    @property
    def attempt(self) -> int:
        """TORCHELASTIC_RESTART_COUNT: how many generations there were before this one."""
        return max(0, self.generation.n - self.first)


def how(code: int) -> str:
    """What became of a process, in words: "exited with code 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def fault_of(report: ExitReport) -> str:
    """The same of a process whose end was a fault, with the evidence that there is."""
    return fault(report.code) + (" by the kernel, for want of memory" if report.oom_killed else "")


def fault(code: int) -> str:
    """The same of a process whose end was a fault."""
    return how(code) if code else "ended in the middle of the job with exit code 0"
