"""What can happen to a job (events), and what follows for those who act (actions). Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phoenix_launch.job.recovery import Recovery
from phoenix_launch.job.state import Ended, Outcome, Rung
from phoenix_launch.messages import NodePlan, NodeReport, OddBits
from phoenix_launch.wire import Generation

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A node passed its preflight (for the first time, or again after it was lost: then it is a spare node)."""

    index: int
    name: str
    domain: str
    slots: int
    incarnation: str
    spare: bool = False
    group_rank: int = -1


@dataclass(frozen=True, slots=True)
class Reported:
    index: int
    report: NodeReport


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The ssh session ended and says nothing about the node: one probe decides."""

    index: int


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The node's guardian is known to have ended, and with it everything there; or the agent said farewell."""

    index: int
    incarnation: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StopAsked:
    signal: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """This node is to be left."""

    index: int


@dataclass(frozen=True, slots=True)
class HostAdded:
    """This node is wanted (again), whatever became of it before."""

    index: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Something outside this machine decides the end (preflight of a start that cannot work ...)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OutputHeld:
    """The job is over, but nobody was told to leave yet: what workers wrote is still being shown."""


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """Where this rank's process is, the one that this generation started. `last`: no other of its node comes."""

    index: int
    rank: int
    generation: Generation
    where: str
    last: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    pass


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a node that follows the new supervisor was last told, and what it is like."""

    plan: NodePlan | None
    report: NodeReport


@dataclass(frozen=True, slots=True)
class Resumed:
    """Another supervisor goes on with the state that the last one left behind. `nodes`: who follows it."""

    term: int
    nodes: Mapping[int, Inherited]


Event = (
    Resumed
    | Admitted
    | Reported
    | ChannelClosed
    | AgentEnded
    | StopAsked
    | DrainAsked
    | HostAdded
    | GaveUp
    | OutputHeld
    | StacksTaken
    | Ticked
)


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFound:
    """For the journal and the screen. `after`: seconds since it happened, as far as is known.

    kind: "worker", "node", "straggler", "corruption", or "hang", whose `node` is -1 when no rank in particular is to blame.
    """

    kind: str
    node: int
    ranks: tuple[int, ...]
    detail: str
    cause: Ended | None = None
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound:
    """For the journal and the screen: a rank is slow, in seconds of a step, or (`over`) no longer."""

    rank: int
    node: int
    compute: float
    median: float
    over: bool = False


@dataclass(frozen=True, slots=True)
class CorruptionFound:
    """For the journal, and, when nobody can be blamed, for the screen."""

    found: OddBits


@dataclass(frozen=True, slots=True)
class StacksWanted:
    """Of all workers: a hang is looked into before anybody is ended. `age`: seconds since somebody has moved."""

    age: float


@dataclass(frozen=True, slots=True)
class GenerationBegun:
    """moved: ranks that are on another node than before, (rank, from node, to node)."""

    generation: Generation
    moved: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StartsAnew:
    """Nobody keeps its process in this repair."""

    rung: Rung
    why: str


@dataclass(frozen=True, slots=True)
class RecoveryFound:
    """Where all ranks of the generation take their state from."""

    generation: Generation
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class CommunicatorsKnown:
    """All ranks have said where their communicators of this generation are."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class GenerationRuns:
    generation: Generation


@dataclass(frozen=True, slots=True)
class WaitingForNode:
    text: str


@dataclass(frozen=True, slots=True)
class NodeDrained:
    """It has no ranks any more, and nobody needs what it keeps."""

    index: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing of this incarnation may go on: it is told to leave whenever it is heard of."""

    index: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Try to start the node's agent again; if it comes it is a spare node."""

    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: Outcome


Action = (
    FaultFound
    | StragglerFound
    | CorruptionFound
    | StacksWanted
    | GenerationBegun
    | StartsAnew
    | RecoveryFound
    | CommunicatorsKnown
    | GenerationRuns
    | WaitingForNode
    | NodeDrained
    | Fence
    | Relaunch
    | Finished
)
