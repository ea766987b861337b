"""The words in which an agent decides: the processes of a node as far as decisions go, and the actions that come out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phoenix_launch.messages import ProcessState, RankOrder
from phoenix_launch.wire import NO_GENERATION, Generation


class Role(enum.Enum):
    PARKING = "parking"  # asked of the fork server, not heard of yet
    PARKED = "parked"
    STORE = "store"
    WORKER = "worker"


@dataclass(slots=True)
class Member:
    """One process of this node, as far as decisions go."""

    key: int
    role: Role
    store_only: bool = False  # a store host that was started afresh: it cannot become a worker
    generation: Generation = NO_GENERATION
    order: RankOrder | None = None
    attempt: int = 0
    alone: bool = False  # a worker that was started for a swap, beside survivors
    pid: int = 0
    told: set[int] = field(default_factory=set)  # signals passed on to it
    kill_at: float | None = None
    code: int | None = None  # of its exit
    ended_at: float = 0.0
    killed: bool = False  # the end of its tree was decided
    cleared: bool = False  # nothing of its tree is left

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def state(self) -> ProcessState:
        if not self.alive:
            return ProcessState.GONE
        return ProcessState.QUIESCING if self.told or self.killed else ProcessState.RUNNING


class Forking(enum.Enum):
    """How processes come to be on this node."""

    UNPREPARED = "unprepared"  # Prepare has not come yet
    STARTING = "starting"  # the fork server loads
    UP = "up"
    DOWN = "down"  # it died too often
    SPAWN = "spawn"  # each process is started afresh


@dataclass(frozen=True, slots=True)
class StartForkServer:
    pass


@dataclass(frozen=True, slots=True)
class ParkProcess:
    key: int


@dataclass(frozen=True, slots=True)
class StartStoreHost:
    key: int


@dataclass(frozen=True, slots=True)
class RunWorker:
    """Make a worker of the parked process `key`; when `afresh`, start it as a new process of that key."""

    key: int
    order: RankOrder
    generation: Generation
    attempt: int
    afresh: bool


@dataclass(frozen=True, slots=True)
class HostStore:
    key: int
    generation: Generation
    port: int


@dataclass(frozen=True, slots=True)
class PassSignal:
    key: int
    signal: int


@dataclass(frozen=True, slots=True)
class EndTree:
    """SIGKILL whatever lives of this process's tree, until nothing does."""

    key: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """SIGKILL what belongs to no process of ours; only said when no worker lives that could own it."""


@dataclass(frozen=True, slots=True)
class Leave:
    pass


Action = StartForkServer | ParkProcess | StartStoreHost | RunWorker | HostStore | PassSignal | EndTree | Sweep | Leave
