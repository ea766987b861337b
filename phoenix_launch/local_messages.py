"""What the processes of one node say to each other, over Unix sockets (`channel.py`)."""

from __future__ import annotations

import msgspec

from phoenix_launch.bootstrap import Command
from phoenix_launch.command_messages import DrillKind
from phoenix_launch.copies import KeptSlot, SlotPeer, Source, Stamp, StartupCopy
from phoenix_launch.errors import ProtocolError
from phoenix_launch.messages import Ground, NoRoom, PlanPhase, Resumption, RuntimeReport
from phoenix_launch.wire import Generation, Message, checked


class ForkServerSettings(Message, frozen=True):
    """First message to a fork server. Its process environment is already the workers'."""

    command: Command
    agent_pid: int


class ForkServerReady(Message, frozen=True):
    """Torch and the script's imports are loaded. `fork_unsafe`: why no fork is possible here (then workers are spawned)."""

    seconds: float
    loaded: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    fork_unsafe: str = ""


class Park(Message, frozen=True):
    """Fork a process that waits. Descriptors that come along: its control socket, its stdout, its stderr."""

    slot: int


class Parked(Message, frozen=True):
    """From the new process on its control socket: re-parented to the agent, death signal set, waiting."""

    pid: int


class Become(Message, frozen=True):
    """To a parked process: run the script as this worker."""

    environment: dict[str, str]
    args: tuple[str, ...]  # after ${local_rank} was put in


class BecomeStore(Message, frozen=True):
    """To a parked process: host the TCPStore of a generation on this address; answered by StoreUp."""

    address: str
    port: int
    port_low: int = 0
    port_high: int = 0


class StoreUp(Message, frozen=True):
    port: int
    error: str = ""


# --- agent <-> checkpoint server -------------------------------------------------------------------------------------


class CheckpointSettings(Message, frozen=True):
    """First message to a checkpoint server. `key`: the job's, hexadecimal, the same on all nodes."""

    job: str
    node: int
    agent_pid: int
    key: str
    socket: str  # path on which it listens for workers
    address: str  # on which it listens for other nodes' servers
    port_low: int = 0  # --port-range, 0: any
    port_high: int = 0
    memory: int = 0  # --copy-memory: bytes that all copies may take, 0: what is free
    bandwidth: int = 0  # --replica-bandwidth: bytes a second that replicas are sent at, 0: no limit
    encrypt: bool = False


class CheckpointUp(Message, frozen=True):
    """It listens, for other nodes on this port; or why not."""

    port: int
    error: str = ""


class SlotRules(Message, frozen=True):
    """Where the job stands; the whole of it each time. Of an older generation than was known it is not heard.

    `lineage`: at which version each generation resumed; `workers`: the pids that may ask for slots.
    """

    generation: Generation
    resume: int
    lineage: tuple[Stamp, ...]
    workers: tuple[int, ...]
    peers: tuple[SlotPeer, ...]


class SaveSlots(Message, frozen=True):
    """Write all sealed slots to disk, below this folder. `world`: ranks of the job."""

    folder: str
    world: int


class SlotsSaved(Message, frozen=True):
    """All is down on the disk in this folder, or why it is not."""

    folder: str
    error: str = ""


class CutOff(Message, frozen=True):
    """A drill: for so many seconds no other node's server is called, and none is answered."""

    seconds: float


class SlotsKept(Message, frozen=True):
    """All sealed slots of this node, sent when they change: nobody older than `generation` changes them any more."""

    generation: Generation
    kept: tuple[KeptSlot, ...]
    sent: int = 0  # bytes that this server has sent to others', for safety


# --- worker <-> checkpoint server ------------------------------------------------------------------------------------


class FillSlot(Message, frozen=True):
    """May I write this copy? Answered by SlotToFill, SlotHeld or SlotRefused. `complete`: the newest complete version."""

    generation: Generation  # of the worker
    bundle: str
    stamp: Stamp
    complete: int
    size: int  # bytes of memory
    expected: int = 0  # bytes that later versions will need, as far as is known
    part: int = 0  # which slice this worker fills ...
    parts: int = 1  # ... of so many; the others are filled by other workers of this node


class Demands(Message, frozen=True):
    """What this worker is going to fill: bundle, bytes of a copy as far as is known, replicas on other nodes. Not answered."""

    copies: tuple[tuple[str, int, int], ...]


class SlotToFill(Message, frozen=True):
    """Fill the memory that comes along: slot `index` of the pair. `serial` names it, so that it is mapped once only."""

    bundle: str
    stamp: Stamp
    index: int
    serial: int


