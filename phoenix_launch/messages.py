"""Every message of the project: what supervisor, agents, fork servers and commands say to each other.

All are frozen msgspec structs over msgpack, tagged by their class name, with unknown fields refused. On the bus each
travels in an `Envelope` that names protocol, job and generation. Those within a node are in `local_messages.py`.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from phoenix_launch.errors import ProtocolError

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 8 << 20
JOINING: Final = "joining"  # in place of the job's id, from and to hosts that do not know it yet


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages; its tag is the class name."""


class Generation(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """(term, n): n grows at every change of the map rank -> process, term at every change of supervisor."""

    term: int
    n: int

    def following(self) -> Generation:
        return Generation(self.term, self.n + 1)

    def __str__(self) -> str:
        return f"g{self.n}" if self.term == 1 else f"t{self.term}g{self.n}"


NO_GENERATION: Final = Generation(0, 0)


# --- training state in memory: what a report offers and a plan names (the rules are in job/commit.py) ----------------


class Stamp(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which state it is: the generation that computed it, and the version (steps completed before it)."""

    generation: Generation
    version: int


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One in-memory copy of one bundle. `layout`: digest of names, shapes and types; `sealed`: it is whole."""

    stamp: Stamp
    layout: str = ""
    sealed: bool = True


class KeptSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node keeps this slot of the bundle with this key, its own or another node's replica."""

    bundle: str
    slot: Slot


class SourceKind(enum.Enum):
    """Where a rank takes a bundle from; cheapest first."""

    ITSELF = "itself"  # live there; the private bundle from the copy that was taken at the step's entry
    OWN_NODE = "own-node"  # a slot of the node it runs on
    OTHER_NODE = "other-node"  # a slot of another node, one of its own or a replica
    HOLDER = "holder"  # another rank that is live and holds the same bundle


class Source(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One bundle of one rank comes from here. `node`: whose slot, or where the `holder` runs."""

    bundle: str
    kind: SourceKind
    node: int
    holder: int = -1


# --- what the launcher knows about a job, as it travels to the nodes -------------------------------------------------


class RunMode(enum.Enum):
    SCRIPT = "script"  # python SCRIPT ARGS
    MODULE = "module"  # python -m MODULE ARGS
    RUN_PATH = "run-path"  # runpy.run_path in a fresh interpreter
    EXEC = "exec"  # --no-python: the command itself


class StartMethod(enum.Enum):
    FORK = "fork"
    SPAWN = "spawn"


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every worker runs. `preload` is "auto", "none" or a comma-separated list of modules."""

    mode: RunMode
    target: str
    args: tuple[str, ...]
    python: str
    start_method: StartMethod = StartMethod.FORK
    preload: str = "auto"
    virtual_local_rank: bool = False
    numa_binding: str = ""  # --numa-binding, empty: none


class StreamChoice(enum.IntFlag):
    """torchrun's Std: which of a worker's streams an option speaks of."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class OutputSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the output of a node's workers goes. Maps are by local rank; the key -1 holds for all others."""

    folder: str  # logs/NODE of the job's folder (or of --log-dir)
    redirects: dict[int, int] = {}
    tees: dict[int, int] = {}
    console_local_ranks: tuple[int, ...] | None = None  # --local-ranks-filter
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    torchrun_folder: str = ""  # <log-dir>/<run id>_<random>_<node>, empty without --redirects, --tee and filters
    line_prefix_template: str = ""  # TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE
    role: str = "default"
    size_limit: int = 1 << 30  # bytes a log file may reach before it is rotated (one older file is kept)
    files: bool = True  # False: --log-dir /dev/null


class AgentTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of the table of timeouts that an agent needs, in seconds."""

    heartbeat_interval: float
    orphan: float
    connect: float
    fork_server: float
    drain_output: float
    reap: float


class AgentBootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent gets on its stdin as one line of JSON: everything, keys included, never in argv, never by a shell."""

    job: str
    node: str
    index: int
    term: int
    incarnation: str
    control_endpoint: str
    output_endpoint: str
    server_key: str  # CURVE, Z85
    public_key: str
    secret_key: str
    environment: dict[str, str]  # the whole environment of the workers, before the per-rank part
    cwd: str
    command: Command
    output: OutputSettings
    timeouts: AgentTimeouts
    interface: str = ""  # --interface; empty: the address by which the supervisor is reached
    address: str = ""  # the address other hosts know this node by, empty: find out (ssh's, else towards the supervisor)
    port_low: int = 0  # --port-range, 0: any
    port_high: int = 0
    simulated: bool = False


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


class RuntimeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker says that knows the runtime: it can leave a step, be restored and go on."""

    holds: tuple[str, ...] = ()  # keys of its bundles, from the first step's entry on
    private: str = ""  # which of them is its private one
    complete: int = -1  # the newest version that its copier knows to be complete
    joined: Generation = NO_GENERATION  # the generation that it has left its step for, or was started for
    live: Stamp | None = None  # what it offers to that generation, None: it is dirty, or new
    address: str = ""  # of its communicators in that generation
    restored: Generation = NO_GENERATION  # it holds the resume version of this generation, and its communicators are up


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    generation: Generation  # that started this process
    pid: int
    state: ProcessState
    step: int = -1  # from the progress page, -1: unknown
    exit: ExitReport | None = None
    runtime: RuntimeReport | None = None


class StoreReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: Generation
    address: str
    port: int
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


class Farewell(Message, frozen=True):
    """The last word of an agent that was told to leave: nothing of it lives any more."""

    incarnation: str


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


class Resumption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a generation goes on from an older one. `stamp`: None while survivors are still asked what they have."""

    stamp: Stamp | None = None
    lineage: tuple[Stamp, ...] = ()  # at which version each generation resumed: what lies beyond is void
    addresses: dict[int, str] = {}  # rank -> address, empty until all are known


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


class Probe(Message, frozen=True):
    """Dial these neighbours' probe ports and say how it went."""

    peers: tuple[PeerProbe, ...]


class DrillKind(enum.Enum):
    KILL_WORKER = "kill-worker"
    KILL_NODE = "kill-node"
    KILL_AGENT = "kill-agent"


class Drill(Message, frozen=True):
    """Do this harm to yourself. `rank` is -1 when the drill is about the node."""

    kind: DrillKind
    rank: int = -1


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


# --- commands <-> supervisor -----------------------------------------------------------------------------------------


class StatusRequest(Message, frozen=True):
    pass


class StatusReply(Message, frozen=True):
    status: str  # JSON, the document of `status --json`


class StopRequest(Message, frozen=True):
    signal: int = 15


class FaultRequest(Message, frozen=True):
    """inject-fault: `node` is an index or a name, empty when `rank` is meant."""

    kind: DrillKind
    rank: int = -1
    node: str = ""
    dry_run: bool = False


class Answer(Message, frozen=True):
    """To a command that asked for something to be done."""

    ok: bool
    text: str = ""


FromAgent = Hello | NodeReport | ProbeReport | Remark | Farewell
FromJoiner = JoinRequest | Leaving
FromCommand = StatusRequest | StopRequest | FaultRequest
ToAgent = Prepare | ReportAck | NodePlan | Probe | Drill
ToJoiner = JoinReply | JobEnded
ToCommand = StatusReply | Answer
Body = FromAgent | FromJoiner | FromCommand | ToAgent | ToJoiner | ToCommand


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    protocol: int
    job: str
    generation: Generation
    body: Body


# --- worker output, agent -> supervisor's console (its own socket, so that a slow terminal never delays the bus) -----


class OutputChunk(Message, frozen=True):
    """Whole lines of one stream of one worker. `prefix`: what --tee asks for before each line, as torchrun writes it."""

    node: str
    rank: int
    generation: Generation
    stream: int  # 1 stdout, 2 stderr
    data: bytes
    prefix: str = ""


class OutputEnd(Message, frozen=True):
    """Everything that this worker wrote to this stream has been sent."""

    node: str
    rank: int
    generation: Generation
    stream: int


FromOutput = OutputChunk | OutputEnd


class OutputEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    protocol: int
    job: str
    body: FromOutput


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_outputs = msgspec.msgpack.Decoder(OutputEnvelope)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def checked(data: bytes) -> bytes:
    """The data, if it is not larger than anything we send. Raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes (at most {MAX_MESSAGE_BYTES} are taken)")
    return data


def decode_envelope(data: bytes, job: str) -> Envelope:
    """Raises ProtocolError for anything that is not a well-formed message of this protocol and job."""
    try:
        envelope = _envelopes.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"message of protocol {envelope.protocol}, this is {PROTOCOL}")
    if envelope.job != job:
        raise ProtocolError(f"message of job {envelope.job!r}, this is {job!r}")
    return envelope


def decode_output(data: bytes, job: str) -> FromOutput:
    """Raises ProtocolError as `decode_envelope` does."""
    try:
        envelope = _outputs.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed output message: {error}") from None
    if (envelope.protocol, envelope.job) != (PROTOCOL, job):
        raise ProtocolError(f"output of protocol {envelope.protocol}, job {envelope.job!r}")
    return envelope.body
