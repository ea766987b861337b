"""What supervisor and agents say to each other, and hosts that join by themselves; with the commands' words, the whole bus."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from phoenix_launch.bootstrap import AgentBootstrap
from phoenix_launch.command_messages import DrillKind, FromCommand, ToCommand
from phoenix_launch.copies import KeptSlot, SlotPeer, Source, Stamp, StartupCopy
from phoenix_launch.progress import CopyFigures, PaceFigures
from phoenix_launch.wire import NO_GENERATION, Envelope, Generation, Message, opened

# --- agent -> supervisor ---------------------------------------------------------------------------------------------


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent found on its host; preflight compares these. Errors are empty strings when all is well."""

    hostname: str
    address: str
    interface: str
    python: str  # version
    phoenix: str
    torch: str  # from the package's metadata, empty: not installed
    cores: int  # affinity- and cgroup-aware
    gpus: int
    memory_free: int  # bytes
    disk_free: int  # bytes, where the logs go
    script_digest: str  # BLAKE2 of the script's bytes; empty for -m and --no-python
    script_error: str
    cwd_error: str
    log_error: str
    probe_port: int  # the agent listens here for dial-backs from its neighbours
    agent_pid: int
    guardian_pid: int


class Hello(Message, frozen=True):
    """The first word of an agent, repeated until it is answered by anything."""

    incarnation: str
    node: str
    facts: HostFacts


class ProcessState(enum.Enum):
    STARTING = "starting"
    PARKED = "parked"
    RUNNING = "running"
    QUIESCING = "quiescing"
    RESTORING = "restoring"
    GONE = "gone"


class ExitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker ended. `code` is negative for a signal, as in subprocess."""

    code: int
    age: float  # seconds since the agent saw it, when this report was made: the supervisor dates it by its own clock
    error: str = ""  # the JSON of its TORCHELASTIC_ERROR_FILE, at most 64 KiB
    tail: str = ""  # its last lines of stderr, at most 8 KiB
    oom_killed: bool = False  # with evidence (cgroup memory.events) only


class NoRoom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node has not enough memory for the copies that it is to keep. `why`: the arithmetic; `need`: bytes; `limited`: by the
    user's own limit; `replicas`: some of it is for other nodes."""

    why: str
    node: int = -1
    need: int = 0
    limited: bool = False
    replicas: bool = False


class OddBits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Not all holders of a bundle have the same bits. `tensor`: the first that differs; `odd`: who has others than most, empty:
    that cannot be said. Copies of `stamp` are those of the other holders."""

    stamp: Stamp  # with the generation that found it
    bundle: str
    tensor: str
    holders: tuple[int, ...]
    odd: tuple[int, ...] = ()


class RuntimeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker says that knows the runtime: it can leave a step, be restored and go on."""

    holds: tuple[str, ...] = ()  # keys of its bundles, from the first step's entry on
    private: str = ""  # which of them is its private one
    complete: int = -1  # the newest version that its copier knows to be complete
    joined: Generation = NO_GENERATION  # the generation that it has left its step for, or was started for
    live: Stamp | None = None  # what it offers to that generation, None: it is dirty, or new
    address: str = ""  # of its communicators in that generation
    restored: Generation = NO_GENERATION  # it holds the resume version of this generation, and its communicators are up
    stepped: Generation = NO_GENERATION  # the newest one in which it has finished a step
    aborted: Generation = NO_GENERATION  # no thread of it is in a collective of an older generation any more
    at: int = -1  # the version at whose entry its script stands, whether it still holds that or not
    returns: int = 0  # how many steps before that it can run again in place
    outside: str = ""  # why it cannot be repaired in place, whatever comes: a collective outside of a step was aborted
    leaving: bool = False  # its script is over, it waits for the others
    finished: int = -1  # steps that it has finished then
    no_room: NoRoom | None = None  # its copies do not fit
    degraded: str = ""  # why some of its replicas are not where they should be
    odd: tuple[OddBits, ...] = ()  # found last
    written: Stamp | None = None  # rank 0: a checkpoint that is whole on disk, with the generation that has written it
    halted: Stamp | None = (
        None  # the complete version that it will not leave, as it was told; with the generation that is now
    )