class SlotHeld(Message, frozen=True):
    """This very copy is here already, sealed."""

    bundle: str
    stamp: Stamp


class SlotRefused(Message, frozen=True):
    """`no_room`: the node's memory is too small, so that it is of no use to ask again."""

    bundle: str
    stamp: Stamp
    why: str
    no_room: NoRoom | None = None


class SlotSealed(Message, frozen=True):
    """The copy is whole (sealed in its memory, or SlotHeld). Copy it to these nodes; one CopySealed for each, and for this
    node. May be said again."""

    generation: Generation
    bundle: str
    stamp: Stamp
    complete: int
    replicas: tuple[int, ...]


class CopySealed(Message, frozen=True):
    """The copy on this node is sealed, or why it is not."""

    bundle: str
    stamp: Stamp
    node: int
    error: str = ""
    no_room: NoRoom | None = None


class ReadSlot(Message, frozen=True):
    """Let me read this copy: what this node keeps (SlotToRead), else what `node` keeps (-1: nobody else is asked), which
    comes as a stream (SlotStream). `keep`: other workers of this node want it, too: it is to be kept here, and read from there.
    """

    generation: Generation
    bundle: str
    stamp: Stamp
    complete: int
    node: int = -1
    keep: bool = False


class SlotDamaged(Message, frozen=True):
    """What this node keeps as this copy has other bits than were written: it is to be forgotten."""

    bundle: str
    stamp: Stamp


class SlotToRead(Message, frozen=True):
    """The memory that comes along holds it, and cannot be written to."""

    bundle: str
    stamp: Stamp


class SlotStream(Message, frozen=True):
    """The copy comes from another node through the pipe that comes along: its table and extras as in a slot, then the data.
    SlotStreamed follows, or SlotRefused. `layout`, `data_sum`: of its label; `table`, `extras`, `data`: their bytes."""

    bundle: str
    stamp: Stamp
    layout: str
    data_sum: str
    table: int
    extras: int
    data: int


class SlotStreamed(Message, frozen=True):
    """All is through, and table and extras are what the other node sent. `head`: digest of these; `data_crc`: what the data
    must have, if the label has no sum of it."""

    bundle: str
    stamp: Stamp
    head: bytes
    data_crc: int


# --- worker <-> agent ------------------------------------------------------------------------------------------------


class WorkerReport(Message, frozen=True):
    """From a worker that knows the runtime, the whole of what it says; the first one is its hello."""

    runtime: RuntimeReport


class WorkerPlan(Message, frozen=True):
    """To a worker: what its node's plan is for it. The whole of it each time; sent when it says hello, and at each change.

    A plan of phase SWAP and a new generation is the notice of a fault: the step under way is not going to be finished.
    """

    generation: Generation
    phase: PlanPhase  # RUN or SWAP
    node: int
    alone: bool  # it was started for a swap: it has to start alone, with groups that have no communicators
    slots: str  # the path of the checkpoint server's socket, empty: it is not up yet
    ground: Ground | None = None
    resumption: Resumption | None = None
    sources: tuple[Source, ...] = ()  # for this rank
    startup: StartupCopy | None = None
    leave: bool = False  # all scripts are over: it need not wait any longer
    published: Stamp | None = None  # this checkpoint on disk was made visible, or cannot be
    halt: bool = False  # as in the node's plan


class WorkerDrill(Message, frozen=True):
    """To a worker of a job that allows it: harm yourself so in your next step. `value`, `duration` as in FaultRequest."""

    kind: DrillKind
    value: float = 0.0
    duration: float = 0.0


FromCheckpoint = SlotToFill | SlotHeld | SlotRefused | CopySealed | SlotToRead | SlotStream | SlotStreamed
CheckpointLocal = (
    CheckpointSettings
    | CheckpointUp
    | SlotRules
    | SlotsKept
    | SaveSlots
    | CutOff
    | SlotsSaved
    | FillSlot
    | SlotSealed
    | ReadSlot
    | SlotDamaged
    | Demands
    | FromCheckpoint
)
WorkerLocal = WorkerReport | WorkerPlan | WorkerDrill
NodeLocal = (
    ForkServerSettings
    | ForkServerReady
    | Park
    | Parked
    | Become
    | BecomeStore
    | StoreUp
    | CheckpointLocal
    | WorkerLocal
)

_locals = msgspec.msgpack.Decoder(NodeLocal)


def decode_local(data: bytes) -> NodeLocal:
    try:
        return _locals.decode(checked(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message on a local socket: {error}") from None
