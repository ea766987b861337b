"""What is told about a repair: what was lost, what took its place and from where, how far all went back, how long it took.

Told by the actions of the state machine and by the reports, in the order in which they come; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from phoenix_launch.copies import Source, SourceKind
from phoenix_launch.job import recovery
from phoenix_launch.job.events import FaultFound
from phoenix_launch.job.recovery import Recovery
from phoenix_launch.job.state import Rung, State
from phoenix_launch.messages import NodeReport
from phoenix_launch.status import Move, SwapStatus
from phoenix_launch.wire import NO_GENERATION, Generation
from phoenix_launch.wording import counted, ranks_named

# Of a script that does not know the runtime: its workers are forked again, too.
NUMBERS = {Rung.START: 2, Rung.IN_PLACE: 1, Rung.FROM_SLOTS: 2, Rung.FROM_SCRIPT: 3}
HOW = {
    Rung.IN_PLACE: "swapped in place",
    Rung.FROM_SLOTS: "all workers are started again from the copies in memory",
    Rung.FROM_SCRIPT: "all workers run the script again, from its newest checkpoint on disk or else from the beginning",
}
SCRIPT = "script"  # where a process has its state from that was told nothing


@dataclass(slots=True)
class _Repair:
    """One that is under way. Moments by the supervisor's clock; 0: not yet."""

    found: float
    detect: float
    lost: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # ranks whose node is lost: their last report may be an old one
    why: str = ""
    begun: float = 0.0
    planned: float = 0.0
    linked: float = 0.0
    recovery: Recovery | None = None


