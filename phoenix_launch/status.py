"""The document of `phoenix-run status --json`, schema 1: a job, its nodes, its ranks; fields are only ever added."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from phoenix_launch.errors import PhoenixError

SCHEMA: Final = 1


class JobState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    SWAPPING = "swapping"
    PARKED = "parked"  # it needs a host or a supervisor to go on
    FINISHED = "finished"
    FAILED = "failed"
    ORPHANED = "orphaned"  # its supervisor is gone and did not say how it ended

    @property
    def final(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    role: str  # training, spare
    state: str  # starting, ready, suspect, lost, drained; left: the job has ended
    spares: int  # processes parked there, ready to become any rank
    host: str = ""  # empty: simulated
    sent_bytes: int = 0  # of copies, to other nodes, as its checkpoint server counts since it was started


class CopyStatus(msgspec.Struct, frozen=True):
    """What a rank's copies in memory come to, since its process was started."""

    state_bytes: int  # of all that it holds
    copied_bytes: int  # written into slots of its node
    sent_bytes: int  # of them, sealed on other nodes
    holders: int  # nodes that keep each of its bundles, at least


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: str  # the node's name
    pid: int | None
    state: str  # starting, parked, running, quiescing, restoring, gone
    step: int | None = None  # null: it does not say
    copies: CopyStatus | None = None  # null: none yet
    compute_s: float | None = None  # seconds of a step in which it did not wait for others; null: not known yet
    slow: float | None = None  # how many times as long as its peers' that is; null: it is not slow


class Move(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    from_node: str
    to_node: str
    source: str = ""


class SwapStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of the map rank -> process, in seconds."""

    rung: int
    lost_ranks: tuple[int, ...]
    moves: tuple[Move, ...] = ()
    resumed_step: int | None = None
    lost_steps: int | None = None
    phases: dict[str, float] = {}
    total: float | None = None
    why: str = ""  # not in place


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint on disk that this job has made visible."""

    step: int
    path: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    job: str
    state: JobState
    term: int = 1
    generation: int = 0
    step: int | None = None
    goodput: float | None = None
    redundancy: str | None = None  # full, restoring, degraded, none; null: the script keeps no copies, or not yet
    redundancy_reason: str = ""
    exit_code: int | None = None
    nodes: tuple[NodeStatus, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    last_swap: SwapStatus | None = None
    checkpoint: CheckpointStatus | None = None
    reason: str = ""  # one line of why it ended as it did, or is orphaned
    stopped_by: str = ""  # the signal that ended it, or that `stop` sent; its state is "failed" then
    as_of: float | None = None  # unix seconds: when all of this was so
    restarts: int = 0  # of --max-restarts
    dropped_messages: int = 0  # on the bus: malformed, or under a key that it does not know (any more)
    strangers: int = 0  # connections to the bus that came and went without a key it knows


def encode_status(status: JobStatus) -> bytes:
    return msgspec.json.encode(status)


def decode_status(data: bytes | str) -> JobStatus:
    """Raises PhoenixError for anything else than such a document; fields of later versions are left out."""
    try:
        return msgspec.json.decode(data, type=JobStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PhoenixError(
            f"the status cannot be read: {error}", hint="was the job started by another version of phoenix-run?"
        ) from None