class Standstill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that has not moved: no step, no operation, no report. Keys are those of `progress.Position`."""

    age: float  # seconds
    typical: float  # seconds of a step
    allowed: float  # seconds that its section may take, 0: nothing was said
    waits_for: tuple[int, int]  # the key and number of the operation its main thread waits in
    begun: dict[int, int]  # key -> operations
    stopped: bool = False  # by a signal, or a debugger: whatever it has begun, it does nothing for it


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    generation: Generation  # that started this process
    pid: int
    state: ProcessState
    step: int = -1  # from the progress page, -1: unknown
    exit: ExitReport | None = None
    runtime: RuntimeReport | None = None
    inside: int = -1  # the step that run_step is in, from 1, -1: none; from the progress page
    copies: CopyFigures | None = None  # from there, too; None: it makes no copies
    still: Standstill | None = None  # None: it moves
    pace: PaceFigures | None = None  # what it takes for a step; None: not known


class StoreReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: Generation
    address: str
    port: int
    error: str = ""


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a checkpoint on disk that was to be made visible. `error`: why it is not."""

    stamp: Stamp
    path: str
    error: str = ""


class NodeReport(Message, frozen=True):
    """The heartbeat: the whole observed state of a node, sent every half second and at once when it changes.

    Being the whole state, a lost or doubled one does no harm; `seq` orders them within an incarnation.
    """

    incarnation: str
    seq: int
    prepared: bool  # the fork server is up (or the start method needs none)
    parked: int
    parked_pids: tuple[int, ...]
    quiesced: Generation  # no worker lives here any more that this generation does not name
    applied: Generation  # the newest generation whose plan was carried out
    ranks: tuple[RankReport, ...]
    store: StoreReport | None = None
    complaint: str = ""  # why this node cannot do its work (the fork server died three times ...), empty: it can
    offered: Generation = NO_GENERATION  # nobody of an older generation writes to its slots any more; they are:
    kept: tuple[KeptSlot, ...] = ()
    slots: SlotPeer | None = None  # where its checkpoint server is
    sent: int = 0  # bytes of copies that it has sent to other nodes'
    published: Published | None = None  # the last checkpoint on disk that it was told to make visible


class PeerProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    address: str
    port: int
    error: str = ""


class ProbeReport(Message, frozen=True):
    incarnation: str
    peers: tuple[PeerProbe, ...]


class Remark(Message, frozen=True):
    """One line for the user that is no failure: a module dropped from the preload list, a log that cannot be written."""

    node: str
    text: str


class StackTrace(Message, frozen=True):
    """Where a worker's threads were when `SaveStacks` came. `where`: the script's own line, as far as it is known."""

    rank: int
    generation: Generation  # that started this process
    text: str  # at most 64 KiB
    where: str = ""
    last: bool = False  # no other of this node comes


class Farewell(Message, frozen=True):
    """The last word of an agent that was told to leave: nothing of it lives any more."""

    incarnation: str


class Deposed(Message, frozen=True):
    """The last word of an agent to a supervisor that it obeys no longer: another one has this higher term."""

    incarnation: str
    term: int


# --- supervisor -> agent ---------------------------------------------------------------------------------------------


class Prepare(Message, frozen=True):
    """After preflight: start the fork server with these additions to the environment and keep `parked` processes ready."""

    environment: dict[str, str]
    parked: int


class ReportAck(Message, frozen=True):
    """The supervisor lives and has seen report `seq`."""

    seq: int


class PlanPhase(enum.Enum):
    PARK = "park"  # nothing runs here, keep spares ready
    QUIESCE = "quiesce"  # end every worker of an older generation; host the store if told to
    SWAP = "swap"  # end workers that this generation does not name, start those it lacks; the others leave their step
    RUN = "run"  # the workers of this generation run
    STOP = "stop"  # pass the signal on to the workers, after the grace end them
    LEAVE = "leave"  # end everything, say farewell, exit


class RankOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker to run: its rank, its place on the node and what its environment has beyond the job's."""

    rank: int
    local_rank: int
    environment: dict[str, str]
    born: Generation = NO_GENERATION  # the process that a generation before has started; else it is a new one
    sources: tuple[Source, ...] = ()  # what it has to restore, and from where
    startup: StartupCopy | None = None  # for a new process, before it is known where all resume


