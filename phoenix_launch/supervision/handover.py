"""What a supervisor leaves behind for another one that takes over: written when it changes, so that a SIGKILL costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from phoenix_launch import __version__
from phoenix_launch.errors import PhoenixError, SupersededError
from phoenix_launch.hosts.environment import SECRETS, is_text
from phoenix_launch.hosts.specs import NodeSpec
from phoenix_launch.job.state import State
from phoenix_launch.messages import HostFacts
from phoenix_launch.records.folders import JobFolder
from phoenix_launch.supervision.muster import Muster
from phoenix_launch.supervision.opening import Job
from phoenix_launch.supervision.preparation import Preparation

Left = TypeVar("Left", "Heritage", "Handover")
LOOK_SECONDS: Final = 1.0  # between two looks whether somebody has taken over


class Heritage(msgspec.Struct, frozen=True):
    """What stays the same as long as the job does."""

    phoenix: str  # version
    slots_key: str
    environ: dict[str, str]
    cwd: str
    specs: tuple[NodeSpec, ...]
    joined: bool  # hosts came by themselves


def heritage_of(job: Job) -> Heritage:
    environ = {name: value for name, value in job.environ.items() if name not in SECRETS and is_text(name + value)}
    return Heritage(__version__, job.slots_key, environ, job.cwd, job.specs, job.joining is not None)


class AgentRecord(msgspec.Struct, frozen=True):
    """Where an agent is that takes part, and by which key it is known."""

    spec: NodeSpec
    incarnation: str
    public_key: str
    facts: HostFacts


class Handover(msgspec.Struct, frozen=True):
    """Where the job stands."""

    agents: tuple[AgentRecord, ...]
    prepared: dict[str, str] | None  # the environment that is fixed for the whole job
    state: State


def read_heritage(folder: JobFolder) -> Heritage:
    """Raises PhoenixError when this version cannot go on with it."""
    found = _decoded(folder, "heritage", Heritage)
    if found.phoenix != __version__:
        raise PhoenixError(
            f"job {folder.job} was started by phoenix-run {found.phoenix}, this is {__version__}",
            hint="use the phoenix-run that has started it",
        )
    return found


def read_handover(folder: JobFolder) -> Handover:
    """Raises PhoenixError."""
    return _decoded(folder, "handover", Handover)


def _decoded(folder: JobFolder, name: str, kind: type[Left]) -> Left:
    try:
        return msgspec.json.decode(folder.read_private(name), type=kind)
    except FileNotFoundError:
        raise PhoenixError(
            f"job {folder.job} had not begun when its supervisor ended, or has ended: there is nothing to go on with",
            hint="start it again",
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PhoenixError(f"what the supervisor of job {folder.job} left behind cannot be read: {error}") from None


@dataclass
class Keeper:
    """Writes it down for the supervisor of `term`, and sees whether there is one of a higher term."""

    folder: JobFolder
    muster: Muster
    preparation: Preparation
    term: int
    _written: tuple[object, ...] = ()
    _looked_at: float = float("-inf")
    _unsaved: bool = field(default=False)

    def keep(self, state: State, now: float) -> str:
        """Returns what went wrong, once. Raises SupersededError."""
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.look()
        if not state.lineup or (key := essence(state)) == self._written:
            return ""
        self._written = key
        agents = tuple(
            AgentRecord(recruit.spec, recruit.incarnation, recruit.keys.public, recruit.facts)
            for recruit in self.muster.recruits.values()
            if recruit.admitted and not recruit.dismissed and recruit.facts is not None
        )
        try:
            self.folder.write_private(
                "handover", msgspec.json.encode(Handover(agents, self.preparation.decided, state))
            )
        except PhoenixError as error:
            first, self._unsaved = not self._unsaved, True
            return f"{error.message}: no other supervisor could take over" if first else ""
        return ""

    def look(self) -> None:
        """Raises SupersededError when the job's folder names a supervisor of a higher term."""
        try:
            term = self.folder.read_record().term
        except PhoenixError:
            return  # a disk that is away for a moment
        if term > self.term:
            raise SupersededError(self.folder.job, term)


def essence(state: State) -> tuple[object, ...]:
    """What another supervisor has to know of a state; the rest it hears from the nodes."""
    members = tuple(
        (i, m.incarnation, m.state, m.left, m.server, m.avoided, m.draining) for i, m in state.members.items()
    )
    holders = tuple(
        (h.rank, h.node, h.born, h.seen, h.runtime.holds if h.runtime is not None else None)
        for h in state.holders.values()
    )
    swap = None if state.swap is None else (state.swap.recovery, state.swap.linked)
    return (
        state.generation, state.phase, state.lineup, state.store, state.rung, state.resume, swap, state.lineage,
        state.leave, state.restarts_used, state.outcome, members, holders, frozenset(state.ended),
        state.odd, state.halt,
    )  # fmt: skip
