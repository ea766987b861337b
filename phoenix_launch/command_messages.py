"""What commands (`status`, `stop`, `inject-fault`) and the supervisor say to each other; no more, they end in 0.2 s."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from phoenix_launch.wire import Envelope, Message


class DrillKind(enum.Enum):
    KILL_WORKER = "kill-worker"
    KILL_NODE = "kill-node"
    KILL_AGENT = "kill-agent"
    KILL_SERVER = "kill-server"
    KILL_SUPERVISOR = "kill-supervisor"
    FAIL_SPARE = "fail-spare"
    FREEZE = "freeze"
    HANG = "hang"
    HANG_GIL = "hang-gil"
    SLOW = "slow"
    RAISE = "raise"
    EXIT = "exit"
    FLIP_BITS = "flip-bits"
    OOM = "oom"
    FILL_DISK = "fill-disk"
    DROP_BUS = "drop-bus"
    DELAY_BUS = "delay-bus"
    PARTITION = "partition"


class StatusRequest(Message, frozen=True):
    pass


class StatusReply(Message, frozen=True):
    status: str  # JSON, the document of `status --json`


class StopRequest(Message, frozen=True):
    signal: int = 15


class DrainRequest(Message, frozen=True):
    """drain: `node` is an index or a name."""

    node: str


class AddHostRequest(Message, frozen=True):
    """add-host; said again it asks what became of it."""

    host: str


class HostStage(enum.Enum):
    COMING = "coming"
    READY = "ready"
    REFUSED = "refused"


class HostReply(Message, frozen=True):
    stage: HostStage
    text: str


class FaultRequest(Message, frozen=True):
    """inject-fault: `node` is an index or a name, empty when `rank` is meant. `value`: an exit code, a factor; `duration`:
    seconds, 0: to the end (of a frozen node: `drills.FROZEN_SECONDS`)."""

    kind: DrillKind
    rank: int = -1
    node: str = ""
    dry_run: bool = False
    value: float = 0.0
    duration: float = 0.0


class Answer(Message, frozen=True):
    """To a command that asked for something to be done."""

    ok: bool
    text: str = ""


FromCommand = StatusRequest | StopRequest | DrainRequest | AddHostRequest | FaultRequest
ToCommand = StatusReply | HostReply | Answer

ANSWERS: Final = msgspec.msgpack.Decoder(Envelope[ToCommand])