@dataclass(slots=True)
class Repairs:
    """The repair under way, if any, and what has to be remembered for it."""

    last: SwapStatus | None = None
    _ran: Generation = NO_GENERATION  # all ranks ran together last in this generation
    _homes: dict[int, str] = field(default_factory=dict)  # rank -> name of the node where it ran then
    _steps: dict[tuple[int, Generation], int] = field(default_factory=dict)  # by the process of a rank
    _repair: _Repair | None = None

    def inherit(self, state: State) -> None:
        """All ran together as the last supervisor has written down."""
        self._ran = state.generation
        self._homes = {place.rank: state.members[place.node].name for place in state.places}

    def observe(self, report: NodeReport) -> None:
        for rank in report.ranks:
            if rank.step >= 0:
                self._steps[rank.rank, rank.generation] = rank.step

    def fault(self, fault: FaultFound, now: float) -> None:
        if not fault.ranks:
            return
        if self._repair is None:
            self._repair = _Repair(now, fault.after)
        self._repair.lost |= set(fault.ranks)
        self._repair.gone |= set(fault.ranks) if fault.kind == "node" else set()

    def because(self, why: str) -> None:
        if self._repair is not None:
            self._repair.why = why

    def began(self, now: float) -> None:
        """Also when one that was under way has come to nothing."""
        self._repair = replace(self._repair or _Repair(now, 0.0), begun=now, planned=0.0, linked=0.0, recovery=None)

    def planned(self, found: Recovery, now: float) -> None:
        if self._repair is not None:
            self._repair.planned, self._repair.recovery = now, found

    def linked(self, now: float) -> None:
        if self._repair is not None:
            self._repair.linked = now

    def announcement(self, generation: Generation, moved: Iterable[Move]) -> str:
        """What is said when all workers are about to end."""
        why = self._repair.why if self._repair is not None else ""
        targets = _targets(moved)
        return f"restarting all workers ({generation}){targets and ': '}{targets}{why and '; '}{why}"

    def ran(self, state: State, now: float) -> str:
        """A generation runs. Returns a line about how it came to that; nothing about a start, or of a plain script."""
        repair, rung = self._repair, state.rung
        names = {index: member.name for index, member in state.members.items()}
        text = ""
        if repair is not None and self._ran != NO_GENERATION:
            found = repair.recovery
            again = None if found is None else found.stamp.version + 1
            lost = None if found is None else recovery.lost_steps(self._reached(repair), found.stamp.version)
            self.last = SwapStatus(
                rung=NUMBERS[rung],
                lost_ranks=tuple(sorted(repair.lost)),
                moves=self._moves(state, names, found),
                resumed_step=again,
                lost_steps=lost,
                phases=_phases(repair, rung, now),
                total=repair.detect + now - repair.found,
                why=repair.why,
            )
            text = self._told(state.generation, rung)
        self._repair, self._ran = None, state.generation
        self._homes = {place.rank: names[place.node] for place in state.places}
        born = {(holder.rank, holder.born) for holder in state.holders.values()}
        self._steps = {key: step for key, step in self._steps.items() if key in born}
        return text

    def _told(self, generation: Generation, rung: Rung) -> str:
        last = self.last
        if last is None or rung not in HOW:
            return ""
        words = []
        if rung is Rung.IN_PLACE and last.moves:
            words.append(_targets(last.moves))
        elif last.why:
            words.append(last.why)
        if last.resumed_step is not None:
            words.append(f"step {last.resumed_step} is run again, {counted(last.lost_steps or 0, 'step')} lost")
        text = "; ".join(words)
        return f"{HOW[rung]} ({generation}){text and ': '}{text}, {last.total:.2f} s"

    def _reached(self, repair: _Repair) -> list[int]:
        """The newest version of each rank, by the process that held it when all ran together."""
        newest: dict[int, tuple[Generation, int]] = {}
        for (rank, born), step in self._steps.items():
            if rank not in repair.gone and born <= self._ran and (rank not in newest or born > newest[rank][0]):
                newest[rank] = (born, step)
        return [step for _, step in newest.values()]

    def _moves(self, state: State, names: dict[int, str], found: Recovery | None) -> tuple[Move, ...]:
        """Ranks that go on in another process; of a script that brings its state itself those that go on elsewhere."""
        moves = []
        for place in state.places:
            before, now = self._homes.get(place.rank, names[place.node]), names[place.node]
            if found is None and before != now:
                moves.append(Move(rank=place.rank, from_node=before, to_node=now, source=SCRIPT))
            elif found is not None and state.holders[place.rank].born > self._ran:
                source = _named(found.sources[place.rank], names)
                moves.append(Move(rank=place.rank, from_node=before, to_node=now, source=source))
        return tuple(moves)


def _phases(repair: _Repair, rung: Rung, now: float) -> dict[str, float]:
    """Seconds. In place: `rebuild` lasts until all have said where they can be reached, `restore` until all can go on; that
    both are under way at the same time is not told apart. Else all from the old workers' end on is `quiesce`."""
    phases = {"detect": repair.detect, "plan": repair.begun - repair.found}
    if rung is not Rung.IN_PLACE or not repair.planned:
        return phases | {"quiesce": now - repair.begun}
    linked = repair.linked or now
    return phases | {
        "quiesce": repair.planned - repair.begun,
        "rebuild": linked - repair.planned,
        "restore": now - linked,
    }


def _named(sources: Iterable[Source], names: dict[int, str]) -> str:
    """`own-node`, `other-node:node2`; of several all, in their order."""
    words = [
        f"{source.kind.value}:{names[source.node]}"
        if source.kind in (SourceKind.OTHER_NODE, SourceKind.HOLDER)
        else source.kind.value
        for source in sources
    ]
    return "+".join(dict.fromkeys(words))


def _targets(moves: Iterable[Move]) -> str:
    """`ranks 2-3 node1 -> node2, rank 4 on node3`, once for each pair of nodes."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        pairs.setdefault((move.from_node, move.to_node), []).append(move.rank)
    return ", ".join(
        f"{ranks_named(ranks)} {f'{source} -> {to}' if source != to else f'on {to}'}"
        for (source, to), ranks in pairs.items()
    )