class Resumption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a generation goes on from an older one. `stamp`: None while survivors are still asked what they have."""

    stamp: Stamp | None = None
    lineage: tuple[Stamp, ...] = ()  # at which version each generation resumed: what lies beyond is void
    addresses: dict[int, str] = {}  # rank -> address, empty until all are known


class Ground(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who runs where, which decides what is copied where to (`job/commit.py`)."""

    places: dict[int, int]  # rank -> node
    domains: tuple[tuple[int, str], ...]  # nodes that have ranks, each with its failure domain, in the ring's order
    servers: tuple[SlotPeer, ...]  # checkpoint servers of all nodes
    replicas: int = 1  # of what only one failure domain holds
    distance: int = 1  # to the first of them, in failure domains
    interval: int = 1  # steps between two versions that are copied, 0: none is, settings.AUTO: as many as it takes
    verify: int = 0  # steps between two comparisons of what several ranks hold, 0: none


class NodePlan(Message, frozen=True):
    """What a node has to make true. Being a wish and not a command it may arrive twice, late, or not at all (then again)."""

    generation: Generation
    phase: PlanPhase
    ranks: tuple[RankOrder, ...] = ()
    host_store: bool = False
    store_port: int = 0  # --master-port in the first generation, 0: any
    signal: int = 15
    grace: float = 30.0  # seconds from `signal` to SIGKILL
    attempt: int = 0  # TORCHELASTIC_RESTART_COUNT; names folders in torchrun's log layout
    resumption: Resumption | None = None
    ground: Ground | None = None  # None: nobody of this job knows the runtime
    leave: bool = False  # all scripts are over: who waits for the others may end
    halt: bool = False  # the job is about to stop, or a node is left: copy the state once more, and change it no more
    save: bool = False  # before it leaves: what it keeps in memory goes to disk, if the job has a folder for that
    condemned: tuple[
        tuple[int, Generation], ...
    ] = ()  # ranks whose processes, started by that generation, are to be killed
    publish: Stamp | None = None  # make this checkpoint on disk visible, which rank 0 here has reported as whole


class Probe(Message, frozen=True):
    """Dial these neighbours' probe ports and say how it went."""

    peers: tuple[PeerProbe, ...]


class SaveStacks(Message, frozen=True):
    """Say where all threads of all workers are."""


class Drill(Message, frozen=True):
    """Do this harm to yourself. `rank` is -1 when the drill is about the node; `value`, `duration` as in FaultRequest."""

    kind: DrillKind
    rank: int = -1
    value: float = 0.0
    duration: float = 0.0


# --- hosts that join by themselves (the same command on every host) --------------------------------------------------


class JoinRequest(Message, frozen=True):
    hostname: str
    node_rank: int  # --node-rank, -1: the supervisor chooses
    incarnation: str
    slots: int  # --nproc-per-node as resolved on that host
    python: str  # the interpreter's path
    cwd: str
    environment: dict[str, str]
    log_dir: str


class JoinReply(Message, frozen=True):
    """Either a bootstrap, or why not."""

    bootstrap: AgentBootstrap | None
    refusal: str = ""


class Leaving(Message, frozen=True):
    """A host that joined was told by a signal to go: its ranks need another one."""

    incarnation: str
    signal: int


class JobEnded(Message, frozen=True):
    """To a host that joined, or still asks: the job is over, with this exit code. `text`: lines for its screen."""

    exit_code: int
    text: str = ""


FromAgent = Hello | NodeReport | ProbeReport | Remark | StackTrace | Farewell | Deposed
FromJoiner = JoinRequest | Leaving
ToAgent = Prepare | ReportAck | NodePlan | Probe | SaveStacks | Drill
ToJoiner = JoinReply | JobEnded
Body = FromAgent | FromJoiner | FromCommand | ToAgent | ToJoiner | ToCommand

ENVELOPES: Final = msgspec.msgpack.Decoder(Envelope[Body])


def decode_envelope(data: bytes, job: str) -> Envelope[Body]:
    """Raises ProtocolError as `wire.opened` does."""
    return opened(data, ENVELOPES, job)
