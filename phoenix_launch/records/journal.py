"""The journal of a job, events.jsonl: one event a line, appended as it happens, to be read by people and programs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from phoenix_launch.wire import Generation


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake):
    """What every event has: `t` in unix seconds, `event` (the class name in snake case) and the generation it is of.

    Fields are only ever added, with a default.
    """

    t: float
    generation: Generation


class JobStarted(Event, frozen=True, kw_only=True):
    job: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    settings: dict[str, Any]


class WorkerStarted(Event, frozen=True, kw_only=True):
    node: str
    rank: int
    pid: int


class SpareParked(Event, frozen=True, kw_only=True):
    node: str
    pid: int


class Step(Event, frozen=True, kw_only=True):
    step: int
    loss: float | None = None
    step_s: float | None = None
    tokens: int | None = None


class Fault(Event, frozen=True, kw_only=True):
    kind: str
    node: str
    ranks: tuple[int, ...]
    detail: str


class Straggler(Event, frozen=True, kw_only=True):
    """A rank that computes longer in each step than its peers, which wait for it; or (`over`) no longer."""

    rank: int
    node: str
    compute_s: float
    median_s: float  # of its peers
    over: bool = False


class Corruption(Event, frozen=True, kw_only=True):
    """Holders of a bundle do not have the same bits at the entry of this step. `ranks`: who has others than most."""

    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    bundle: str
    tensor: str  # the first one
    step: int


class RankMove(msgspec.Struct, frozen=True):
    """A rank that goes on in another process. `source`: where its state came from."""

    rank: int
    from_node: str
    to_node: str
    source: str


class Swap(Event, frozen=True, kw_only=True):
    """A repair. `phases` and `total` are seconds, `resumed_step` is the first one that is run, again or for the first time;
    `why`: not in place."""

    rung: int
    lost_ranks: tuple[int, ...]
    moves: tuple[RankMove, ...]
    resumed_step: int | None
    lost_steps: int | None
    phases: dict[str, float]
    total: float
    why: str = ""


class Redundancy(Event, frozen=True, kw_only=True):
    state: str
    why: str = ""  # not full


class Checkpoint(Event, frozen=True, kw_only=True):
    step: int
    path: str


class Drill(Event, frozen=True, kw_only=True):
    kind: str
    target: str


class DrillEnded(Event, frozen=True, kw_only=True):
    """Seconds, None where it did not come to that: until its fault was found, from there until all ranks ran again, from there
    until the job was fully redundant again."""

    kind: str
    target: str
    detection: float | None = None
    recovery: float | None = None
    redundancy: float | None = None
    lost_steps: int | None = None


class NodeDrained(Event, frozen=True, kw_only=True):
    """Its ranks have moved, as was asked for, and it has left."""

    node: str


class SupervisorResumed(Event, frozen=True, kw_only=True):
    """Another supervisor has taken over. `adopted`: training went on all the time."""

    term: int
    nodes: tuple[str, ...]
    adopted: bool


class JobFinished(Event, frozen=True, kw_only=True):
    exit_code: int
    steps: int | None
    goodput: float | None


AnyEvent = (
    JobStarted | WorkerStarted | SpareParked | Step | Fault | Straggler | Corruption | Swap | Redundancy | Checkpoint | Drill
    | DrillEnded | NodeDrained | SupervisorResumed | JobFinished
)  # fmt: skip

_KINDS: Final[dict[str, type[Event]]] = {_snake(kind.__name__): kind for kind in Event.__subclasses__()}
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


class Journal:
    """Appends events. A disk that is full is said once, and costs events but never the job."""

    def __init__(self, path: Path, remark: Callable[[str], None]) -> None:
        self.path = path
        self._remark = remark
        self._fd = -1
        self._lost = 0  # events since the file could last be written

    def write(self, event: str, generation: Generation, **fields: Any) -> None:
        """Add one event by its name; wrong or missing fields raise msgspec.ValidationError."""
        content = {**fields, "event": event, "t": time.time(), "generation": generation}
        record = msgspec.convert(content, _KINDS[event])
        unknown = fields.keys() - set(type(record).__struct_fields__)
        if unknown:
            raise msgspec.ValidationError(f"event {event} has no field {', '.join(sorted(unknown))}")
        try:
            self._append(_encoder.encode(record) + b"\n")
        except OSError as error:
            self.close()
            if not self._lost:
                self._remark(f"the journal {self.path} cannot be written ({error.strerror or error}); the job goes on")
            self._lost += 1
        else:
            if self._lost:
                self._remark(f"the journal is written again; {self._lost} events are missing in it")
            self._lost = 0

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                line = b"\n" + line  # an earlier line was torn
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]


def read_events(path: Path) -> list[AnyEvent]:
    """All events in order; torn lines and kinds unknown to this version are left out, a missing file is empty."""
    events: list[AnyEvent] = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return events
    for line in content.split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            events.append(_decoder.decode(line))
    return events
